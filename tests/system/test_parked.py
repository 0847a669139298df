"""A QP of the receiver that waits, for page tables or receive WQEs, leaves the others their rate (design.md, budget 11)."""

import pytest
from tests.rules import rule
from tests.system.test_slice import Region, write_wr

from rnic.wire.frame import parse_frame
from rnic_sim.enums import SendFlags, WCStatus, WROpcode
from rnic_sim.lab import Lab
from rnic_sim.native import Port
from rnic_sim.qp import QPCap
from rnic_sim.verbs import SGE, RecvWR, SendWR
from rnic_sim.vm import PAGE

LATENCY = 500  # AR to the first R beat at the receiver
PAGES = 600  # more than one table holds
OTHERS, COLD = 48, 12  # messages of each of the other QPs, of the one that waits


def others_pace(lab, first, pairs, numbers):
    """Cycles from frame to frame of the QPs ``numbers`` since frame ``first``."""
    frames = [f for f in lab.world.frames[first:] if f.nic == 0 and f.port == Port.NET_TX]
    mine = [f.first for f in frames if parse_frame(f.data).dest_qpn in numbers]
    assert len(mine) == OTHERS * len(pairs)
    return (mine[-1] - mine[4]) / (len(mine) - 5)


@rule("R-ORD-1")
@pytest.mark.parametrize("kind", ["write", "send"])
def test_cold_qp_leaves_others_their_rate(kind):
    """tiny: 2 cache entries, one walk. WRITEs to a page never used before each, behind two-level tables; or SENDs, whose receive
    WQEs lie in pages that miss, into such pages. Two other QPs WRITE at the same time: 95 % of their rate without that."""
    with Lab("tiny", seed=4, host_latency=16) as lab:
        cold_pair = lab.rc_pair(cap=QPCap(max_send_wr=32, max_recv_wr=256))
        pairs = [lab.rc_pair(cap=QPCap(max_send_wr=OTHERS)) for _ in range(2)]
        a, b = cold_pair
        far = Region(b.pd, PAGES * PAGE)
        near = Region(b.pd, 64)
        local = Region(a.pd, 64)
        local.put(bytes(range(64)))
        targets = [(Region(q.pd, 64), Region(r.pd, 64)) for q, r in pairs]
        numbers = {r.qp_num for _, r in pairs}
        lab.world.nic[1].bus(read_latency=LATENCY)
        pace = {}
        for waits in (False, True):
            for n in range(COLD):
                where = far.addr + n * PAGE if waits else near.addr
                key = far.mr.rkey if waits else near.mr.rkey
                if kind == "send" and waits:
                    b.post_recv(RecvWR(n, [SGE(where, 64, key)]))
                flags = SendFlags.SIGNALED if n == COLD - 1 else 0
                if kind == "send" and waits:
                    a.post_send(SendWR(n, WROpcode.SEND, [local.sge(64)], flags), ring=False)
                else:
                    a.post_send(write_wr(n, [local.sge(64)], key, where, flags), ring=False)
            for (q, _), (source, target) in zip(pairs, targets, strict=True):
                source.put(bytes([17 + waits]) * 64)
                for n in range(OTHERS):
                    flags = SendFlags.SIGNALED if n == OTHERS - 1 else 0
                    q.post_send(write_wr(n, [source.sge(64)], target.mr.rkey, target.addr, flags), ring=False)
            lab.relax(400)
            first = len(lab.world.frames)
            for q in (a, *(q for q, _ in pairs)):
                q.ring_sq()
            for q in (*(q for q, _ in pairs), a):
                (wc,) = lab.wait_wc(q.scq, max_cycles=60_000)
                assert wc.status == WCStatus.SUCCESS
            pace[waits] = others_pace(lab, first, pairs, numbers)
            for _, target in targets:
                target.expect(bytes([17 + waits]) * 64)
        for n in range(COLD):
            assert lab.machines and far.mr.read(64, far.addr - far.mr.buf + n * PAGE) == bytes(range(64))
        if kind == "send":
            assert [wc.wr_id for wc in lab.wait_wc(b.rcq, COLD)] == list(range(COLD))
        print(f"{kind}: {pace[False]:.2f} cycles a message of the others, {pace[True]:.2f} next to the QP that waits")
        assert pace[True] * 0.95 <= pace[False]
