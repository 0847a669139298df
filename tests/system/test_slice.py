"""Two RNICs back to back: WRITE and SEND of one packet, judged by memory and completions outside the RTL's path."""

import random

import pytest
from tests.rules import rule

from rnic.wire.frame import parse_frame
from rnic.wire.opcode import Opcode
from rnic_sim.enums import AccessFlags, QPState, SendFlags, WCFlags, WCOpcode, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.qp import QP, QPCap, QPInitAttr
from rnic_sim.verbs import CQ, MR, PD, SGE, RecvWR, SendWR

GUARD = 32
ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
LENGTHS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 127, 255, 256, 257, 511, 1000, 1023, 1024]


class Region:
    """An MR with guard bytes; ``expect`` compares all of it."""

    def __init__(self, pd, length, offset=0, access=ALL, fill=0xA5, **kwargs):
        self.length, self.fill = length, fill
        self.mr = MR(pd, length + 2 * GUARD, access, offset=offset, **kwargs)
        self.clear()
        self.addr = self.mr.buf + GUARD

    def clear(self):
        self.mr.write(bytes([self.fill]) * (self.length + 2 * GUARD))

    def put(self, data, at=0):
        self.mr.write(data, GUARD + at)

    def sge(self, length=None, at=0, lkey=None):
        return SGE(self.addr + at, self.length if length is None else length, self.mr.lkey if lkey is None else lkey)

    def expect(self, data, at=0):
        want = bytearray([self.fill]) * (self.length + 2 * GUARD)
        want[GUARD + at : GUARD + at + len(data)] = data
        got = self.mr.read(len(want))
        assert got == bytes(want), next(f"byte {i - GUARD}: {g:#x} for {w:#x}" for i, (g, w) in
                                        enumerate(zip(got, want, strict=True)) if g != w)  # fmt: skip


def write_wr(wr_id, sg, rkey, addr, flags=SendFlags.SIGNALED, imm=None):
    wr = SendWR(wr_id, WROpcode.RDMA_WRITE if imm is None else WROpcode.RDMA_WRITE_WITH_IMM, sg, flags, imm or 0)
    wr.set_wr_rdma(rkey, addr)
    return wr


def frames_of(lab, nic):
    return [parse_frame(f.data) for f in lab.world.frames if f.nic == nic]


@rule("R-LEN-1", "R-PAD-1", "R-PAD-3", "R-REQ-1")
@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_write_lengths_and_alignments(config):
    """Every length of the list at several source and destination offsets; guards untouched (R-RES-2, R-PAD-3, R-MR-5)."""
    rng = random.Random(7)
    print("seed 7")
    with Lab(config, seed=7) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=4))
        source, target = Region(a.pd, 1100, offset=17), Region(b.pd, 5000, offset=4090)
        for i, length in enumerate(LENGTHS):
            data = rng.randbytes(length)
            src, dst = rng.randrange(70), rng.choice([rng.randrange(70), 4096 - rng.randrange(1, 70)])
            source.clear()
            source.put(data, src)
            target.clear()
            a.post_send(write_wr(i, [source.sge(length, src)] if length else [], target.mr.rkey, target.addr + dst))
            (wc,) = lab.wait_wc(a.scq)
            assert (wc.status, wc.opcode, wc.wr_id) == (WCStatus.SUCCESS, WCOpcode.RDMA_WRITE, i)
            target.expect(data, dst)
        assert b.rcq.poll()[0] == 0
        assert {f.opcode for f in frames_of(lab, 0)} == {Opcode.RC_WRITE_ONLY}


@rule("R-LEN-1", "R-PAD-3", "R-CQ-3", "R-WQ-8")
@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_send_lengths_and_alignments(config):
    rng = random.Random(8)
    print("seed 8")
    with Lab(config, seed=8) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=4, max_recv_wr=4))
        source, target = Region(a.pd, 1100), Region(b.pd, 1200, offset=3000)
        for i, length in enumerate(LENGTHS):
            data, imm = rng.randbytes(length), rng.getrandbits(32)
            src, dst = rng.randrange(70), rng.randrange(70)
            source.clear()
            source.put(data, src)
            target.clear()
            b.post_recv(RecvWR(1000 + i, [target.sge(1024, dst)]))
            with_imm = i % 3 == 1
            opcode = WROpcode.SEND_WITH_IMM if with_imm else WROpcode.SEND
            a.post_send(SendWR(i, opcode, [source.sge(length, src)] if length else [], imm_data=imm))
            (sent,) = lab.wait_wc(a.scq)
            (got,) = lab.wait_wc(b.rcq)
            assert (sent.status, sent.opcode, sent.wr_id) == (WCStatus.SUCCESS, WCOpcode.SEND, i)
            assert (got.status, got.opcode, got.wr_id, got.byte_len) == (WCStatus.SUCCESS, WCOpcode.RECV, 1000 + i, length)
            assert bool(got.wc_flags & WCFlags.WITH_IMM) == with_imm and (not with_imm or got.imm_data == imm)
            target.expect(data, dst)


