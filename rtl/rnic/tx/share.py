"""How much of a translation window one QP may fill: no more than it leaves free."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import QpEvent

__all__ = ["WindowShare"]

TICK_BITS = 4  # a packet is slow after one to two times 2**TICK_BITS cycles


class WindowShare(wiring.Component):
    """Counts the packets of one QP in the window against the free places.

    A QP may fill as many places as are free besides, so one that waits for page tables holds half the window, two hold two
    thirds, and there is always a place for the next QP. ``share``: packets QP ``qpn`` may add now, 0 when it has its share.
    ``none`` and ``one``: ``share`` is 0, or 1. ``slow``: its oldest packet has waited for its translation for more than
    ``2**TICK_BITS`` cycles. ``ahead``: packets that wait in front of the window and will take places.

    ``note`` asks for a wake of QP ``qpn``, which must have stayed for 2 cycles: ``noted`` in the cycle after is 1 when the
    oldest packet of the QP is still in the window; ``wake`` then follows when that packet leaves. Else there is none.

    Members: ``waiting``, ``heads`` (oldest of their QPs), ``pending`` (not translated), ``qpns`` of the slots; ``closed``
    slots that join ``waiting`` in the next cycle, ``closed_qpn``; ``intake``, ``intake_qpn`` the packet being taken in;
    ``close``: it gets a place; ``freed``: one gives its place back; ``picked`` slot that left ``waiting``, ``picked_slot``.

    Timing: ``share`` and ``slow`` belong to ``qpn`` of 3 cycles ago.
    """

    def __init__(self, p: Params, slots: int):
        self.p, self.slots = p, slots
        super().__init__({
            "qpn": In(p.qpn_bits),
            "ahead": In(range(slots + 1)),
            "share": Out(range(slots // 2 + 1)),
            "none": Out(1),
            "one": Out(1),
            "slow": Out(1),
            "note": In(1),
            "noted": Out(1),
            "wake": Out(stream.Signature(QpEvent(p))),
            "waiting": In(slots),
            "heads": In(slots),
            "pending": In(slots),
            "qpns": In(data.ArrayLayout(p.qpn_bits, slots)),
            "closed": In(slots),
            "closed_qpn": In(p.qpn_bits),
            "intake": In(1),
            "intake_qpn": In(p.qpn_bits),
            "close": In(1),
            "freed": In(1),
            "picked": In(slots),
            "picked_slot": In(range(slots)),
        })

    def elaborate(self, platform):
        m = Module()
        slots = self.slots

        # Places: those of closed packets are taken, that of the packet being taken in as good as.
        free = Signal(range(slots + 1), init=slots)
        with m.If(self.close != self.freed):
            m.d.sync += free.eq(free + Mux(self.close, -1, 1))
        m.d.sync += Assert(~self.close | self.freed | (free != 0), "WindowShare: more packets than places")

        # Age: two ticks.
        tick = Signal(TICK_BITS)
        middle, old, slow = Signal(slots), Signal(slots), Signal(slots)
        m.d.sync += [tick.eq(tick + 1), slow.eq(old & self.waiting & self.heads & self.pending)]
        for slot in range(slots):
            with m.If(self.closed[slot]):
                m.d.sync += [middle[slot].eq(0), old[slot].eq(0)]
            with m.Elif(tick.all()):
                m.d.sync += [middle[slot].eq(1), old[slot].eq(middle[slot])]

        # First: whose are they.
        match = Signal(slots)
        coming = Signal()
        free_1 = Signal(range(slots + 1))
        left = Signal(range(-slots - 1, slots + 1))
        m.d.comb += left.eq(free - self.ahead - self.intake)
        for slot in range(slots):
            m.d.sync += match[slot].eq(self.waiting[slot] & (self.qpns[slot] == self.qpn))
        m.d.sync += [
            coming.eq((self.intake & (self.intake_qpn == self.qpn)) | (self.closed.any() & (self.closed_qpn == self.qpn))),
            free_1.eq(Mux(left < 0, 0, left)),
        ]
        # Second: how many.
        count = Signal(range(slots + 2))
        free_2 = Signal(range(slots + 1))
        slow_2 = Signal()
        m.d.sync += [
            count.eq(sum(match[1:], coming + match[0])),
            free_2.eq(free_1),
            slow_2.eq((match & slow).any()),
        ]
        # Third: each packet more is one more here and one less there.
        spare = Signal(range(-slots - 1, slots + 1))
        m.d.comb += spare.eq(free_2 - count)
        m.d.sync += [
            self.share.eq(Mux(spare <= 0, 0, (spare + 1) >> 1)),
            self.none.eq(spare <= 0),
            self.one.eq((spare == 1) | (spare == 2)),
            self.slow.eq(slow_2),
        ]

        marks = Signal(slots)  # QPs to wake when this slot leaves
        found = Signal(slots)
        m.d.comb += found.eq(match & self.waiting & self.heads & ~self.picked)
        m.d.sync += [
            marks.eq((marks | (found & self.note.replicate(slots))) & ~self.picked),
            self.noted.eq(found.any()),
        ]
        with m.If(self.wake.ready):
            m.d.sync += self.wake.valid.eq(0)
        with m.If((marks & self.picked).any()):
            m.d.sync += [
                self.wake.valid.eq(1),
                self.wake.payload.qpn.eq(self.qpns[self.picked_slot]),
                Assert(~self.wake.valid | self.wake.ready, "WindowShare: a wake is lost"),
            ]
        return m
