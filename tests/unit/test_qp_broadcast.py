"""The context bus to all tables: every write once, in order, in every reader's own time."""

import random

import pytest
from amaranth.sim import Simulator

from rnic.config import CONFIGS, Params
from rnic.qp.broadcast import CtxBroadcast


@pytest.mark.parametrize("seed", range(3))
def test_every_reader_once_in_order(seed):
    print("seed", seed)
    rng = random.Random(seed)
    dut = CtxBroadcast(Params(CONFIGS["tiny"]), 5)
    sent = [{"index": rng.randrange(4), "data": rng.getrandbits(32)} for _ in range(60)]
    got = [[] for _ in range(5)]
    taken = []

    async def bench(ctx):
        queue = list(sent)
        busy = False
        for _ in range(3000):
            if not busy and queue and rng.random() < 0.5:
                for name, value in queue[0].items():
                    ctx.set(dut.i.payload[name], value)
                busy = True
            ctx.set(dut.i.valid, busy)
            for port in dut.o:
                ctx.set(port.ready, rng.random() < 0.4)
            for k, port in enumerate(dut.o):
                if ctx.get(port.valid) and ctx.get(port.ready):
                    got[k].append({"index": ctx.get(port.payload.index), "data": ctx.get(port.payload.data)})
            if ctx.get(dut.i.valid) and ctx.get(dut.i.ready):
                taken.append(queue.pop(0))
                busy = False
                assert all(len(items) == len(taken) for items in got), "taken before it is in every table"
            await ctx.tick()
            if len(taken) == len(sent):
                return
        raise AssertionError("time-out")

    sim = Simulator(dut)
    sim.add_clock(1e-6)
    sim.add_testbench(bench)
    sim.run()
    assert taken == sent and all(items == sent for items in got)


def test_needs_a_reader():
    with pytest.raises(ValueError, match="number of readers is 0"):
        CtxBroadcast(Params(CONFIGS["tiny"]), 0)
