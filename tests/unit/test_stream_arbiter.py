"""Arbiters, Demux, Fork, and the stream checkers themselves."""

import pytest
from amaranth.hdl import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.stream.arbiter import PacketArbiter, PriorityArbiter, StreamArbiter
from rnic.stream.beat import Beat
from rnic.stream.check import BeatChecker, StreamChecker, watch
from rnic.stream.demux import Demux
from rnic.stream.fork import Fork
from tests.unit.streams import recv, seeded, send, simulate


def item(width):
    return data.StructLayout({"data": width, "source": 3, "last": 1})


class Watched(wiring.Component):
    """An arbiter with checkers on its output."""

    def __init__(self, arbiter):
        self.arbiter = arbiter
        super().__init__({"i": In(stream.Signature(arbiter.shape)).array(arbiter.n),
                          "o": Out(stream.Signature(arbiter.shape)), "source": Out(3)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = self.arbiter
        for outer, inner in zip(self.i, self.arbiter.i, strict=True):
            wiring.connect(m, wiring.flipped(outer), inner)
        wiring.connect(m, self.arbiter.o, wiring.flipped(self.o))
        m.d.comb += self.source.eq(self.arbiter.source)
        watch(m, "o", self.arbiter.o)
        return m


KINDS = {
    "item": lambda shape, n: StreamArbiter(shape, n),
    "item_skid": lambda shape, n: StreamArbiter(shape, n, skid=True),
    "item_ahead": lambda shape, n: StreamArbiter(shape, n, skid=True, ahead=True),
    "packet": lambda shape, n: PacketArbiter(shape, n),
    "priority": lambda shape, n: PriorityArbiter(shape, n),
    "priority_packet": lambda shape, n: PriorityArbiter(shape, n, packets=True),
}


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_arbiters(kind, n, width):
    rng = seeded(n * 1000 + width)
    dut = Watched(KINDS[kind](item(width), n))
    sent = [[{"data": rng.getrandbits(width), "source": source, "last": int(rng.random() < 0.4 or k == 29)}
             for k in range(30)] for source in range(n)]

    def feed(source):
        async def bench(ctx):
            await send(ctx, dut.i[source], sent[source], rng, 0.3)
        return bench

    async def drain(ctx):
        got = [[] for _ in range(n)]
        owner = None
        for _ in range(30 * n):
            (payload,) = await recv(ctx, dut.o, 1, rng, 0.3)
            if "packet" in kind and owner is not None:
                assert payload.source == owner, "switched inside a packet"
            owner = None if payload.last else payload.source
            got[payload.source].append({"data": payload.data, "source": payload.source, "last": payload.last})
        assert got == sent

    simulate(dut, *(feed(source) for source in range(n)), drain)


def test_round_robin_is_fair():
    dut = StreamArbiter(item(8), 3)

    def feed(source):
        async def bench(ctx):
            await send(ctx, dut.i[source], [{"data": k, "source": source, "last": 1} for k in range(20)])
        return bench

    async def drain(ctx):
        sources = []
        ctx.set(dut.o.ready, 1)
        while len(sources) < 30:
            _, _, valid, payload, source = await ctx.tick().sample(dut.o.valid, dut.o.payload, dut.source)
            if valid:
                assert source == payload.source
                sources.append(source)
        assert sources == [0, 1, 2] * 10
        await recv(ctx, dut.o, 30)

    simulate(dut, *(feed(source) for source in range(3)), drain)


def test_priority():
    dut = PriorityArbiter(item(8), 2)

    def feed(source):
        async def bench(ctx):
            await send(ctx, dut.i[source], [{"data": k, "source": source, "last": 1} for k in range(10)])
        return bench

    async def drain(ctx):
        assert [p.source for p in await recv(ctx, dut.o, 20)] == [0] * 10 + [1] * 10

    simulate(dut, feed(0), feed(1), drain)


@pytest.mark.parametrize("field", ["source", None])
def test_demux(field):
    rng = seeded(4)
    dut = Demux(item(64), 3, field=field)
    items = [{"data": rng.getrandbits(64), "source": rng.randrange(3), "last": 0} for _ in range(100)]

    async def feed(ctx):
        for it in items:
            if field is None:
                ctx.set(dut.select, it["source"])
            await send(ctx, dut.i, [it], rng, 0.2)

    def drain(port):
        async def bench(ctx):
            want = [it["data"] for it in items if it["source"] == port]
            assert [p.data for p in await recv(ctx, dut.o[port], len(want), rng, 0.3)] == want
        return bench

    simulate(dut, feed, drain(0), drain(1), drain(2))


def test_demux_out_of_range():
    dut = Demux(item(8), 3, field="source")

    async def feed(ctx):
        await send(ctx, dut.i, [{"data": 1, "source": 3, "last": 0}])

    with pytest.raises(AssertionError, match="selector 3 out of range"):
        simulate(dut, feed)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_fork(n):
    rng = seeded(n)
    dut = Fork(64, n)
    items = [rng.getrandbits(64) for _ in range(60)]

    async def feed(ctx):
        await send(ctx, dut.i, items, rng, 0.2)

    def drain(port):
        async def bench(ctx):
            assert await recv(ctx, dut.o[port], len(items), rng, 0.3) == items
        return bench

    simulate(dut, feed, *(drain(port) for port in range(n)))


def drive(dut, cycles):
    async def bench(ctx):
        for valid, ready, payload in cycles:
            ctx.set(dut.valid, valid)
            ctx.set(dut.ready, ready)
            ctx.set(dut.payload, payload)
            await ctx.tick()
        await ctx.tick()
    return bench


def test_stream_checker():
    dut = StreamChecker(8)
    simulate(dut, drive(dut, [(1, 0, 5), (1, 0, 5), (1, 1, 5), (1, 1, 6), (0, 0, 7), (0, 1, 1)]))
    for cycles, message in (([(1, 0, 5), (0, 0, 5)], "valid dropped"), ([(1, 0, 5), (1, 1, 6)], "payload changed")):
        dut = StreamChecker(8)
        with pytest.raises(AssertionError, match=message):
            simulate(dut, drive(dut, cycles))


def beat(keep, last):
    return {"data": 0, "keep": keep, "last": last, "err": 0}


@pytest.mark.parametrize("cycles, message", [
    ([beat(0xFF, 0), beat(0x03, 1), beat(0xFF, 1), beat(0, 1)], None),
    ([beat(0x7F, 0)], "not full"),
    ([beat(0x05, 1)], "not contiguous"),
    ([beat(0x02, 1)], "not contiguous"),
    ([beat(0x00, 0)], "not full"),
    ([beat(0xFF, 0), beat(0x00, 1)], "empty beat"),
])
def test_beat_checker(cycles, message):
    dut = BeatChecker(64)
    bench = drive(dut, [(1, 1, payload) for payload in cycles] + [(0, 0, beat(0, 0))])
    if message is None:
        simulate(dut, bench)
    else:
        with pytest.raises(AssertionError, match=message):
            simulate(dut, bench)


def test_watch_checks_beats():
    class Watched(wiring.Component):
        def __init__(self):
            super().__init__({"i": In(stream.Signature(Beat(64)))})

        def elaborate(self, platform):
            m = Module()
            watch(m, "i", self.i)
            return m

    dut = Watched()

    async def bench(ctx):
        ctx.set(dut.i.valid, 1)
        ctx.set(dut.i.payload, beat(0x05, 1))
        await ctx.tick()
        await ctx.tick()

    with pytest.raises(AssertionError, match="i: keep 0x5 is not contiguous"):
        simulate(dut, bench)
