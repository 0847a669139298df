"""DmaWrite against a memory model and a bytearray, protocol checker on."""

import pytest

from rnic.memory.dma_write import DmaWrite
from tests.unit.axi_model import AxiMemory, WithChecker
from tests.unit.streams import collect, recv, seeded, send, send_packets, simulate

BASE = 0x1_2345_6789_0000 + 0x1000


def run(width, jobs, rng, latency=(1, 1), p_stall=0.0, p_client=0.0, bad=(), size=0x5000, outstanding=16, limit=30000):
    """jobs: per client a list of (offset, bytes); clients write to places of their own. Checks memory and reports."""
    names = [f"client{k}" for k in range(len(jobs))]
    dma = DmaWrite(width, names, outstanding=outstanding)
    dut = WithChecker(dma, width)
    memory = AxiMemory(dma.axi, width, BASE, size, rng, latency, p_stall, bad)
    image = bytearray(memory.data)
    for client in jobs:
        for at, payload in client:
            image[at : at + len(payload)] = payload
    lanes = width // 8
    reports = 2 * len(jobs)

    def commands(number):
        async def bench(ctx):
            await send(ctx, getattr(dma, names[number]).command,
                       [{"address": BASE + at, "length": len(payload)} for at, payload in jobs[number]], rng, p_client)
        return bench

    def feed(number):
        async def bench(ctx):
            await send_packets(ctx, getattr(dma, names[number]).data, [payload for _, payload in jobs[number]], width,
                               rng, p_client)
        return bench

    async def finish(ctx):
        nonlocal reports
        reports -= 1
        if not reports:
            for _ in range(3):
                await ctx.tick()
            assert ctx.get(dut.idle) and not ctx.get(dma.busy)
            memory.stop = True

    def accepted(number):
        async def bench(ctx):
            await recv(ctx, getattr(dma, names[number]).accepted, len(jobs[number]), rng, p_client)
            await finish(ctx)
        return bench

    def done(number):
        async def bench(ctx):
            for at, payload in jobs[number]:
                (err,) = await recv(ctx, getattr(dma, names[number]).done, 1, rng, p_client)
                low = BASE + at - at % lanes
                high = BASE + -(-(at + len(payload)) // lanes) * lanes
                assert bool(err) == any(low < b and high > a for a, b in bad), (number, at, len(payload))
                if len(jobs) == 1 and p_client == 0 and not bad:
                    assert memory.data[at : at + len(payload)] == payload
            await finish(ctx)
        return bench

    numbers = range(len(jobs))
    simulate(dut, memory.write_bench, *(bench(k) for bench in (commands, feed, accepted, done) for k in numbers),
             limit=limit)
    assert memory.data == image
    return memory


def disjoint(sizes, rng, gap=1):
    """Jobs of these sizes behind one another, so that every byte around them is checked too."""
    jobs, at = [], 0
    for size in sizes:
        at += rng.randrange(gap + 1)
        jobs.append((at, rng.randbytes(size)))
        at += size
    return jobs


@pytest.mark.parametrize("p_stall, latency", [(0.0, (1, 1)), (0.2, (1, 30))])
def test_every_alignment_and_length(p_stall, latency):
    rng = seeded(1)
    jobs = [(64 * (25 * start + length) + start, rng.randbytes(length)) for start in range(8)
            for length in range(1, 3 * 8 + 2)]
    run(64, [jobs], rng, latency=latency, p_stall=p_stall, p_client=p_stall / 2)


@pytest.mark.parametrize("width", [64, 512])
def test_page_ends(width):
    rng = seeded(width)
    lanes = width // 8
    jobs = [(page - back, rng.randbytes(length)) for page in (0x1000, 0x2000) for back in (1, lanes - 1, lanes, lanes + 3)
            for length in (1, back, back + 1, back + 2 * lanes, 2 * lanes + 5)]
    run(width, [jobs], rng, latency=(1, 1), outstanding=1)
    long = [(0x0FFF, rng.randbytes(0x1002)), (0x2005, rng.randbytes(0x2FF0 - 5)), (0x0000, rng.randbytes(0x0800))]
    run(width, [long], rng, latency=(1, 20), p_stall=0.1)


@pytest.mark.parametrize("outstanding", [1, 2, 3, 16])
@pytest.mark.parametrize("width", [64, 128, 512])
def test_clients(width, outstanding):
    rng = seeded(width + outstanding)
    lanes = width // 8
    sizes = [rng.choice((1, lanes, 3 * lanes + 1, rng.randint(1, 20 * lanes))) for _ in range(36)]
    jobs = disjoint(sizes, rng, 3)
    rng.shuffle(jobs)
    run(width, [jobs[:12], jobs[12:24], jobs[24:]], rng, latency=(1, 60), p_stall=0.2, p_client=0.2,
        outstanding=outstanding)


@pytest.mark.parametrize("width", [64, 512])
def test_errors(width):
    rng = seeded(9)
    lanes = width // 8
    jobs = disjoint([rng.randint(1, 3 * lanes) for _ in range(40)], rng)
    jobs.append((0x2000 - 7, rng.randbytes(0x1010)))
    bad = [(BASE + 10 * lanes, BASE + 11 * lanes), (BASE + 25 * lanes, BASE + 26 * lanes),
           (BASE + 0x2000, BASE + 0x2040)]
    run(width, [jobs[::2], jobs[1::2]], rng, latency=(1, 20), bad=bad)


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("width, to_w", [(64, 3), (128, 4), (512, 4)])
def test_latency_and_rate(width, to_w, clients):
    """Command to AW 3 cycles, to W 3 or 4; one-beat accesses: one per 2 cycles of a client, one per cycle of two."""
    rng = seeded(5)
    lanes = width // 8
    names = ["a", "b"][:clients]
    dma = DmaWrite(width, names, outstanding=32)
    memory = AxiMemory(dma.axi, width, BASE, 0x1000, rng, latency=(5, 5))
    total = 12 * clients
    step = 2 if clients == 1 else 1
    reports = {"accepted": [], "done": []}

    def commands(number, name):
        async def bench(ctx):
            await send(ctx, getattr(dma, name).command,
                       [{"address": BASE + lanes * (16 * number + k), "length": lanes} for k in range(12)])
        return bench

    def feed(name):
        async def bench(ctx):
            await send_packets(ctx, getattr(dma, name).data, [rng.randbytes(lanes) for _ in range(12)], width)
        return bench

    def reported(name, what):
        async def bench(ctx):
            reports[what] += [cycle for cycle, _ in await collect(ctx, getattr(getattr(dma, name), what), 60)]
            memory.stop = True
        return bench

    simulate(WithChecker(dma, width), memory.write_bench, *(commands(k, name) for k, name in enumerate(names)),
             *(feed(name) for name in names), *(reported(name, what) for name in names for what in reports))
    assert memory.aw_times == list(range(3, 3 + step * total, step))
    assert memory.w_times == list(range(to_w, to_w + step * total, step))
    # `accepted` the cycle after both AW and W were taken; B the model's 5 cycles behind W, `done` 2 behind B
    assert sorted(reports["accepted"]) == [cycle + 1 for cycle in memory.w_times]
    assert sorted(reports["done"]) == [cycle + 5 + 2 for cycle in memory.w_times]


def test_w_beats_every_cycle():
    """Long unaligned accesses of two clients: no idle W cycle inside or between them."""
    rng = seeded(6)
    dma = DmaWrite(64, ["a", "b"], outstanding=8)
    memory = AxiMemory(dma.axi, 64, BASE, 0x4000, rng, latency=(5, 5))
    jobs = {"a": [(0x0003, rng.randbytes(400)), (0x0800 - 9, rng.randbytes(400))],
            "b": [(0x2000, rng.randbytes(256)), (0x2801, rng.randbytes(255))]}

    def commands(name):
        async def bench(ctx):
            await send(ctx, getattr(dma, name).command,
                       [{"address": BASE + at, "length": len(p)} for at, p in jobs[name]])
        return bench

    def feed(name):
        async def bench(ctx):
            await send_packets(ctx, getattr(dma, name).data, [p for _, p in jobs[name]], 64)
        return bench

    async def finish(ctx):
        await recv(ctx, dma.a.done, 2)
        await recv(ctx, dma.b.done, 2)
        memory.stop = True

    simulate(WithChecker(dma, 64), memory.write_bench, *(commands(n) for n in jobs), *(feed(n) for n in jobs), finish)
    words = 51 + 51 + 32 + 32
    assert memory.w_times == list(range(3, 3 + words))


def test_address_is_never_taken_before_data():
    """A memory that takes AW only after W has begun: no deadlock, W is offered together with AW."""
    rng = seeded(7)
    dma = DmaWrite(64, ["a"])
    jobs = [(0x0FF8, rng.randbytes(64)), (3, rng.randbytes(7))]
    memory = bytearray(0x2000)

    async def commands(ctx):
        await send(ctx, dma.a.command, [{"address": BASE + at, "length": len(p)} for at, p in jobs])

    async def feed(ctx):
        await send_packets(ctx, dma.a.data, [p for _, p in jobs], 64)

    async def bus(ctx):
        axi = dma.axi
        for _ in range(3):
            words = []
            last = 0
            ctx.set(axi.wready, 1)
            while not last:
                _, _, valid, word, strb, last_now = await ctx.tick().sample(
                    axi.wvalid, axi.wdata, axi.wstrb, axi.wlast)
                if valid:
                    words.append((word, strb))
                    last = last_now
            ctx.set(axi.wready, 0)
            ctx.set(axi.awready, 1)
            valid = 0
            while not valid:
                _, _, valid, address = await ctx.tick().sample(axi.awvalid, axi.awaddr)
            ctx.set(axi.awready, 0)
            for k, (word, strb) in enumerate(words):
                for lane in range(8):
                    if strb >> lane & 1:
                        memory[address - BASE + 8 * k + lane] = word >> 8 * lane & 0xFF
            ctx.set(axi.bvalid, 1)
            await ctx.tick()
            ctx.set(axi.bvalid, 0)

    async def finish(ctx):
        assert await recv(ctx, dma.a.done, 2) == [0, 0]
        await recv(ctx, dma.a.accepted, 2)

    simulate(WithChecker(dma, 64), commands, feed, bus, finish)
    for at, payload in jobs:
        assert memory[at : at + len(payload)] == payload


@pytest.mark.parametrize("clients, outstanding, message", [
    ([], 4, "one or more"), (["a", "a"], 4, "different names"), (["axi"], 4, "must not be named"),
    (["a"], 0, "outstanding is 0"),
])
def test_bad_parameters(clients, outstanding, message):
    with pytest.raises(ValueError, match=message):
        DmaWrite(64, clients, outstanding=outstanding)
