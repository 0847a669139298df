# amaranth: UnusedElaboratable=no
"""Counters: none is lost, whatever comes at once."""

import pytest

from rnic.debug.counters import Counters
from tests.unit.streams import seeded, simulate


@pytest.mark.parametrize("n,density", [(1, 1.0), (2, 0.5), (3, 1.0), (27, 1.0), (27, 0.1)])
def test_every_pulse_counts(n, density):
    rng = seeded(n)
    dut = Counters(n)
    counts = [0] * n

    async def bench(ctx):
        for _ in range(400):
            pulses = [rng.random() < density for _ in range(n)]
            ctx.set(dut.pulses, sum(1 << i for i, pulse in enumerate(pulses) if pulse))
            counts[:] = [c + pulse for c, pulse in zip(counts, pulses, strict=True)]
            await ctx.tick()
        ctx.set(dut.pulses, 0)
        await ctx.tick().repeat(max(n, 4) + 4)
        for i in range(n):
            ctx.set(dut.index, i)
            await ctx.tick().repeat(2)
            assert ctx.get(dut.value) == counts[i]

    simulate(dut, bench)


def test_refuses_no_counters():
    with pytest.raises(ValueError, match="number of counters"):
        Counters(0)
