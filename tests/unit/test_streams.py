"""The drivers themselves: a shared design starts each run from reset, whatever the last one left."""

import pytest
from amaranth import *
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from tests.unit.streams import shared, simulate


class Tally(wiring.Component):
    """Counts in a register and in a memory row."""

    def __init__(self, step: int):
        self.step = step
        super().__init__({"add": In(1), "o": Out(8), "row": Out(8)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.rows = rows = memory.Memory(shape=8, depth=2, init=[7])
        write, read = rows.write_port(), rows.read_port(domain="comb")
        m.d.comb += [self.row.eq(read.data), write.data.eq(read.data + self.step), write.en.eq(self.add)]
        with m.If(self.add):
            m.d.sync += self.o.eq(self.o + self.step)
        return m


def test_every_run_starts_from_reset():
    seen, ticks = [], []

    async def count(ctx):
        dut = shared(Tally, 3)
        before = ctx.get(dut.o), ctx.get(dut.row), ctx.get(dut.add)
        ctx.set(dut.add, 1)
        await ctx.tick().repeat(4)
        seen.append((before, ctx.get(dut.o), ctx.get(dut.row)))

    async def endless(ctx):
        async for _ in ctx.tick():
            ticks.append(1)

    async def waits(ctx):
        await ctx.tick().until(shared(Tally, 3).o == 200)
        raise AssertionError("never")

    for background in ([endless, waits], [], [waits]):
        simulate(shared(Tally, 3), count, background=background)
    simulate(shared(Tally, 3), count, count)
    assert seen[:3] == [((0, 7, 0), 12, 19)] * 3 and seen[3][1:] == seen[4][1:] == (12, 19)
    assert 4 <= len(ticks) <= 6


def test_one_design_for_equal_arguments_until_a_run_fails():
    dut = shared(Tally, 5)
    assert shared(Tally, 5) is dut is not shared(Tally, step=5)

    async def fails(ctx):
        await ctx.tick()
        raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"):
        simulate(dut, fails)
    assert shared(Tally, 5) is not dut

    async def stays(ctx):
        await ctx.tick().repeat(100)

    with pytest.raises(TimeoutError, match="1 of 1 benches still wait after 9 cycles"):
        simulate(shared(Tally, 5), stays, limit=9)
