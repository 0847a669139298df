"""Keeps writes away from the words of ATOMICs under way."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from .records import Segment

__all__ = ["AtomicHold"]

_WORDS = 2  # held at once
_PAGE = 12
_WORD = 3


class AtomicHold(wiring.Component):
    """Passes segments on; keeps those of ATOMICs and shows their addresses on ``atomic``, oldest first, until taken there.

    While a word is held no segment behind it that touches the word passes, nor anything behind that (R-AT-4).

    Timing: combinational while nothing is held; else a segment waits one cycle, for the comparison in registers. Order is
    kept.

    Members: ``i``, ``o`` streams of Segment (which never crosses a 4 KiB page); ``atomic``, stream of addresses.
    """

    def __init__(self):
        super().__init__({
            "i": In(stream.Signature(Segment())),
            "o": Out(stream.Signature(Segment())),
            "atomic": Out(stream.Signature(64)),
        })

    def elaborate(self, platform):
        m = Module()
        segment = self.i.p
        held = Signal(_WORDS)
        words = Signal(data.ArrayLayout(64, _WORDS))
        oldest, free = Signal(range(_WORDS)), Signal(range(_WORDS))
        touches = Signal(_WORDS)  # of the segment at hand, as of the cycle before
        settled = Signal()  # `touches` is about this segment and these words
        passes = Signal()
        kept = Signal()
        released = Signal()
        first, last = Signal(_PAGE - _WORD), Signal(_PAGE - _WORD)
        end = Signal(_PAGE + 1)
        m.d.comb += [
            end.eq(segment.address[:_PAGE] + segment.length - 1),
            first.eq(segment.address[_WORD:_PAGE]),
            last.eq(end[_WORD:_PAGE]),
            passes.eq(~held.any() | (settled & ~(touches & held).any())),  # R-AT-4
            self.o.payload.eq(segment),
            self.o.valid.eq(self.i.valid & ~segment.atomic & passes),
            kept.eq(self.i.valid & segment.atomic & ~held.bit_select(free, 1)),
            self.i.ready.eq(Mux(segment.atomic, ~held.bit_select(free, 1), self.o.ready & passes)),
            self.atomic.valid.eq(held.bit_select(oldest, 1)),
            self.atomic.payload.eq(words[oldest]),
            released.eq(self.atomic.valid & self.atomic.ready),
        ]
        m.d.sync += settled.eq(self.i.valid & ~self.i.ready)
        for i in range(_WORDS):
            word = words[i]
            m.d.sync += touches[i].eq(
                (word[_PAGE:] == segment.address[_PAGE:]) & (first <= word[_WORD:_PAGE]) & (word[_WORD:_PAGE] <= last))  # R-AT-4
        with m.If(kept):
            m.d.sync += [
                words[free].eq(segment.address), held.bit_select(free, 1).eq(1), free.eq(free + 1),
                Assert(segment.address[:_WORD] == 0, Format("responder: ATOMIC at {:x}", segment.address)),
            ]  # fmt: skip
        with m.If(released):
            m.d.sync += [held.bit_select(oldest, 1).eq(0), oldest.eq(oldest + 1)]
        m.d.sync += Assert(~self.i.valid | ~end[_PAGE], "responder: segment crosses a page")
        return m
