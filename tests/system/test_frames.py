"""Frames as networks have them: IPv6, VLAN tags, padding, trailers; and frames that are not for the RNIC."""

import random

import pytest
from tests.rules import rule
from tests.system.middle import MiddleLab
from tests.system.test_reads import atomic_wr, read_wr
from tests.system.test_slice import Region, frames_of, write_wr
from tests.unit.test_vectors import VECTORS

from rnic.wire.frame import Frame, parse_frame
from rnic.wire.opcode import Opcode
from rnic_sim.enums import WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.native import Port
from rnic_sim.qp import QPCap
from rnic_sim.verbs import RecvWR, SendWR


def every_operation(lab, a, b, length=700):
    """One of each; data compared."""
    rng = random.Random(length)
    near, far, inbox = Region(a.pd, 2000, offset=5), Region(b.pd, 2000, offset=9), Region(b.pd, 2000)
    data = rng.randbytes(length)
    near.put(data)
    b.post_recv(RecvWR(1, [inbox.sge(length)]), RecvWR(2, []))
    a.post_send(write_wr(1, [near.sge(length)], far.mr.rkey, far.addr), SendWR(2, WROpcode.SEND, [near.sge(length)]),
                write_wr(3, [near.sge(1)], far.mr.rkey, far.addr + length, imm=7),
                SendWR(4, WROpcode.RDMA_WRITE, []))  # fmt: skip
    assert [w.status for w in lab.wait_wc(a.scq, 4)] == [WCStatus.SUCCESS] * 4
    assert [w.byte_len for w in lab.wait_wc(b.rcq, 2)] == [length, 1]
    inbox.expect(data)
    far.expect(data + data[:1])
    near.clear()
    word = far.addr + -far.addr % 8
    at = 32 + word - far.addr
    old = far.mr.read(8, at)
    a.post_send(read_wr(5, [near.sge(length)], far.mr.rkey, far.addr))
    assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
    near.expect(data)
    a.post_send(atomic_wr(6, near.sge(8, 800), far.mr.rkey, word, add=1))
    assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
    assert near.mr.read(8, 32 + 800) == old
    assert int.from_bytes(far.mr.read(8, at), "little") == int.from_bytes(old, "little") + 1 & (1 << 64) - 1


@pytest.mark.parametrize("config", ["tiny", "hundred"])
@pytest.mark.parametrize("vlan", [None, 42])
@pytest.mark.parametrize("gid", [0, 1])
@rule("R-FRM-7", "R-ADR-1", "R-ADR-3", "R-ADR-4", "R-HDR-1", "R-FRM-2")
def test_ip_versions_and_vlan(config, vlan, gid):
    with Lab(config, seed=5) as lab:
        for i, context in enumerate(lab.contexts):
            context.set_gid(gid, lab.addresses(i)[gid], lab.mac(i), vlan=vlan)
        tag = {} if vlan is None else dict(vlan=3 << 13 | vlan)
        a, b = lab.rc_pair(gid=gid, traffic_class=0x28, hop_limit=17, flow_label=0xABCDE, mtu=256, **tag)
        every_operation(lab, a, b)
        frames = frames_of(lab, 0) + frames_of(lab, 1)
        assert {f.opcode for f in frames} >= {Opcode.RC_WRITE_FIRST, Opcode.RC_READ_RESP_MIDDLE, Opcode.RC_ATOMIC_ACK}
        for frame in frames:
            assert (frame.is_ipv6, frame.vlan) == (gid == 1, None if vlan is None else (3, 42))
            assert (frame.traffic_class, frame.hop_limit, frame.dport) == (0x28, 17, 4791)
            assert frame.sport >= 0xC000 and (frame.flow_label == 0xABCDE if gid else frame.dont_fragment)