@rule("R-OPC-2", "R-CQ-3")
def test_write_with_immediate_takes_a_receive_wqe():
    with Lab("tiny") as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        source.put(b"x" * 33)
        b.post_recv(RecvWR(5, []))
        a.post_send(write_wr(1, [source.sge(33)], target.mr.rkey, target.addr, imm=0x04030201))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
        (wc,) = lab.wait_wc(b.rcq)
        assert (wc.opcode, wc.byte_len, wc.imm_data, wc.wr_id) == (WCOpcode.RECV_RDMA_WITH_IMM, 33, 0x04030201, 5)
        target.expect(b"x" * 33)


@rule("R-WQ-4", "R-WQ-5")
def test_gather_and_scatter_lists():
    """SGE lists on both sides, zero-length elements among them (R-WQ-4, C79)."""
    with Lab("tiny", seed=3) as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_sge=4, max_recv_sge=4))
        source, target = Region(a.pd, 600, offset=4000), Region(b.pd, 600, offset=3900)
        data = bytes(i & 0xFF for i in range(600))
        source.put(data)
        b.post_recv(RecvWR(1, [target.sge(3, 0), target.sge(0, 10, lkey=0xBAD), target.sge(5, 3), target.sge(300, 8)]))
        a.post_send(SendWR(2, WROpcode.SEND, [source.sge(1, 0), SGE(0, 0, 0xBAD), source.sge(200, 1), source.sge(99, 201)]))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
        assert lab.wait_wc(b.rcq)[0].byte_len == 300
        target.expect(data[:300])


ERRORS = {  # name: (what the WRITE does to the key, the address, the length) -> requester's status, NAK code
    "stale variant": (dict(rkey=lambda k: k ^ 1), WCStatus.REM_ACCESS_ERR, 0x62),
    "unused index": (dict(rkey=lambda k: 7 << 8 | k & 0xFF), WCStatus.REM_ACCESS_ERR, 0x62),
    "index out of range": (dict(rkey=lambda k: 0xFFFFFF << 8 | k & 0xFF), WCStatus.REM_ACCESS_ERR, 0x62),
    "below": (dict(shift=-1), WCStatus.REM_ACCESS_ERR, 0x62),
    "past the end": (dict(shift=128 - 63), WCStatus.REM_ACCESS_ERR, 0x62),
    "wrapping": (dict(shift=-(1 << 40)), WCStatus.REM_ACCESS_ERR, 0x62),
    "other PD": (dict(pd=True), WCStatus.REM_ACCESS_ERR, 0x62),
    "MR without the right": (dict(access=AccessFlags.LOCAL_WRITE), WCStatus.REM_ACCESS_ERR, 0x62),
    "QP without the right": (dict(qp_access=AccessFlags.REMOTE_READ), WCStatus.REM_INV_REQ_ERR, 0x61),
}


@rule("R-MR-1", "R-MR-2", "R-MR-4", "R-ERR-3", "R-RES-1")
@pytest.mark.parametrize("name", ERRORS)
def test_refused_write(name):
    """Rules 8.1 rows 3 and 7: NAK, status, both QPs in ERR, later work flushed in order, not a byte written."""
    how, status, syndrome = ERRORS[name]
    with Lab("tiny") as lab:
        a, b = lab.rc_pair(access=how.get("qp_access", 15))
        source = Region(a.pd, 64)
        pd = PD(b.context) if how.get("pd") else b.pd
        target = MR(pd, 128, how.get("access", ALL))
        before = target.read(128)
        rkey = how.get("rkey", lambda k: k)(target.rkey)
        for i in range(3):
            b.post_recv(RecvWR(50 + i, []))
        a.post_send(write_wr(1, [source.sge(64)], rkey, (target.buf + how.get("shift", 0)) % (1 << 64)),
                    SendWR(2, WROpcode.SEND, [source.sge(4)], 0))  # fmt: skip
        first, second = lab.wait_wc(a.scq, 2)
        assert (first.wr_id, first.status) == (1, status)
        assert (second.wr_id, second.status) == (2, WCStatus.WR_FLUSH_ERR)  # unsignaled, still a CQE (R-ERR-1)
        flushed = lab.wait_wc(b.rcq, 3)
        assert [(w.wr_id, w.status) for w in flushed] == [(50 + i, WCStatus.WR_FLUSH_ERR) for i in range(3)]
        naks = [f for f in frames_of(lab, 1) if f.opcode is Opcode.RC_ACK]
        assert [(f.syndrome, f.psn, f.msn) for f in naks] == [(syndrome, 0x111000, 0)]
        assert target.read(128) == before
        for qp in (a, b):
            qp.query()
            assert qp.qp_state == QPState.ERR
        a.post_send(SendWR(3, WROpcode.SEND, []))  # accepted in ERR and flushed at once (R-ERR-5)
        (late,) = lab.wait_wc(a.scq)
        assert (late.wr_id, late.status) == (3, WCStatus.WR_FLUSH_ERR)


