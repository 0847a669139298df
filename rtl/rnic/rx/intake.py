"""What the receive street takes in: the wire, and frames that turned round."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..stream.beat import Beat

__all__ = ["Intake"]


class Intake(wiring.Component):
    """Whole frames of ``wire`` and ``loop`` in turn.

    Ports: ``wire``, ``loop``, ``o``: streams of Beat.

    Timing: combinational from either to ``o``; the turn is decided a cycle ahead. ``loop`` waits for at most one frame of the
    wire, and costs the wire an idle cycle a frame.
    """

    def __init__(self, width: int):
        beat = stream.Signature(Beat(width))
        super().__init__({"wire": In(beat), "loop": In(beat), "o": Out(beat)})

    def elaborate(self, platform):
        m = Module()
        loops = Signal()  # the turn is that of `loop`
        inside = Signal()  # a frame has begun and not ended
        chosen = Signal()
        ends = Signal()
        with m.If(loops):
            m.d.comb += [chosen.eq(self.loop.valid), self.o.payload.eq(self.loop.payload), self.loop.ready.eq(self.o.ready)]
        with m.Else():
            m.d.comb += [chosen.eq(self.wire.valid), self.o.payload.eq(self.wire.payload), self.wire.ready.eq(self.o.ready)]
        m.d.comb += [self.o.valid.eq(chosen), ends.eq(chosen & self.o.ready & self.o.payload.last)]
        with m.If(ends):
            m.d.sync += [inside.eq(0), loops.eq(self.loop.valid & ~loops)]
        with m.Elif(chosen):
            m.d.sync += inside.eq(1)
        with m.Elif(~inside):
            m.d.sync += loops.eq(self.loop.valid)
        return m