@pytest.mark.parametrize("tag", [None, 0, 41])
@rule("R-FRM-7")
def test_frames_of_another_vlan(tag):
    """A priority tag (VID 0) is no VLAN; a frame of a VLAN that the GID does not have is not for us."""
    with MiddleLab("tiny") as lab:
        a, b = lab.rc_pair()
        far = Region(b.pd, 64)
        near = Region(a.pd, 64)
        near.put(b"q" * 64)
        lab.on(0, lambda n, f: None if tag is None else [Frame(**{**vars(f), "vlan": (5, tag)})])
        a.post_send(write_wr(1, [near.sge()], far.mr.rkey, far.addr))
        done = lab.drain(a.scq, 1, 800)
        dropped = tag == 41
        assert len(done) == (0 if dropped else 1)
        far.expect(b"" if dropped else b"q" * 64)
        assert b.context.driver.counters()["rx_not_for_us"] == dropped


@pytest.mark.parametrize("trailer", [1, 3, 4, 29, 64, 300])
@rule("R-FRM-1", "R-PAD-3")
def test_trailers_and_padding(trailer):
    """Bytes behind the datagram, both ways, on every frame: MAC padding to 60 bytes and more."""
    rng = random.Random(trailer)
    with MiddleLab("tiny") as lab:
        a, b = lab.rc_pair(mtu=256)
        for i in range(2):
            lab.on(i, lambda n, f: [f.pack().ljust(60, b"\0") + rng.randbytes(trailer)])
        every_operation(lab, a, b)
        every_operation(lab, a, b, 1)
        assert {"rx_bad_length", "rx_bad_icrc"} & {k for k, v in b.context.driver.counters().items() if v} == set()


def foreign(rng: random.Random) -> list[bytes]:
    """Frames for the host side."""
    mac, own = bytes.fromhex("020000000002"), bytes.fromhex("020000000001")
    ip = bytearray(parse_frame(VECTORS["A1"]).pack())
    tcp = bytes(ip[:23] + b"\x06" + ip[24:])
    other_port = bytes(ip[:36] + b"\x12\xb8" + ip[38:])
    fragment = bytes(ip[:20] + b"\x00\x10" + ip[22:])
    frames = [b"\xff" * 6 + own + b"\x08\x06" + rng.randbytes(46), tcp, other_port, fragment, VECTORS["V3"], VECTORS["V4"]]
    frames += [mac + own + b"\x88\xcc" + rng.randbytes(n) for n in (1, 46, 50, 200, 1500)]
    return [f.ljust(60, b"\0") for f in frames]


@pytest.mark.parametrize("config", ["tiny", "hundred"])
@rule("R-FRM-1", "R-ICRC-9")
def test_frames_of_the_host_side(config):
    """ARP, TCP, other UDP ports, later fragments, RoCEv1, LLDP go from eth_tx of one machine to eth_rx of the other, whole and in
    order, while RDMA traffic of both ends goes on."""
    rng = random.Random(3)
    with Lab(config, seed=3) as lab:
        a, b = lab.rc_pair(cap=QPCap(8, 8))
        near, far = Region(a.pd, 4000), Region(b.pd, 4000)
        data = rng.randbytes(4000)
        near.put(data)
        sent = foreign(rng) * 2
        for _ in range(4):
            a.post_send(write_wr(1, [near.sge()], far.mr.rkey, far.addr))
            b.post_send(read_wr(2, [far.sge(300, 500)], near.mr.rkey, near.addr + 500))
        for frame in sent:
            lab.world.nic[0].inject(frame, port=Port.ETH_TX)
            lab.relax(rng.randrange(60))
        assert [w.status for w in lab.wait_wc(a.scq, 4)] == [WCStatus.SUCCESS] * 4
        assert [w.status for w in lab.wait_wc(b.scq, 4)] == [WCStatus.SUCCESS] * 4
        lab.relax(4000)
        got = [f.data for f in lab.world.frames if f.nic == 1 and f.port == Port.ETH_RX]
        assert got == sent
        counters = b.context.driver.counters()
        assert counters["rx_eth_frames"] == len(sent) and counters["rx_eth_overflow"] == 0
        far.expect(data)
        assert not [f for f in lab.world.frames if f.nic == 0 and f.port == Port.ETH_RX]
