"""RoCE frames and frames of the host side toward the wire."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..stream.beat import Beat
from ..stream.buffer import SkidBuffer
from ..stream.check import watch

__all__ = ["ROCE_FRAMES_IN_A_ROW", "EthMerge"]

ROCE_FRAMES_IN_A_ROW = 16
"""RoCE frames that may pass while a host-side frame waits."""


class EthMerge(wiring.Component):
    """Frame by frame: RoCE first, but a waiting host-side frame goes after `ROCE_FRAMES_IN_A_ROW` RoCE frames.

    Never switches inside a frame; while the chosen frame pauses, so does the output. A host-side frame is chosen a cycle ahead,
    so it passes a RoCE frame that comes in that cycle.

    Timing: latency 1 cycle (``eth`` 3), one beat per cycle, no idle cycle between RoCE frames, one between host-side frames; all
    outputs come from registers, ``roce.ready`` and ``eth.ready`` depend on registers only.

    Members: ``roce``, ``eth`` Beat; ``o`` Beat.
    """

    def __init__(self, p: Params):
        self.p = p
        beats = stream.Signature(Beat(p.data_width))
        super().__init__({"roce": In(beats), "eth": In(beats), "o": Out(beats)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.out = out = SkidBuffer(Beat(self.p.data_width))
        wiring.connect(m, out.o, wiring.flipped(self.o))
        m.submodules.host_side = host_side = SkidBuffer(Beat(self.p.data_width))  # its valid and ready reach the ports
        wiring.connect(m, wiring.flipped(self.eth), host_side.i)
        eth = host_side.o

        inside = Signal()  # a frame has begun and not ended
        owner = Signal()  # of that frame: 1 the host side
        waited = Signal(range(ROCE_FRAMES_IN_A_ROW + 1))  # RoCE frames since a host-side frame began to wait
        overdue = Signal()
        choice = Signal()
        begins = Signal()
        eth_next = Signal()  # a register: no path from a frame's valid to its own ready
        m.d.sync += eth_next.eq(eth.valid & (overdue | ~self.roce.valid) & ~(eth.ready & eth.payload.last))
        m.d.comb += [
            choice.eq(Mux(inside, owner, eth_next)),
            out.i.valid.eq(Mux(choice, eth.valid, self.roce.valid)),
            out.i.payload.eq(Mux(choice, eth.payload.as_value(), self.roce.payload.as_value())),
            eth.ready.eq(out.i.ready & choice),
            self.roce.ready.eq(out.i.ready & ~choice),
            begins.eq(out.i.valid & out.i.ready & ~inside),
        ]
        with m.If(out.i.valid & out.i.ready):
            m.d.sync += [inside.eq(~out.i.payload.last), owner.eq(choice)]
        with m.If(begins):
            with m.If(choice | ~eth.valid):
                m.d.sync += [waited.eq(0), overdue.eq(0)]
            with m.Elif(~overdue):
                m.d.sync += [waited.eq(waited + 1), overdue.eq(waited == ROCE_FRAMES_IN_A_ROW - 1)]
        for name in ("roce", "eth", "o"):
            watch(m, name, getattr(self, name))
        return m