@rule("R-ERR-7", "R-ERR-1")
@pytest.mark.parametrize("name", ["bad lkey", "past the end", "other PD"])
def test_bad_local_key_is_reported_in_order(name):
    """The WQE before it completes first, the failing one gets LOC_PROT_ERR, nothing of it or after it leaves (C63, C91)."""
    with Lab("tiny") as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        other = MR(PD(a.context), 64, ALL)
        bad = {"bad lkey": source.sge(8, lkey=source.mr.lkey ^ 3), "past the end": source.sge(8, 64 + GUARD - 4),
               "other PD": SGE(other.buf, 8, other.lkey)}[name]  # fmt: skip
        a.post_send(write_wr(1, [source.sge(8)], target.mr.rkey, target.addr),
                    write_wr(2, [bad], target.mr.rkey, target.addr, 0), write_wr(3, [source.sge(8)], target.mr.rkey, target.addr))
        got = lab.wait_wc(a.scq, 3)
        assert [(w.wr_id, w.status) for w in got] == [(1, WCStatus.SUCCESS), (2, WCStatus.LOC_PROT_ERR),
                                                      (3, WCStatus.WR_FLUSH_ERR)]  # fmt: skip
        assert len(frames_of(lab, 0)) == 1


@rule("R-RNR-4", "R-RTC-2")
def test_send_without_receive_wqe():
    with Lab("tiny") as lab:
        a, b = lab.rc_pair(rnr_retry=0, min_rnr_timer=9)
        source = Region(a.pd, 64)
        a.post_send(SendWR(1, WROpcode.SEND, [source.sge(8)]))
        (wc,) = lab.wait_wc(a.scq)
        assert wc.status == WCStatus.RNR_RETRY_EXC_ERR
        (nak,) = frames_of(lab, 1)
        assert (nak.syndrome, nak.psn) == (0x20 | 9, 0x111000)
        b.query()
        assert b.qp_state == QPState.RTS


@rule("8.1#10", "8.2")
def test_send_longer_than_the_receive_wqe():
    """Rules 8.1 row 10: NAK invalid request, LOC_LEN_ERR at the receiver, not a byte past the receive buffer."""
    with Lab("tiny") as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        b.post_recv(RecvWR(9, [target.sge(31)]))
        a.post_send(SendWR(1, WROpcode.SEND, [source.sge(32)]))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.REM_INV_REQ_ERR
        (wc,) = lab.wait_wc(b.rcq)
        assert (wc.wr_id, wc.status) == (9, WCStatus.LOC_LEN_ERR)
        target.expect(b"")


@rule("8.1#11", "8.2")
def test_receive_wqe_with_a_bad_key():
    """Rules 8.1 row 11: NAK remote operational error, LOC_PROT_ERR at the receiver."""
    with Lab("tiny") as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        b.post_recv(RecvWR(9, [target.sge(64, lkey=target.mr.lkey ^ 1)]))
        a.post_send(SendWR(1, WROpcode.SEND, [source.sge(32)]))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.REM_OP_ERR
        (wc,) = lab.wait_wc(b.rcq)
        assert (wc.wr_id, wc.status) == (9, WCStatus.LOC_PROT_ERR)
        target.expect(b"")


@rule("R-ICRC-7")
def test_bad_icrc_is_a_silent_counted_drop():
    """One bit flipped on the wire: no data, no answer, no completion, the counter and only the counter moves."""
    with Lab("tiny", nics=2) as lab:
        a, b = lab.rc_pair()
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        source.put(b"\x55" * 64)
        a.post_send(write_wr(1, [source.sge(64)], target.mr.rkey, target.addr))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
        good = [f for f in lab.world.frames if f.nic == 0][0].data
        frames = len(lab.world.frames)
        target.clear()
        for at, bit in ((54, 0), (60, 3), (75, 7), (len(good) - 6, 1), (len(good) - 1, 4)):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            lab.world.nic[1].inject(bytes(bad))
        lab.relax(1000)
        counters = b.context.driver.counters()
        assert counters["rx_bad_icrc"] == 5 and counters["rx_frames"] == 1
        assert len(lab.world.frames) == frames
        target.expect(b"")


