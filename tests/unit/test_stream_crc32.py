"""CRC-32 by words against zlib."""

import zlib

import pytest

from rnic.stream.crc32 import INIT, Crc32Unstep, Crc32Word, step_bytes, step_zeros
from tests.unit.streams import seeded, simulate


def test_python_steps():
    rng = seeded(1)
    for n in range(0, 70):
        message = rng.randbytes(n)
        state = step_bytes(INIT, message)
        assert state ^ INIT == zlib.crc32(message)
        assert step_zeros(step_zeros(state, n), -n) == state
        assert step_zeros(state, n) ^ INIT == zlib.crc32(message + bytes(n))


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_words(width):
    lanes = width // 8
    rng = seeded(width)
    packets = [rng.randbytes(lanes * rng.randint(1, 5)) for _ in range(8)]
    dut = Crc32Word(width)
    want = [zlib.crc32(p[: lanes * (k + 1)]) for p in packets for k in range(len(p) // lanes)]

    async def feed(ctx):
        for packet in packets:
            for at in range(0, len(packet), lanes):
                while rng.random() < 0.2:
                    ctx.set(dut.valid, 0)
                    ctx.set(dut.start, rng.getrandbits(1))
                    await ctx.tick()
                ctx.set(dut.valid, 1)
                ctx.set(dut.start, at == 0)
                ctx.set(dut.data, int.from_bytes(packet[at : at + lanes], "little"))
                await ctx.tick()
        ctx.set(dut.valid, 0)

    async def check(ctx):
        got = []
        while len(got) < len(want):
            _, _, done, state = await ctx.tick().sample(dut.done, dut.state)
            if done:
                got.append(state ^ INIT)
        assert got == want

    simulate(dut, feed, check)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_unstep(width):
    rng = seeded(width)
    units = width // 32
    cases = [(step_bytes(INIT, rng.randbytes(20)), count) for count in range(units)] * 2
    dut = Crc32Unstep(width, tag_width=6)

    async def feed(ctx):
        for tag, (state, count) in enumerate(cases):
            ctx.set(dut.valid, 1)
            ctx.set(dut.state, step_zeros(state, 4 * count))
            ctx.set(dut.count, count)
            ctx.set(dut.tag, tag)
            await ctx.tick()
        ctx.set(dut.valid, 0)

    async def check(ctx):
        await ctx.tick().repeat(dut.stages)
        for tag, (state, _) in enumerate(cases):
            _, _, valid, got, got_tag = await ctx.tick().sample(dut.o_valid, dut.o_state, dut.o_tag)
            assert (valid, got, got_tag) == (1, state, tag)

    simulate(dut, feed, check)
