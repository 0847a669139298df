"""Fence: done only when nothing of before is left, also while newer traffic never pauses."""

from collections import deque

import pytest
from amaranth.sim import Simulator

from rnic.config import CONFIGS, Params
from rnic.qp.fence import Access, Fence, Watch
from tests.rules import rule

from .streams import seeded

DEPTH = 6  # items a watched stream's stages hold
WATCHES = [Watch(name="early", phase=0, holds=DEPTH), Watch(name="late", phase=4, holds=DEPTH)]


async def run(ctx, dut, rng, seed_busy, starts, log, limit=6000):
    streets = {w.name: deque() for w in WATCHES}
    accesses, jobs, flushes, marks = deque(), deque(), deque(), deque()
    begun, starts = None, deque(starts)
    for cycle in range(limit):
        start = bool(starts) and cycle >= starts[0] and begun is None
        if start:
            starts.popleft()
            begun = cycle
        ctx.set(dut.start, start)
        ctx.set(dut.qpn, 3 * (cycle % 2))
        # New traffic.
        for street in streets.values():
            if len(street) < DEPTH and rng.random() < seed_busy:
                street.append(cycle)
        begin = len(accesses) < 20 and rng.random() < seed_busy
        if begin:
            accesses.append(cycle)
        end = bool(accesses) and accesses[0] < cycle - 30 and rng.random() < 0.5
        ready = {}
        for name, street in streets.items():
            ready[name] = rng.random() < 0.4
            ctx.set(getattr(dut, f"valid_{name}"), bool(street))
            ctx.set(getattr(dut, f"ready_{name}"), ready[name])
        ctx.set(dut.begin_dma, begin)
        ctx.set(dut.end_dma, end)
        # The streets of marker and flush event: whatever enters comes out, in order, after a while.
        ctx.set(dut.fetch_i.valid, rng.random() < seed_busy)
        ctx.set(dut.flush_i.valid, rng.random() < seed_busy / 4)
        ctx.set(dut.flush_i.payload.qpn, 5)
        ctx.set(dut.fetch_o.ready, rng.random() < 0.5)
        ctx.set(dut.flush_o.ready, rng.random() < 0.5)
        marker_out = bool(jobs) and jobs[0][0] < cycle - 40 and rng.random() < 0.5
        out = jobs.popleft() if marker_out else None
        ctx.set(dut.marker_out, bool(out and out[1]))
        flush_out = bool(flushes) and flushes[0][0] < cycle - 60
        flushed = flushes.popleft() if flush_out else None
        ctx.set(dut.drained, bool(flushed))
        ctx.set(dut.drained_qpn, flushed[1] if flushed else 0)
        marked = bool(marks) and marks[0] < cycle - 25
        if marked:
            marks.popleft()
        ctx.set(dut.marked, marked)
        f, g = dut.fetch_o, dut.flush_o
        values = await ctx.tick().sample(dut.done, dut.mark, f.valid, f.ready, f.payload.marker, g.valid, g.ready, g.payload.qpn)
        done, mark, fetch_valid, fetch_ready, marker, flush_valid, flush_ready, qpn = values[2:]
        if mark:
            marks.append(cycle)
        if fetch_valid and fetch_ready:
            jobs.append((cycle, marker))
        if flush_valid and flush_ready:
            flushes.append((cycle, qpn))
        if end:
            accesses.popleft()
        for name, street in streets.items():
            if street and ready[name]:
                street.popleft()
        if done:
            assert begun is not None
            for what, street in (*streets.items(), ("dma", accesses)):
                assert not street or street[0] >= begun, f"{what}: an item of cycle {street[0]}, fence of {begun}"
            assert all(at >= begun for at, _ in jobs) and all(at >= begun for at, _ in flushes) and not marks
            log.append(cycle - begun)
            begun = None
            if not starts:
                return
    raise TimeoutError(f"{len(log)} fences done")


@rule("R-QP-4", "R-QP-7")
@pytest.mark.parametrize("busy", [0.0, 0.3, 0.95])
def test_nothing_old_is_left(busy):
    dut = Fence(Params(CONFIGS["tiny"]), WATCHES, [Access(name="dma")])
    rng, log = seeded(int(100 * busy)), []

    async def bench(ctx):
        await run(ctx, dut, rng, busy, [100, 300, 301, 900, 1500, 1501, 1502], log)

    sim = Simulator(dut)
    sim.add_clock(4e-9)
    sim.add_testbench(bench)
    sim.run()
    print("cycles", log)
    assert len(log) == 7 and max(log) < 500
