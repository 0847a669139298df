"""HalfRegister, SkidBuffer, StreamRegister, StreamFifo: order, capacity, throughput, latency."""

import zlib

import pytest

from rnic.stream.buffer import HalfRegister, SkidBuffer, StreamRegister
from rnic.stream.fifo import StreamFifo
from tests.unit.streams import collect, recv, seeded, send, simulate

BLOCKS = {
    "register": lambda width: StreamRegister(width),
    "skid": lambda width: SkidBuffer(width),
    "half": lambda width: HalfRegister(width),
    **{f"fifo{depth}": (lambda width, depth=depth: StreamFifo(width, depth)) for depth in (1, 2, 3, 4, 5, 16, 33)},
    **{f"direct{depth}": (lambda width, depth=depth: StreamFifo(width, depth, direct=True)) for depth in (4, 5, 32)},
}
HALF = ("fifo1", "half")  # an item every other cycle


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("stalls", [(0.0, 0.0), (0.5, 0.1), (0.1, 0.5), (0.4, 0.4)])
@pytest.mark.parametrize("name", BLOCKS)
def test_order(name, stalls, width):
    rng = seeded(zlib.crc32(f"{name} {stalls} {width}".encode()))
    dut = BLOCKS[name](width)
    items = [rng.getrandbits(width) for _ in range(150)]

    async def feed(ctx):
        await send(ctx, dut.i, items, rng, stalls[0])

    async def drain(ctx):
        assert await recv(ctx, dut.o, len(items), rng, stalls[1]) == items

    simulate(dut, feed, drain)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in HALF])
def test_throughput_and_latency(name):
    dut = BLOCKS[name](16)

    async def feed(ctx):
        await send(ctx, dut.i, range(40))

    async def drain(ctx):
        got = await collect(ctx, dut.o, 44)
        latency = 2 if name == "fifo3" else 1
        assert got == [(latency + n, n) for n in range(40)]

    simulate(dut, feed, drain)


@pytest.mark.parametrize("name", [n for n in BLOCKS if n not in (*HALF, "register")])
def test_no_item_rate_lost_after_stall(name):
    """After a stall the block is full or the producer is: the output never pauses while it drains."""
    dut = BLOCKS[name](16)

    async def feed(ctx):
        await send(ctx, dut.i, range(80))

    async def drain(ctx):
        await ctx.tick().repeat(40)
        got = await collect(ctx, dut.o, 80)
        assert got == [(n, n) for n in range(80)]

    simulate(dut, feed, drain)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 32])
def test_capacity(depth, direct):
    dut = StreamFifo(8, depth, direct=direct)

    async def bench(ctx):
        await send(ctx, dut.i, range(depth))
        await ctx.tick().repeat(4)
        assert ctx.get(dut.level) == depth
        assert not ctx.get(dut.i.ready)
        assert await recv(ctx, dut.o, depth) == list(range(depth))
        assert ctx.get(dut.level) == 0

    simulate(dut, bench)


def test_bad_depth():
    with pytest.raises(ValueError, match="must be at least 1"):
        StreamFifo(8, 0)
