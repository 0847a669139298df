"""Two RNICs back to back: RDMA READ, atomics and fences, judged by memory, completions and frames."""

import random

import pytest
from tests.rules import rule
from tests.system.test_slice import Region, write_wr

from rnic.wire.frame import parse_frame
from rnic.wire.opcode import Opcode
from rnic_sim.enums import AccessFlags, QPState, SendFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QPCap
from rnic_sim.verbs import SGE, SendWR

S = SendFlags.SIGNALED
CONFIGS = ["tiny", "hundred"]


def read_wr(wr_id, sg, rkey, addr, flags=S):
    wr = SendWR(wr_id, WROpcode.RDMA_READ, sg, flags)
    wr.set_wr_rdma(rkey, addr)
    return wr


def atomic_wr(wr_id, sge, rkey, addr, *, add=None, compare=0, swap=0, flags=S):
    opcode = WROpcode.ATOMIC_CMP_AND_SWP if add is None else WROpcode.ATOMIC_FETCH_AND_ADD
    wr = SendWR(wr_id, opcode, [sge], flags)
    wr.set_wr_atomic(rkey, addr, compare if add is None else add, swap)
    return wr


@rule("R-PSN-3", "R-PSN-4", "R-RSP-2", "R-ORD-5")
@pytest.mark.parametrize("config", CONFIGS)
def test_read_lengths_and_alignments(config):
    """Lengths around the PMTU, scattered over SGEs with empty ones between, page borders on both sides; guards untouched."""
    rng = random.Random(11)
    print("seed 11")
    with Lab(config, seed=11) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=4, max_send_sge=4), mtu=256)
        source, target = Region(b.pd, 6000, offset=4090), Region(a.pd, 6000, offset=4000)
        for i, length in enumerate([0, 1, 3, 8, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1000, 4097, 5000]):
            data = rng.randbytes(length)
            src, dst = rng.randrange(200), rng.randrange(200)
            source.clear()
            target.clear()
            source.put(data, src)
            cuts = sorted(rng.randint(0, length) for _ in range(2))
            sges = [target.sge(cuts[0], dst), SGE(0, 0, 0xBAD), target.sge(cuts[1] - cuts[0], dst + cuts[0]),
                    target.sge(length - cuts[1], dst + cuts[1])]  # fmt: skip
            a.post_send(read_wr(i, sges if length else [], source.mr.rkey if length else 0xBAD, source.addr + src))
            (wc,) = lab.wait_wc(a.scq)
            assert (wc.status, wc.opcode, wc.wr_id, wc.byte_len) == (WCStatus.SUCCESS, WCOpcode.RDMA_READ, i, length)
            target.expect(data, dst)


@rule("R-AT-2", "R-AT-3", "R-OPC-3")
@pytest.mark.parametrize("config", CONFIGS)
def test_atomics_in_host_byte_order(config):
    """R-AT-2, R-AT-3, R-OPC-3: numbers as the CPU sees them, old value back, wrap, compare of all bits."""
    with Lab(config, seed=12) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=4))
        word, result = Region(b.pd, 64), Region(a.pd, 64)
        at = -word.addr % 8
        value = 0x0102030405060708

        def step(wr_id, new, opcode, **operands):
            nonlocal value
            result.clear()
            a.post_send(atomic_wr(wr_id, result.sge(8, 5), word.mr.rkey, word.addr + at, **operands))
            (wc,) = lab.wait_wc(a.scq)
            assert (wc.status, wc.opcode, wc.byte_len) == (WCStatus.SUCCESS, opcode, 8)
            result.expect(value.to_bytes(8, "little"), 5)
            value = new
            word.expect(value.to_bytes(8, "little"), at)

        word.put(value.to_bytes(8, "little"), at)
        step(1, value + 0xFF, WCOpcode.FETCH_ADD, add=0xFF)
        step(2, value, WCOpcode.COMP_SWAP, compare=value ^ 1 << 63, swap=5)
        step(3, 0xFFFF_FFFF_FFFF_FFF0, WCOpcode.COMP_SWAP, compare=value, swap=0xFFFF_FFFF_FFFF_FFF0)
        step(4, 0x10, WCOpcode.FETCH_ADD, add=0x20)


