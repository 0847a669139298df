"""DmaRead against a memory model and a bytearray, protocol checker on."""

import pytest

from rnic.memory.dma_read import DmaRead, ReadClient
from tests.unit.axi_model import AxiMemory, WithChecker
from tests.unit.streams import collect, recv, seeded, send, simulate

BASE = 0x1_2345_6789_0000 + 0x1000  # a page boundary, so that carries above bit 31 are seen


def clients_of(*buffers):
    return [ReadClient(name=f"client{k}", buffer_beats=beats) for k, beats in enumerate(buffers)]


def run(width, jobs, rng, buffers=(64,), latency=(1, 1), p_stall=0.0, p_client=0.0, bad=(), size=0x5000, limit=30000):
    """jobs: per client a list of (offset, length). Every access must bring its bytes and its error flag."""
    dma = DmaRead(width, clients_of(*buffers))
    dut = WithChecker(dma, width)
    memory = AxiMemory(dma.axi, width, BASE, size, rng, latency, p_stall, bad)
    lanes = width // 8
    open_clients = len(jobs)

    def give(number):
        async def bench(ctx):
            await send(ctx, getattr(dma, f"client{number}").command,
                       [{"address": BASE + at, "length": length} for at, length in jobs[number]], rng, p_client)
        return bench

    def take(number):
        async def bench(ctx):
            nonlocal open_clients
            for at, length in jobs[number]:
                got = bytearray()
                last = False
                while not last:
                    (word,) = await recv(ctx, getattr(dma, f"client{number}").word, 1, rng, p_client)
                    assert word.first == ((at % lanes) if not got else 0)
                    got += int(word.data).to_bytes(lanes, "little")[word.first : word.first + word.count]
                    last = bool(word.last)
                    assert last or not word.err
                want = memory.data[at : at + length]
                assert got == want, (number, at, length)
                low = BASE + at - at % lanes
                high = BASE + -(-(at + length) // lanes) * lanes
                assert bool(word.err) == any(low < b and high > a for a, b in bad)
            open_clients -= 1
            if not open_clients:
                for _ in range(3):
                    await ctx.tick()
                assert ctx.get(dut.idle) and not ctx.get(dma.busy)
                memory.stop = True
        return bench

    simulate(dut, memory.read_bench, *(give(k) for k in range(len(jobs))), *(take(k) for k in range(len(jobs))),
             limit=limit)
    return memory


@pytest.mark.parametrize("p_stall, latency", [(0.0, (1, 1)), (0.2, (1, 30))])
def test_every_alignment_and_length(p_stall, latency):
    rng = seeded(1)
    jobs = [(64 * start + start, length) for start in range(8) for length in range(1, 3 * 8 + 2)]
    run(64, [jobs], rng, latency=latency, p_stall=p_stall, p_client=p_stall / 2)


@pytest.mark.parametrize("width", [64, 512])
def test_page_ends(width):
    rng = seeded(width)
    lanes = width // 8
    jobs = [(page - back, length) for page in (0x1000, 0x2000) for back in (1, lanes - 1, lanes, lanes + 3)
            for length in (1, back, back + 1, back + 2 * lanes, 2 * lanes + 5)]
    jobs += [(0x0FFF, 0x1002), (5, 0x4FF0 - 5), (0x0800, 0x0800), (0x1000, 0x1000)]
    run(width, [jobs], rng, buffers=(128,), latency=(1, 20))


@pytest.mark.parametrize("width", [64, 128, 512])
def test_clients(width):
    rng = seeded(width + 3)
    lanes = width // 8

    def jobs():
        return [(rng.randrange(0x3000), rng.choice((1, lanes, 3 * lanes + 1, rng.randint(1, 20 * lanes))))
                for _ in range(25)]

    run(width, [jobs(), jobs(), jobs()], rng, buffers=(2, 7, 64), latency=(1, 60), p_stall=0.2, p_client=0.2)


@pytest.mark.parametrize("width", [64, 512])
def test_errors(width):
    rng = seeded(9)
    lanes = width // 8
    jobs = [(k * lanes + 3, rng.randint(1, 6 * lanes)) for k in range(40)]
    run(width, [jobs, jobs[::-1]], rng, buffers=(16, 16), latency=(1, 20),
        bad=[(BASE + 10 * lanes, BASE + 11 * lanes), (BASE + 25 * lanes, BASE + 26 * lanes)])


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("width", [64, 512])
def test_latency_and_rate(width, clients):
    """Command to AR 3 cycles, an AR each cycle (of one client each second), R to word 2 cycles."""
    rng = seeded(5)
    lanes = width // 8
    dma = DmaRead(width, clients_of(*[128] * clients))
    memory = AxiMemory(dma.axi, width, BASE, 0x1000, rng, latency=(20, 20))
    ports = [getattr(dma, f"client{k}") for k in range(clients)]
    times = []

    def give(port):
        async def bench(ctx):
            await send(ctx, port.command, [{"address": BASE + lanes * k, "length": lanes} for k in range(15)])
        return bench

    def take(port):
        async def bench(ctx):
            times.extend(cycle for cycle, _ in await collect(ctx, port.word, 70))
            memory.stop = True
        return bench

    simulate(WithChecker(dma, width), memory.read_bench, *map(give, ports), *map(take, ports))
    ars = list(range(3, 33)) if clients == 2 else list(range(3, 33, 2))
    assert memory.ar_times == ars
    assert sorted(times) == [cycle + 20 + 2 for cycle in ars]  # R 20 cycles behind AR, the word 2 behind R


def test_a_word_each_cycle():
    """Long accesses: the bus's R beats come out one per cycle, across bursts and accesses."""
    rng = seeded(8)
    dma = DmaRead(64, clients_of(256))
    memory = AxiMemory(dma.axi, 64, BASE, 0x4000, rng, latency=(30, 30))

    async def give(ctx):
        await send(ctx, dma.client0.command, [{"address": BASE + 0x1000 * k + 0xF00, "length": 512} for k in range(3)])

    async def take(ctx):
        got = [cycle for cycle, _ in await collect(ctx, dma.client0.word, 240)]
        assert got == list(range(3 + 30 + 2, 3 + 30 + 2 + 3 * 64))
        memory.stop = True

    simulate(WithChecker(dma, 64), memory.read_bench, give, take)


def test_a_client_without_room_blocks_nobody():
    rng = seeded(6)
    dma = DmaRead(64, clients_of(4, 16))
    memory = AxiMemory(dma.axi, 64, BASE, 0x1000, rng, latency=(5, 5))

    async def stuck(ctx):
        for _ in range(6):
            await send(ctx, dma.client0.command, [{"address": BASE, "length": 64}])
            if memory.stop:
                break

    async def other(ctx):
        await send(ctx, dma.client1.command, [{"address": BASE + 8 * k, "length": 24} for k in range(20)])

    async def take(ctx):
        got = await recv(ctx, dma.client1.word, 60)
        data = b"".join(int(word.data).to_bytes(8, "little") for word in got)
        assert data == b"".join(bytes(memory.data[8 * k : 8 * k + 24]) for k in range(20))
        # Now let the other one go on.
        assert len(await recv(ctx, dma.client0.word, 48)) == 48
        memory.stop = True

    simulate(WithChecker(dma, 64), memory.read_bench, stuck, other, take)


@pytest.mark.parametrize("clients, message", [
    (lambda: [], "one or more"),
    (lambda: [ReadClient(name="a", buffer_beats=4)] * 2, "different names"),
    (lambda: [ReadClient(name="a", buffer_beats=1)], "buffer_beats of a is 1"),
    (lambda: [ReadClient(name="a", buffer_beats=4, commands=0)], "commands of a is 0"),
])
def test_bad_clients(clients, message):
    with pytest.raises(ValueError, match=message):
        DmaRead(64, clients())
