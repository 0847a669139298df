"""WindowShare against a Python model: shares, slowness, wakes."""

from collections import deque

import pytest

from rnic.config import CONFIGS, Params
from rnic.tx.share import TICK_BITS, WindowShare
from tests.unit.streams import seeded, simulate


class Window:
    """Slots as `TranslateWindow` moves them: taken in, closed, translated, picked (oldest of its QP first), freed."""

    def __init__(self, dut, rng, qpns=3, cold=None):
        self.dut, self.rng, self.qpns, self.cold = dut, rng, qpns, cold
        self.slots = [None] * dut.slots  # (qpn, order, pending) of waiting packets, or "reading"
        self.order = 0
        self.intake = None  # (qpn, slot)
        self.closed = None

    def head(self, slot):
        qpn, order, _ = self.slots[slot]
        return not any(isinstance(s, tuple) and s[0] == qpn and s[1] < order for s in self.slots)

    def waiting(self):
        return [i for i, s in enumerate(self.slots) if isinstance(s, tuple)]

    def drive(self, ctx):
        """One cycle; returns (waiting packets by QP with the one coming in, free places) as the block should see them."""
        dut, rng = self.dut, self.rng
        picked = getattr(self, "picked", None)
        if self.closed is not None:
            qpn, slot = self.closed
            self.slots[slot] = (qpn, self.order, True)
            self.order += 1
            self.closed = None
        if picked is not None:
            self.slots[picked] = "reading"
        self.picked = None
        reading = [i for i, s in enumerate(self.slots) if s == "reading"]
        free = [i for i, s in enumerate(self.slots) if s is None]
        for i in self.waiting():
            qpn, order, pending = self.slots[i]
            if pending and qpn != self.cold and rng.random() < 0.1:
                self.slots[i] = (qpn, order, False)
        close = False
        if self.intake is None and rng.random() < 0.5:
            self.intake = rng.randrange(self.qpns)
        elif self.intake is not None and free and rng.random() < 0.5:
            close = True
        freed = rng.choice(reading) if reading and rng.random() < 0.5 else None
        waiting = self.waiting()
        ready = [i for i in waiting if self.head(i) and not self.slots[i][2]]
        if ready and rng.random() < 0.3:
            self.picked = rng.choice(ready)
        closing = getattr(self, "closing", None)  # closed in the cycle before
        ctx.set(dut.waiting, sum(1 << i for i in waiting))
        ctx.set(dut.heads, sum(1 << i for i in waiting if self.head(i)))
        ctx.set(dut.pending, sum(1 << i for i in waiting if self.slots[i][2]))
        for i in waiting:
            ctx.set(dut.qpns[i], self.slots[i][0])
        ctx.set(dut.intake, self.intake is not None)
        ctx.set(dut.intake_qpn, self.intake or 0)
        ctx.set(dut.close, close)
        ctx.set(dut.freed, freed is not None)
        ctx.set(dut.closed, 0 if closing is None else 1 << closing[1])
        ctx.set(dut.closed_qpn, 0 if closing is None else closing[0])
        ctx.set(dut.picked, 0 if self.picked is None else 1 << self.picked)
        ctx.set(dut.picked_slot, self.picked or 0)
        counts = [sum(self.slots[i][0] == n for i in waiting)
                  + ((self.intake == n) or (closing is not None and closing[0] == n)) for n in range(self.qpns)]  # fmt: skip
        left = len(free) - (closing is not None) - (self.intake is not None)
        if closing is not None:
            self.closed, self.closing = closing, None
        if close:
            self.closing = (self.intake, next(i for i in free if closing is None or i != closing[1]))
            self.intake = None
        if freed is not None:
            self.slots[freed] = None
        return counts, max(0, left)


@pytest.mark.parametrize("slots", [2, 8, 16])
def test_share(slots):
    """As many places as are free besides, counted three cycles ago, halved: each packet is one more and leaves one less."""
    rng = seeded(slots)
    dut = WindowShare(Params(CONFIGS["tiny"]), slots)
    window = Window(dut, rng)
    history = deque(maxlen=3)
    seen = set()

    async def bench(ctx):
        ctx.set(dut.wake.ready, 1)
        for cycle in range(600):
            qpn = rng.randrange(3)
            ctx.set(dut.qpn, qpn)
            counts, free = window.drive(ctx)
            if len(history) == 3:
                expected = (max(0, history[0][1] - history[0][0]) + 1) // 2
                assert ctx.get(dut.share) == expected, f"cycle {cycle}"
                assert (ctx.get(dut.none), ctx.get(dut.one)) == (expected == 0, expected == 1)
                seen.add(expected)
            history.append((counts[qpn], free))
            await ctx.tick()

    simulate(dut, bench)
    assert {0, 1} <= seen


def test_slow_and_wake():
    """A QP whose oldest packet is never translated becomes slow, the others do not; a noted QP is woken when it leaves."""
    rng = seeded(1)
    dut = WindowShare(Params(CONFIGS["tiny"]), 8)

    async def bench(ctx):
        ctx.set(dut.wake.ready, 1)
        ctx.set(dut.waiting, 0b11)  # slot 0: QP 1, slot 1: QP 2
        ctx.set(dut.heads, 0b11)
        ctx.set(dut.pending, 0b01)
        ctx.set(dut.qpns[0], 1)
        ctx.set(dut.qpns[1], 2)
        for qpn, slow in ((2, 0), (1, 1)):
            ctx.set(dut.qpn, qpn)
            await ctx.tick().repeat(2 * (1 << TICK_BITS) + 6)
            assert ctx.get(dut.slow) == slow
        ctx.set(dut.note, 1)
        await ctx.tick()
        ctx.set(dut.note, 0)
        assert ctx.get(dut.noted) and not ctx.get(dut.wake.valid)
        await ctx.tick().repeat(rng.randrange(3, 9))
        ctx.set(dut.picked, 1)
        await ctx.tick()
        ctx.set(dut.picked, 0)
        ctx.set(dut.waiting, 0b10)
        assert ctx.get(dut.wake.valid) and ctx.get(dut.wake.payload.qpn) == 1
        await ctx.tick()
        assert not ctx.get(dut.wake.valid)
        await ctx.tick().repeat(3)
        ctx.set(dut.note, 1)
        await ctx.tick()
        ctx.set(dut.note, 0)
        assert not ctx.get(dut.noted)  # it has left: nobody will wake

    simulate(dut, bench)
