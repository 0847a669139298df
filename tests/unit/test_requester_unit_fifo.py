"""UnitFifo: bus words to units; order, capacity, latency."""

import pytest

from rnic.requester.unit_fifo import UnitFifo
from tests.unit.streams import collect, recv, seeded, send, simulate


def words_of(unit: int, width: int) -> list[int]:
    return [unit >> at & (1 << width) - 1 for at in range(0, 512, width)]


@pytest.mark.parametrize("stalls", [(0.0, 0.0), (0.3, 0.1), (0.1, 0.7)])
@pytest.mark.parametrize(("width", "depth"), [(64, 4), (128, 3), (512, 8)])
def test_order(width, depth, stalls):
    rng = seeded(width + depth)
    dut = UnitFifo(width, 512, depth)
    units = [rng.getrandbits(512) for _ in range(40)]

    async def feed(ctx):
        await send(ctx, dut.i, [word for unit in units for word in words_of(unit, width)], rng, stalls[0])

    async def drain(ctx):
        assert await recv(ctx, dut.o, len(units), rng, stalls[1]) == units

    simulate(dut, feed, drain)


@pytest.mark.parametrize("width", [64, 512])
def test_latency(width):
    """A unit shows a cycle after its last word; words follow each other without a gap."""
    dut = UnitFifo(width, 512, 4)
    units = [sum(1 << 8 * i for i in range(64)) * n for n in range(1, 9)]
    words = 512 // width

    async def feed(ctx):
        await send(ctx, dut.i, [word for unit in units for word in words_of(unit, width)])

    async def drain(ctx):
        got = await collect(ctx, dut.o, words * len(units) + 2)
        assert got == [(words * (n + 1), unit) for n, unit in enumerate(units)]

    simulate(dut, feed, drain)


def test_capacity():
    """All units fit, and not one word more."""
    dut = UnitFifo(64, 512, 4)

    async def bench(ctx):
        await send(ctx, dut.i, range(32))
        await ctx.tick().repeat(2)
        assert not ctx.get(dut.i.ready)
        assert [await recv(ctx, dut.o, 1) for _ in range(4)] == [
            [sum(8 * n + i << 64 * i for i in range(8))] for n in range(4)]

    simulate(dut, bench)


@pytest.mark.parametrize(("unit", "depth", "message"), [(100, 4, "multiple of 64"), (512, 1, "at least 2")])
def test_bad_parameters(unit, depth, message):
    with pytest.raises(ValueError, match=message):
        UnitFifo(64, unit, depth)
