"""Packer and Scatter: every alignment and length at 64 bits, drawn ones at 512."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rnic.stream.align import Packer, Scatter
from tests.unit.streams import beats_of, collect, recv, recv_packet, seeded, send, send_packets, shared, simulate


def words_of(segments, lanes, rng, err=0):
    """RawWord dicts of one packet: each segment (start lane, bytes) becomes aligned bus words; unused lanes are noise."""
    words = []
    for start, payload in segments:
        at = 0
        lane = start
        while at < len(payload) or not payload:
            part = payload[at : at + lanes - lane]
            word = bytearray(rng.randbytes(lanes))
            word[lane : lane + len(part)] = part
            words.append({"data": int.from_bytes(word, "little"), "first": lane, "count": len(part),
                          "last": 0, "err": 0})
            at += len(part)
            lane = 0
            if not payload:
                break
    words[-1]["last"] = 1
    words[-1]["err"] = err
    return words


def run_packer(width, packets, rng, p_in=0.0, p_out=0.0, limit=20000):
    """packets: list of (segments, err)."""
    dut = shared(Packer, width)
    want = [(b"".join(payload for _, payload in segments), err) for segments, err in packets]

    async def feed(ctx):
        for segments, err in packets:
            await send(ctx, dut.i, words_of(segments, width // 8, rng, err), rng, p_in)

    async def drain(ctx):
        for packet in want:
            assert await recv_packet(ctx, dut.o, rng, p_out) == packet

    simulate(dut, feed, drain, limit=limit)


@pytest.mark.parametrize("p_in, p_out", [(0.0, 0.0), (0.3, 0.3)])
def test_packer_every_offset_and_length(p_in, p_out):
    rng = seeded(1)
    packets = [([(start, rng.randbytes(length))], rng.getrandbits(1)) for start in range(8)
               for length in range(1, 2 * 8 + 9)]
    run_packer(64, packets, rng, p_in, p_out)


@pytest.mark.parametrize("width", [64, 512])
def test_packer_two_segments(width):
    rng = seeded(2)
    lanes = width // 8
    lengths = range(1, lanes + 2) if width == 64 else rng.sample(range(1, 2 * lanes), 8)
    starts = range(lanes) if width == 64 else rng.sample(range(lanes), 3)
    packets = [([(0, rng.randbytes(a)), (start, rng.randbytes(b))], 0)
               for a in lengths for start in starts for b in lengths]
    run_packer(width, packets, rng)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_packer_many_segments(width):
    rng = seeded(width)
    lanes = width // 8
    packets = [([(rng.randrange(lanes), rng.randbytes(rng.choice((1, 2, lanes - 1, lanes, lanes + 1, 3 * lanes))))
                 for _ in range(rng.randint(1, 5))], rng.getrandbits(1)) for _ in range(40)]
    packets[3] = ([(0, b"")], 0)
    packets[4] = ([(5, b"")], 1)
    run_packer(width, packets, rng, 0.2, 0.2)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 200)), min_size=1, max_size=4), min_size=1,
                max_size=6), st.sampled_from([0.0, 0.3]))
def test_packer_512_drawn(shapes, p_stall):
    rng = seeded(7)
    packets = [([(start, rng.randbytes(length)) for start, length in segments], 0) for segments in shapes]
    run_packer(512, packets, rng, p_stall, p_stall)


def test_packer_err_of_a_middle_word():
    dut = shared(Packer, 64)
    rng = seeded(3)
    words = words_of([(3, rng.randbytes(30))], 8, rng) + words_of([(0, rng.randbytes(9))], 8, rng)
    words[1]["err"] = 1

    async def feed(ctx):
        await send(ctx, dut.i, words)

    async def drain(ctx):
        assert (await recv_packet(ctx, dut.o))[1] == 1
        assert (await recv_packet(ctx, dut.o))[1] == 0

    simulate(dut, feed, drain)


@pytest.mark.parametrize("width, latency", [(64, 2), (128, 3), (256, 3), (512, 3)])
def test_packer_rate(width, latency):
    """Full words make a beat each cycle; an unaligned packet costs at most one idle cycle."""
    lanes = width // 8
    rng = seeded(5)
    aligned = [([(0, rng.randbytes(4 * lanes))], 0) for _ in range(4)]
    shifted = [([(lanes - 1, rng.randbytes(4 * lanes))], 0) for _ in range(4)]
    for packets, want in ((aligned, list(range(latency, latency + 16))),
                          (shifted, [latency + 1 + 5 * p + k for p in range(4) for k in range(4)])):
        dut = shared(Packer, width)

        async def feed(ctx, dut=dut, packets=packets):
            for segments, err in packets:
                await send(ctx, dut.i, words_of(segments, lanes, rng, err))

        async def drain(ctx, dut=dut, want=want):
            assert [cycle for cycle, _ in await collect(ctx, dut.o, want[-1] + 4)] == want

        simulate(dut, feed, drain)


def test_packer_rejects_an_empty_word_inside():
    dut = shared(Packer, 64)
    word = {"data": 0, "first": 0, "count": 8, "last": 0, "err": 0}

    async def feed(ctx):
        await send(ctx, dut.i, [word, {**word, "count": 0, "last": 1}])
        await ctx.tick()

    async def drain(ctx):
        ctx.set(dut.o.ready, 1)

    with pytest.raises(AssertionError, match="without bytes inside a packet"):
        simulate(dut, feed, drain)


# ----------------------------------------------------------------------------------------------------------- Scatter
def expect_scatter(start, payload, lanes, block):
    """(strb, masked data, last, block_last) of each word."""
    image = bytes(start % lanes) + payload
    words = []
    for at in range(0, len(image), lanes):
        part = image[at : at + lanes]
        strb = sum(1 << lane for lane in range(len(part)) if at + lane >= start % lanes)
        last = at + lanes >= len(image)
        address = start - start % lanes + at
        words.append((strb, int.from_bytes(part, "little"), int(last), int(last or (address + lanes) % block == 0)))
    return words


def masked(word, lanes):
    mask = sum(0xFF << 8 * lane for lane in range(lanes) if word.strb >> lane & 1)
    return word.strb, word.data & mask, word.last, word.block_last


def scatter_command(start, length, lanes, tag=0):
    end = start + length - 1
    words = end // lanes - start // lanes + 1
    return {"start": start, "end": end, "single": int(words == 1), "double": int(words == 2), "tag": tag}


def run_scatter(width, jobs, rng, p_in=0.0, p_out=0.0, block=None, limit=20000):
    lanes = width // 8
    dut = shared(Scatter, width, block=block, tag_width=4)

    async def commands(ctx):
        await send(ctx, dut.command, [scatter_command(start, len(payload), lanes, k & 15)
                                      for k, (start, payload) in enumerate(jobs)], rng, p_in)

    async def feed(ctx):
        await send_packets(ctx, dut.i, [payload for _, payload in jobs], width, rng, p_in)

    async def drain(ctx):
        for k, (start, payload) in enumerate(jobs):
            want = expect_scatter(start, payload, lanes, block or lanes)
            got = await recv(ctx, dut.o, len(want), rng, p_out)
            assert [masked(word, lanes) for word in got] == want, (start, len(payload))
            assert all(word.tag == k & 15 for word in got)

    simulate(dut, commands, feed, drain, limit=limit)


@pytest.mark.parametrize("p_in, p_out", [(0.0, 0.0), (0.3, 0.3)])
def test_scatter_every_offset_and_length(p_in, p_out):
    rng = seeded(11)
    jobs = [(start, rng.randbytes(length)) for start in range(8) for length in range(1, 2 * 8 + 9)]
    run_scatter(64, jobs, rng, p_in, p_out)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_scatter_blocks(width):
    rng = seeded(width + 1)
    block = width // 8 * 4
    jobs = [(rng.randrange(block), rng.randbytes(rng.randint(1, 3 * block))) for _ in range(30)]
    run_scatter(width, jobs, rng, 0.2, 0.2, block)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 200)), min_size=1, max_size=10),
       st.sampled_from([0.0, 0.3]))
def test_scatter_512_drawn(shapes, p_stall):
    rng = seeded(13)
    run_scatter(512, [(start, rng.randbytes(length)) for start, length in shapes], rng, p_stall, p_stall)


@pytest.mark.parametrize("width, latency", [(64, 2), (512, 3)])
def test_scatter_rate(width, latency):
    """One word per cycle, also from one command to the next."""
    lanes = width // 8
    rng = seeded(17)
    jobs = [(lanes - 1, rng.randbytes(3 * lanes))] * 3 + [(0, rng.randbytes(lanes))] * 4
    dut = shared(Scatter, width)
    words = 3 * 4 + 4

    async def commands(ctx):
        await send(ctx, dut.command, [scatter_command(start, len(payload), lanes) for start, payload in jobs])

    async def feed(ctx):
        await send_packets(ctx, dut.i, [payload for _, payload in jobs], width)

    async def drain(ctx):
        got = await collect(ctx, dut.o, words + 8)
        assert [cycle for cycle, _ in got] == list(range(latency, latency + words))

    simulate(dut, commands, feed, drain)


def test_scatter_rejects_a_wrong_length():
    dut = shared(Scatter, 64)

    async def feed(ctx):
        ctx.set(dut.o.ready, 1)
        ctx.set(dut.command.valid, 1)
        ctx.set(dut.command.payload, scatter_command(0, 9, 8))
        await send(ctx, dut.i, beats_of(bytes(8), 64))
        await ctx.tick()

    with pytest.raises(AssertionError, match="differ at beat 0"):
        simulate(dut, feed)