def test_many_qps_interleaved():
    """Five QPs, WRITEs and SENDs of random lengths posted in bursts; order per QP, exact bytes, one CQE per WR."""
    rng = random.Random(11)
    print("seed 11")
    with Lab("tiny", seed=11) as lab:
        ca, cb = lab.contexts
        cqs = CQ(ca, 128), CQ(cb, 128)
        pda, pdb = PD(ca), PD(cb)
        pairs = []
        for _ in range(5):
            cap = QPCap(max_send_wr=8, max_recv_wr=8)
            qa, qb = QP(pda, QPInitAttr(cqs[0], cqs[0], cap=cap)), QP(pdb, QPInitAttr(cqs[1], cqs[1], cap=cap))
            lab.connect(qa, qb, mtu=512, psns=(rng.getrandbits(24), rng.getrandbits(24)))
            pairs.append((qa, qb))
        slot = 600
        source, target = Region(pda, 40 * slot, offset=11), Region(pdb, 40 * slot, offset=77)
        image = bytearray([target.fill]) * (40 * slot)
        sent: dict[int, list[int]] = {}
        received: dict[int, list[int]] = {}
        for n in range(40):
            qa, qb = pairs[n % 5]
            length, at = rng.choice([0, 1, rng.randrange(513), 512]), n * slot + rng.randrange(60)
            data = rng.randbytes(length)
            source.put(data, at)
            image[at : at + length] = data
            sge = [source.sge(length, at)] if length else []
            if rng.random() < 0.5:
                qb.post_recv(RecvWR(n, [target.sge(slot - 60, at)]))
                received.setdefault(qb.qp_num, []).append(n)
                qa.post_send(SendWR(n, WROpcode.SEND, sge))
            else:
                qa.post_send(write_wr(n, sge, target.mr.rkey, target.addr + at))
            sent.setdefault(qa.qp_num, []).append(n)
        done = lab.wait_wc(cqs[0], 40)
        assert all(w.status == WCStatus.SUCCESS for w in done)
        for qpn, ids in sent.items():
            assert [w.wr_id for w in done if w.qp_num == qpn] == ids
        got = lab.wait_wc(cqs[1], sum(map(len, received.values())))
        for qpn, ids in received.items():
            assert [w.wr_id for w in got if w.qp_num == qpn] == ids
        target.expect(bytes(image))


@rule("R-CQ-9", "R-CQ-1", "R-PSN-1")
def test_queues_and_psn_wrap():
    """A small CQ and small rings round and round, PSN across 0xFFFFFF, one signaled WR in four."""
    with Lab("tiny") as lab:
        a, b = lab.rc_pair(cap=QPCap(max_send_wr=4, max_recv_wr=2), cqe=4, psns=(0xFFFFFA, 0xFFFFFD))
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        for n in range(24):
            source.put(bytes([n]) * 64)
            signaled = n % 4 == 3
            a.post_send(write_wr(n, [source.sge(64)], target.mr.rkey, target.addr,
                                 SendFlags.SIGNALED if signaled else 0))  # fmt: skip
            if signaled:
                (wc,) = lab.wait_wc(a.scq)
                assert (wc.wr_id, wc.status) == (n, WCStatus.SUCCESS)
                target.expect(bytes([n]) * 64)
        psns = [f.psn for f in frames_of(lab, 0)]
        assert psns == [(0xFFFFFA + n) & 0xFFFFFF for n in range(24)]


@rule("R-FRM-7", "R-ADR-1")
def test_ipv6_and_vlan():
    with Lab("tiny", seed=5) as lab:
        for i, context in enumerate(lab.contexts):
            context.set_gid(1, lab.addresses(i)[1], lab.mac(i), vlan=42)
        a, b = lab.rc_pair(gid=1, vlan=5 << 13 | 42, traffic_class=0x48, hop_limit=9, flow_label=0x12345)
        source, target = Region(a.pd, 64), Region(b.pd, 64)
        source.put(b"v6" * 20)
        a.post_send(write_wr(1, [source.sge(40)], target.mr.rkey, target.addr))
        assert lab.wait_wc(a.scq)[0].status == WCStatus.SUCCESS
        target.expect(b"v6" * 20)
        for frame in frames_of(lab, 0) + frames_of(lab, 1):
            assert (frame.vlan, frame.traffic_class, frame.hop_limit) == ((5, 42), 0x48, 9)


def test_same_seed_same_cycles_same_bytes():
    def run():
        with Lab("tiny", seed=99, host_latency=37) as lab:
            a, b = lab.rc_pair()
            source, target = Region(a.pd, 256), Region(b.pd, 256)
            for n in range(4):
                a.post_send(write_wr(n, [source.sge(50 * n, n)] if n else [], target.mr.rkey, target.addr))
            lab.wait_wc(a.scq, 4)
            return lab.world.cycle, [(f.nic, f.first, f.last, f.data) for f in lab.world.frames]

    assert run() == run()
