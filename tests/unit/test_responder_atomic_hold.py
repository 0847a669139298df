"""AtomicHold: words of ATOMICs under way are not touched by what comes behind; order is kept, all goes through."""

import pytest

from rnic.responder.atomic_hold import AtomicHold
from tests.rules import rule
from tests.unit.streams import collect, seeded, simulate

PAGE = 4096


def touches(segment: dict, word: int) -> bool:
    return segment["address"] < word + 8 and word < segment["address"] + segment["length"]


def random_segments(rng, count: int) -> list[dict]:
    """Segments around a few words in two pages far apart and next to each other."""
    words = [0x7_0000_0FF8, 0x7_0000_0000, 0x7_0000_0100, 0x7_0000_1000, 0x9_0000_0100]
    segments = []
    for number in range(count):
        word = rng.choice(words)
        if rng.random() < 0.3:
            segments.append({"address": word, "length": 8, "last": 1, "atomic": 1})
            continue
        first = word + rng.choice([-8, -1, 0, 1, 7, 8]) if word % PAGE else word + rng.choice([0, 1, 7, 8])
        room = PAGE - first % PAGE
        segments.append({"address": first, "length": min(room, rng.choice([1, 1, 7, 8, 9, 300, PAGE])), "last": number & 1,
                         "atomic": 0})  # fmt: skip
    return segments


@rule("R-AT-4")
@pytest.mark.parametrize("seed", range(3))
def test_nothing_touches_a_word_that_is_held(seed):
    rng = seeded(seed)
    segments = random_segments(rng, 120)
    dut = AtomicHold()
    held: list[int] = []  # words taken in, not yet given away
    most, passed, given, waited = 0, [], [], 0

    async def run(ctx):
        nonlocal most, waited
        at = idle = 0
        ports = (dut.i.valid, dut.i.ready, dut.o.valid, dut.o.ready, dut.o.payload, dut.atomic.valid, dut.atomic.ready,
                 dut.atomic.payload)  # fmt: skip
        while at < len(segments) or held:
            offers = at < len(segments) and rng.random() < 0.8
            if offers:
                ctx.set(dut.i.payload, segments[at])
            ctx.set(dut.i.valid, offers)
            moved = False
            while not moved:
                ctx.set(dut.o.ready, rng.random() < 0.8)
                ctx.set(dut.atomic.ready, rng.random() < 0.1)
                _, _, valid, ready, o_valid, o_ready, segment, a_valid, a_ready, word = await ctx.tick().sample(*ports)
                assert o_valid == 0 or not any(touches(segments[at], other) for other in held), f"segment {at}"
                assert a_valid == bool(held) and (not held or word == held[0])
                if o_valid and o_ready:
                    passed.append({name: int(segment[name]) for name in ("address", "length", "last", "atomic")})
                if a_valid and a_ready:
                    given.append(held.pop(0))
                moved = not offers or bool(valid and ready)
                idle = idle + 1 if offers and not moved else 0
                assert idle < 200, f"segment {at} is stuck"
                waited += not moved
            if offers:
                if segments[at]["atomic"]:
                    held.append(segments[at]["address"])
                    most = max(most, len(held))
                at += 1

    simulate(dut, run, limit=6000)
    assert passed == [segment for segment in segments if not segment["atomic"]]
    assert given == [segment["address"] for segment in segments if segment["atomic"]]
    assert most == 2 and waited


@rule("R-AT-4")
def test_rate():
    """Nothing held: a segment a cycle, in the same cycle. A word held: others pass every second cycle, those of a word that is
    not held any more too, and an ATOMIC, that is put away, as soon as there is room."""
    dut = AtomicHold()
    got = []

    async def run(ctx):
        ctx.set(dut.i.payload, {"address": 0x40, "length": 8})
        ctx.set(dut.i.valid, 1)
        got.append(len(await collect(ctx, dut.o, 8)))
        ctx.set(dut.i.payload, {"address": 0x80, "length": 8, "atomic": 1})
        await ctx.tick()
        ctx.set(dut.i.payload, {"address": 0x88, "length": 8})
        got.append(len(await collect(ctx, dut.o, 8)))
        ctx.set(dut.i.payload, {"address": 0x80, "length": 8, "atomic": 1})
        assert ctx.get(dut.i.ready)
        await ctx.tick()
        assert not ctx.get(dut.i.ready)
        ctx.set(dut.atomic.ready, 1)
        await ctx.tick()
        ctx.set(dut.atomic.ready, 0)
        assert ctx.get(dut.i.ready)
        ctx.set(dut.i.payload, {"address": 0x100, "length": 8, "atomic": 1})
        await ctx.tick()
        ctx.set(dut.atomic.ready, 1)
        await ctx.tick()
        ctx.set(dut.atomic.ready, 0)
        ctx.set(dut.i.payload, {"address": 0x80, "length": 8})
        got.append(len(await collect(ctx, dut.o, 8)))

    simulate(dut, run)
    assert got == [8, 4, 4]
