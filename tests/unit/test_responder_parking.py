"""QPs that wait, for page tables or receive WQEs, step aside: order within a QP is kept, others pass."""

import random

import pytest

from rnic.config import CONFIGS
from rnic.wire.opcode import Opcode
from tests.rules import rule
from tests.unit.responder_bench import Bench
from tests.unit.streams import seeded
from tests.unit.test_responder_street import BUFFER, RW, interleave, messages, quiet_bench, send, write_only


@rule("R-MSN-1", "R-ACK-1", "R-CQ-3", "R-ORD-1")
@pytest.mark.parametrize(("config", "stall", "seed", "share"), [
    ("tiny", 0.3, 1, 0.3), ("tiny", 0.0, 2, 1.0), ("hundred", 0.2, 3, 0.5), ("hundred", 0.0, 4, 0.1), ("tiny", 0.2, 5, 0.7),
])  # fmt: skip
def test_traffic_with_misses(config, stall, seed, share):
    """Random messages of several QPs while a share of all translations needs a page table, ``share`` 1: each and every one."""
    rng = seeded(seed)
    bench = Bench(CONFIGS[config], rng, stall)
    bench.qps[3].path_mtu = 2
    chance = random.Random(seed)
    bench.world.misses = lambda key: chance.random() < share
    bench.walk = (20, 60)
    actions = list(interleave(rng, [messages(bench, qp, rng, 4) for qp in bench.qps.values()]))
    bench.run(actions, limit=12000)
    bench.compare()
    assert not bench.errors


FATAL = {  # what the bad packet is, behind good ones of its QP that wait
    "key": lambda q, n: write_only(q, n, rkey=0x201),
    "length": lambda q, n: write_only(q, n, payload=bytes(16), dma_length=32),
    "send_long": lambda q, n: send(q, n, "ONLY", 101),
    "read": lambda q, n: write_only(q, n, opcode=Opcode.RC_READ_REQUEST, payload=b"", dma_length=8),
}


@rule("R-ERR-3", "R-ERR-4", "R-ERR-5", "R-QP-7")
@pytest.mark.parametrize("case", FATAL)
def test_error_behind_waiting_jobs(case):
    """The good packets before a bad one have their effect and their answer first, what is behind it is dropped, the flush comes
    behind all; other QPs go on meanwhile."""
    bench, qp, _ = quiet_bench(len(case))
    other = bench.qps[3]
    bench.world.region(0x500, other.pd, RW, base=0x10_0000, length=4096)
    bench.world.misses = lambda key: key in (0x200, bench.p.tpt_rq_base + 2)
    bench.walk = (200, 200)
    small = [(0x10_0000, 50, 0x200), (0, 0, 0), (0x10_1000, 50, 0x200)]
    actions = [("post", qp, small)] * 4 + [
        write_only(qp, 0), send(qp, 1, "ONLY", 70), write_only(qp, 2), FATAL[case](qp, 3), write_only(qp, 4), write_only(qp, 5),
        *(write_only(other, n, rkey=0x500) for n in range(8)), ("wait", 120),
        ("call", lambda b: seen.extend([len(b.acks[2]), len(b.acks[3])])), ("idle",), ("post", qp, BUFFER),
    ]  # fmt: skip
    seen: list[int] = []
    bench.run(actions, limit=8000, settle=260)
    bench.compare()
    assert qp.dead and not other.dead and bench.error_drop == 2
    assert seen == [0, 8], "QP 3 did not pass QP 2"


@rule("R-QP-4", "R-QP-7")
def test_flush_events():
    """A flush event comes out behind its QP's waiting jobs, not behind those of others; that of QP 0 behind everything."""
    bench, qp, region = quiet_bench(11)
    bench.world.misses = lambda key: key == 0x200
    bench.walk = (300, 300)
    log: list[tuple[int, int, int]] = []

    def flush(qpn):
        return ("call", lambda b: b.ports["flush"].queue.append({"qpn": qpn}))

    def look(b):
        log.append((b.drained, len(b.acks[2]), len(b.acks[3])))

    other = bench.qps[3]
    bench.world.region(0x500, other.pd, RW, base=0x10_0000, length=4096)
    bench.run([write_only(qp, 0), write_only(other, 0, rkey=0x500), ("wait", 20), flush(3), ("wait", 100), ("call", look),
               flush(0), flush(2), write_only(other, 1, rkey=0x500), ("wait", 80), ("call", look),
               ("wait", 300), ("call", look)], limit=3000, settle=350)  # fmt: skip
    bench.compare()
    assert log == [(1, 0, 1), (1, 0, 2), (3, 1, 2)]


def rate(times, skip: int = 8) -> float:
    return (times[-1] - times[skip]) / (len(times) - 1 - skip)


@rule("R-ORD-1")
@pytest.mark.parametrize("what", ["write", "send"])
def test_cold_qp_does_not_stop_others(what):
    """One QP whose every translation walks its page table for long: the WRITEs of another keep 95 % of their rate."""
    spacing = {}
    for cold in (False, True):
        bench = Bench(CONFIGS["hundred"], seeded(6), 0.0, num_qps=2)
        qp, hot = bench.qps[2], bench.qps[3]
        for q in (qp, hot):
            q.log_rq = 6
            bench.world.rings[bench.p.tpt_rq_base + q.qpn].length = 64 << 6
            bench.world.region(0x100 * q.qpn, q.pd, RW, base=0x10_0000, length=4096)
        bench.latency = (11, 11)
        bench.walk = (300, 300)
        mine = (0x200, bench.p.tpt_rq_base + 2)
        bench.world.misses = lambda key, mine=mine, cold=cold: cold and key in mine
        posts = [("post", qp, [(0x10_0000, 64, 0x200)])] * 8 if what == "send" else []
        packets = [write_only(hot, i, rkey=0x300, payload=bytes(64), va=0x10_0000) for i in range(64)]
        for i in range(8):
            packets.insert(8 * i, write_only(qp, i) if what == "write" else send(qp, i, "ONLY", 16))
        bench.run([*posts, ("idle",), ("call", lambda b, packets=packets: [b.send(x) for x in packets])],
                  limit=10000, settle=320)  # fmt: skip
        bench.compare()
        acked = bench.acked[3]
        spacing[cold] = (acked[-1] - acked[0]) / (len(acked) - 1)
    print(f"{what}: {spacing[False]:.2f} cycles a message, {spacing[True]:.2f} next to a QP that waits")
    assert spacing[True] * 0.95 <= spacing[False]