@rule("R-ORD-2", "R-REQ-4")
@pytest.mark.parametrize("config", CONFIGS)
def test_fence_and_read_limit(config):
    """A fenced WRITE sends back what the READ before it fetched; never more READs on the wire than allowed, none overtaken."""
    with Lab(config, seed=13) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=16), max_rd_atomic=1)
        source, middle, back = Region(b.pd, 2000), Region(a.pd, 2000), Region(b.pd, 2000)
        data = random.Random(5).randbytes(2000)
        source.put(data)
        wrs = []
        for i in range(8):
            wrs.append(read_wr(2 * i, [middle.sge(200, 200 * i)], source.mr.rkey, source.addr + 200 * i))
            wrs.append(write_wr(2 * i + 1, [middle.sge(200, 200 * i)], back.mr.rkey, back.addr + 200 * i, S | SendFlags.FENCE))
        a.post_send(*wrs)
        wcs = lab.wait_wc(a.scq, 16)
        assert [(wc.wr_id, wc.status) for wc in wcs] == [(i, WCStatus.SUCCESS) for i in range(16)]
        middle.expect(data[:1600])
        back.expect(data[:1600])
        frames = [(f.nic, parse_frame(f.data).opcode) for f in lab.world.frames]
        reads = [op for nic, op in frames if op in (Opcode.RC_READ_REQUEST, Opcode.RC_READ_RESP_ONLY)]
        assert reads == [Opcode.RC_READ_REQUEST, Opcode.RC_READ_RESP_ONLY] * 8


@pytest.mark.parametrize("config", CONFIGS)
def test_both_ends_read_and_write(config):
    """READs, atomics and WRITEs of both ends at once: all complete in order, every byte is right."""
    rng = random.Random(6)
    print("seed 6")
    with Lab(config, seed=14) as lab:
        ends = lab.rc_pair(cap=QPCap(max_send_wr=16), mtu=256, max_rd_atomic=lab.config.max_rd_atomic,
                           max_dest_rd_atomic=lab.config.max_rd_atomic)  # fmt: skip
        homes = [Region(q.pd, 6000) for q in ends]  # read by the peer
        results, inboxes = [Region(q.pd, 6000) for q in ends], [Region(q.pd, 6000) for q in ends]
        data = [rng.randbytes(6000) for _ in ends]
        want, arrives = [], [bytearray(b"\xa5" * 6000) for _ in ends]
        for home, content in zip(homes, data, strict=True):
            home.put(content)
        for i, q in enumerate(ends):
            wrs, got = [], bytearray(b"\xa5" * 6000)
            for k in range(12):
                n, other = rng.choice([1, 64, 300, 500]), 1 - i
                if k % 3 == 2:
                    wrs.append(write_wr(k, [homes[i].sge(n, 500 * k)], inboxes[other].mr.rkey, inboxes[other].addr + 500 * k))
                    arrives[other][500 * k : 500 * k + n] = data[i][500 * k : 500 * k + n]
                else:
                    wrs.append(read_wr(k, [results[i].sge(n, 500 * k)], homes[other].mr.rkey, homes[other].addr + 500 * k))
                    got[500 * k : 500 * k + n] = data[other][500 * k : 500 * k + n]
            want.append(bytes(got))
            q.post_send(*wrs)
        for i, q in enumerate(ends):
            wcs = lab.wait_wc(q.scq, 12, max_cycles=60_000)
            assert [(wc.wr_id, wc.status) for wc in wcs] == [(k, WCStatus.SUCCESS) for k in range(12)]
            results[i].expect(want[i])
        for inbox, content in zip(inboxes, arrives, strict=True):
            inbox.expect(bytes(content))


@rule("R-RSP-8", "R-AT-1", "R-MR-4")
@pytest.mark.parametrize("what", ["rkey", "lkey", "bounds", "lkey later"])
def test_failing_read(what):
    """The READ ends with its own status, the WQEs behind it are flushed, nothing is written (R-RSP-8, R-ERR-3)."""
    with Lab("tiny", seed=15) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=8, max_send_sge=4), mtu=256)
        source, target = Region(b.pd, 1000), Region(a.pd, 1000)
        sealed = Region(a.pd, 1000, access=AccessFlags.REMOTE_READ)  # no local write
        source.put(bytes(1000))
        key, sges = source.mr.rkey, [target.sge(700)]
        if what == "rkey":
            key ^= 1
        elif what == "lkey":
            sges = [sealed.sge(700)]
        elif what == "bounds":
            sges = [target.sge(700, 900)]
        else:
            sges = [target.sge(256), sealed.sge(444)]
        a.post_send(read_wr(1, sges, key, source.addr), *(write_wr(i, [target.sge(8)], source.mr.rkey, source.addr)
                                                          for i in (2, 3)))  # fmt: skip
        wcs = lab.wait_wc(a.scq, 3)
        first = WCStatus.REM_ACCESS_ERR if what == "rkey" else WCStatus.LOC_PROT_ERR
        assert [(wc.wr_id, wc.status) for wc in wcs] == [(1, first), (2, WCStatus.WR_FLUSH_ERR), (3, WCStatus.WR_FLUSH_ERR)]
        assert a.query()["new_state"] == QPState.ERR
        target.expect(bytes(256) if what == "lkey later" else b"")
        sealed.expect(b"")
