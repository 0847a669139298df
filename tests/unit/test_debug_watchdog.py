"""The watchdog trips on what waits all the time, and on nothing else."""

import random

import pytest
from amaranth.sim import Simulator

from rnic.debug.watchdog import OpenJobs, Watchdog

NAMES = ["one", "two", "three", "four"]


def run(bench):
    dut = Watchdog(NAMES)
    sim = Simulator(dut)
    sim.add_clock(1e-6)

    async def main(ctx):
        await bench(ctx, dut)

    sim.add_testbench(main)
    sim.run()


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_waiting_streams_that_move_now_and_then_are_fine(limit):
    print("seed", limit)
    rng = random.Random(limit)

    async def bench(ctx, dut):
        ctx.set(dut.limit, limit)
        since = [0] * len(NAMES)
        for _ in range(40 * limit):
            waiting = rng.getrandbits(len(NAMES)) | rng.getrandbits(len(NAMES))
            for i in range(len(NAMES)):
                since[i] = since[i] + 1 if waiting >> i & 1 else 0
                if since[i] >= limit:  # a pause before the limit
                    waiting &= ~(1 << i)
                    since[i] = 0
            ctx.set(dut.waiting, waiting)
            await ctx.tick()
            assert not ctx.get(dut.tripped)

    run(bench)


@pytest.mark.parametrize("who", range(len(NAMES)))
def test_trips_in_time_and_says_who(who):
    """The trip is a failing assertion; the register has the index in the same cycle."""
    limit, at = 50, []

    async def bench(ctx, dut):
        ctx.set(dut.limit, limit)
        await ctx.tick().repeat(1 + 13 * who)
        ctx.set(dut.waiting, 1 << who)
        for cycle in range(4 * limit):
            at.append(cycle)
            await ctx.tick()

    with pytest.raises(AssertionError, match=f"watchdog: {NAMES[who]} has waited 50 cycles"):
        run(bench)
    assert limit <= at[-1] <= 2 * limit + 6


def test_limit_zero_turns_it_off():
    async def bench(ctx, dut):
        ctx.set(dut.limit, 0)
        ctx.set(dut.waiting, 0b1111)
        await ctx.tick().repeat(300)
        assert not ctx.get(dut.tripped)

    run(bench)


def test_number_of_streams():
    with pytest.raises(ValueError, match="number of watched streams is 0"):
        Watchdog([])


def test_open_jobs_wait_while_none_ends():
    rng = random.Random(9)
    print("seed 9")
    dut = OpenJobs("job")

    async def main(ctx):
        count = 0
        for _ in range(500):
            begin = rng.random() < 0.3
            end = count > 0 and rng.random() < 0.4
            ctx.set(dut.begin, begin)
            ctx.set(dut.end, end)
            assert ctx.get(dut.waiting) == (count > 0 and not end)
            await ctx.tick()
            count += begin - end
        assert count < 500

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(main)
    sim.run()


def test_an_end_without_a_begin_fails():
    dut = OpenJobs("job")

    async def main(ctx):
        ctx.set(dut.end, 1)
        await ctx.tick().repeat(2)

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(main)
    with pytest.raises(AssertionError, match="job ends that never began"):
        sim.run()
