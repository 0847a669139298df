"""The frame FIFO for the host side: whole frames or nothing."""

import pytest

from rnic.rx.eth_fifo import EthFifo
from tests.unit.streams import beats_of, packet_of, seeded, simulate


@pytest.mark.parametrize("width", (64, 512))
@pytest.mark.parametrize("stall", (0.0, 0.5, 0.9))
def test_keeps_whole_frames_and_forgets_the_others(width, stall):
    rng = seeded(width + int(10 * stall))
    depth = 16
    dut = EthFifo(width, depth)
    lanes = width // 8
    frames = [(rng.randbytes(rng.randrange(1, 20 * lanes)), rng.random() < 0.7) for _ in range(60)]
    kept, refused, lost = [], [], []
    got, done = [], False

    async def feed(ctx):
        nonlocal done
        for raw, commit in frames:
            for beat in beats_of(raw, width):
                ctx.set(dut.beat, beat)
                ctx.set(dut.commit, commit)
                ctx.set(dut.valid, 1)
                _, _, overflow = await ctx.tick().sample(dut.overflow)
            ctx.set(dut.valid, 0)
            (refused if not commit else lost if overflow else kept).append(raw)
            if rng.random() < 0.5:
                await ctx.tick().repeat(rng.randrange(1, 20))
        done = True

    async def drain(ctx):
        beats, quiet = [], 0
        while not (done and quiet > 20):
            ctx.set(dut.o.ready, rng.random() >= stall)
            _, _, valid, ready, beat = await ctx.tick().sample(dut.o.valid, dut.o.ready, dut.o.payload)
            quiet = 0 if valid else quiet + 1
            if valid and ready:
                beats.append(beat)
                if beat.last:
                    got.append(packet_of(beats))
                    beats = []
        assert not beats

    simulate(dut, feed, drain, limit=20000)
    assert got == kept and kept and refused
    assert all(len(raw) <= depth * lanes for raw in kept)
    assert any(len(raw) > depth * lanes for raw, _ in frames) and lost
    if stall == 0:  # nothing is lost that fits the empty FIFO and comes when it is empty
        assert kept[0] == next(raw for raw, commit in frames if commit and len(raw) <= depth * lanes)


def test_latency_and_rate():
    dut = EthFifo(64, 16)
    raw = bytes(range(64))
    seen = []

    async def feed(ctx):
        for _ in range(2):
            for beat in beats_of(raw, 64):
                ctx.set(dut.beat, beat)
                ctx.set(dut.commit, 1)
                ctx.set(dut.valid, 1)
                await ctx.tick()
        ctx.set(dut.valid, 0)

    async def drain(ctx):
        ctx.set(dut.o.ready, 1)
        for cycle in range(40):
            _, _, valid = await ctx.tick().sample(dut.o.valid)
            if valid:
                seen.append(cycle)

    simulate(dut, feed, drain)
    assert seen == list(range(7 + 3, 7 + 3 + 16))  # last beat of the first frame in cycle 7, no gap between frames


@pytest.mark.parametrize("depth", (0, 1, 3, 12))
def test_depth_must_be_a_power_of_two(depth):
    with pytest.raises(ValueError, match=f"depth is {depth}, must be a power of two"):
        EthFifo(64, depth)
