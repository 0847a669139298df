"""Frames to the own address: out of the transmit street, past the wire, into the receive street."""

import pytest

from rnic.rx.intake import Intake
from rnic.tx.turn import PATIENCE, FrameTurn
from tests.unit.streams import beats_of, recv_packet, seeded, send, send_packets, simulate


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.4])
def test_own_frames_turn_all_others_go_out(width, p_stall):
    dut, rng = FrameTurn(width, 64), seeded(width)
    frames = [bytes([own]) + rng.randbytes(rng.randint(1, 200)) for own in rng.choices((0, 1), k=60)]
    got = {0: [], 1: []}

    async def feed(ctx):
        for frame in frames:
            ctx.set(dut.own, frame[0])
            await send_packets(ctx, dut.frame, [frame], width, rng, p_stall)

    def drain(port, own):
        async def run(ctx):
            for _ in range(sum(frame[0] == own for frame in frames)):
                got[own].append((await recv_packet(ctx, port, rng, p_stall))[0])

        return run

    simulate(dut, feed, drain(dut.wire, 0), drain(dut.loop, 1), limit=20_000)
    assert got == {own: [frame for frame in frames if frame[0] == own] for own in (0, 1)}


def test_waits_for_room_then_drops_and_counts():
    """Nobody takes what turned: the frame that does not fit waits, is dropped, and the wire goes on behind it."""
    dut, rng = FrameTurn(64, 16), seeded(1)
    own = [rng.randbytes(100) for _ in range(2)]  # 13 beats each, room for 16 and the output's two
    out = rng.randbytes(70)
    got, drops = [], []

    async def feed(ctx):
        ctx.set(dut.own, 1)
        await send_packets(ctx, dut.frame, own, 64)
        ctx.set(dut.own, 0)
        await send_packets(ctx, dut.frame, [out], 64)

    async def drain(ctx):
        got.append((await recv_packet(ctx, dut.wire))[0])
        got.append((await recv_packet(ctx, dut.loop))[0])
        for _ in range(50):
            await ctx.tick()
            assert not ctx.get(dut.loop.valid)

    async def count(ctx):
        for cycle in range(PATIENCE + 200):
            await ctx.tick()
            if ctx.get(dut.overflow):
                drops.append(cycle)

    simulate(dut, feed, drain, count, limit=PATIENCE + 1000)
    assert got == [out, own[0]]
    assert len(drops) == 1 and drops[0] >= PATIENCE


def test_aborted_frame_vanishes():
    dut, rng = FrameTurn(64, 64), seeded(2)
    frames = [rng.randbytes(40) for _ in range(4)]
    got = []

    async def feed(ctx):
        ctx.set(dut.own, 1)
        for number, frame in enumerate(frames):
            await send(ctx, dut.frame, beats_of(frame, 64, err=int(number == 1)))

    async def drain(ctx):
        for _ in range(3):
            got.append((await recv_packet(ctx, dut.loop))[0])

    simulate(dut, feed, drain)
    assert got == [frames[0], *frames[2:]]


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.4])
def test_intake_keeps_frames_whole(width, p_stall):
    dut, rng = Intake(width), seeded(width + 1)
    frames = {name: [name + rng.randbytes(rng.randint(1, 300)) for _ in range(30)] for name in (b"w", b"l")}
    got = []

    async def wire(ctx):
        await send_packets(ctx, dut.wire, frames[b"w"], width, rng, p_stall)

    async def loop(ctx):
        await send_packets(ctx, dut.loop, frames[b"l"], width, rng, p_stall)

    async def drain(ctx):
        for _ in range(60):
            got.append((await recv_packet(ctx, dut.o, rng, p_stall))[0])

    simulate(dut, wire, loop, drain, limit=20_000)
    for name, sent in frames.items():
        assert [frame for frame in got if frame[:1] == name] == sent
    if p_stall == 0:  # in turn while both have frames
        kinds = [frame[:1] for frame in got[:40]]
        assert all(a != b for a, b in zip(kinds, kinds[1:], strict=False))
