"""Reads of a row in the cycle it is written: what a memory that promises not to use them gives in simulation."""

import pytest
from amaranth import *
from amaranth.hdl import Fragment
from amaranth.lib import memory
from amaranth.sim import Simulator

from rnic.clash import NO_CLASH, ClashPlatform
from rnic.verilog import to_verilog

WIDTH = 8
OLD, NEW = 0x5A, 0xC3


def after_clash(attrs: dict, platform) -> list[int]:
    """Read port's data in the cycles after: a write alone, a write with a read of its row, a pause, a read alone."""
    mem = memory.Memory(shape=WIDTH, depth=4, init=[], attrs=attrs)
    write, read = mem.write_port(), mem.read_port()
    seen = []

    async def bench(ctx):
        for data, write_en, read_en in ((OLD, 1, 0), (NEW, 1, 1), (0, 0, 0), (0, 0, 1)):
            ctx.set(write.addr, 2)
            ctx.set(read.addr, 2)
            ctx.set(write.data, data)
            ctx.set(write.en, write_en)
            ctx.set(read.en, read_en)
            await ctx.tick()
            seen.append(ctx.get(read.data))

    sim = Simulator(Fragment.get(mem, platform))
    sim.add_clock(1e-8)
    sim.add_testbench(bench)
    sim.run()
    return seen


def test_the_old_row_is_turned_over():
    assert after_clash(NO_CLASH, ClashPlatform()) == [0, OLD ^ 0xFF, OLD ^ 0xFF, NEW]


@pytest.mark.parametrize("attrs, platform", [({}, ClashPlatform()), (NO_CLASH, None)], ids=["no promise", "no checks"])
def test_otherwise_it_is_the_old_row(attrs, platform):
    assert after_clash(attrs, platform) == [0, OLD, OLD, NEW]


def test_verilog_without_assertions_has_the_promise_and_no_check():
    class Top(memory.wiring.Component):
        a: memory.wiring.In(2)
        d: memory.wiring.In(WIDTH)
        q: memory.wiring.Out(WIDTH)

        def elaborate(self, platform):
            m = Module()
            m.submodules.mem = mem = memory.Memory(shape=WIDTH, depth=4, init=[], attrs=NO_CLASH)
            write, read = mem.write_port(), mem.read_port()
            m.d.comb += [write.addr.eq(self.a), write.data.eq(self.d), write.en.eq(1), read.addr.eq(self.a), self.q.eq(read.data)]
            return m

    plain, checked = (to_verilog(Top(), assertions=assertions) for assertions in (False, True))
    assert "no_rw_check" in plain and "clash" not in plain
    assert "clash" in checked
