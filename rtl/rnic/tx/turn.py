"""Loopback: frames to the RNIC's own address turn round before the wire."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..rx.eth_fifo import EthFifo
from ..stream.beat import Beat
from ..stream.check import watch

__all__ = ["PATIENCE", "FrameTurn"]

PATIENCE = 4096
"""Cycles a frame waits for room before it is dropped."""


class FrameTurn(wiring.Component):
    """Sends each frame to the wire, or back to the receive street.

    A frame with ``own`` goes through a FIFO of whole frames to ``loop``; a frame that ends with ``err`` vanishes. While the
    FIFO is full the transmit street waits; the receive street may at that moment wait for the transmit street (its ACKs), so
    a frame that has waited for ``PATIENCE`` cycles is dropped: loss is repaired (R-RTY), a standstill is not.

    Ports: ``frame`` Beat and ``own``, stable while a frame passes; ``wire`` and ``loop`` Beat; ``overflow`` pulses for a frame
    dropped.

    Timing: to ``wire`` combinational; to ``loop`` 3 cycles after the frame's last beat; one beat per cycle.

    Parameters: ``width`` of the bus in bits, ``depth`` of the FIFO in beats, a power of two, more than a largest frame.
    """

    def __init__(self, width: int, depth: int):
        self.width, self.depth = width, depth
        super().__init__({
            "frame": In(stream.Signature(Beat(width))),
            "own": In(1),
            "wire": Out(stream.Signature(Beat(width))),
            "loop": Out(stream.Signature(Beat(width))),
            "overflow": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.fifo = fifo = EthFifo(self.width, self.depth)
        wiring.connect(m, fifo.o, wiring.flipped(self.loop))
        beat = self.frame.payload
        waited = Signal(range(PATIENCE + 1))
        lost_patience = Signal()
        take = Signal()
        m.d.comb += [
            lost_patience.eq(waited == PATIENCE),
            take.eq(self.own & (~fifo.overflow | lost_patience)),
            self.wire.payload.eq(beat),
            self.wire.valid.eq(self.frame.valid & ~self.own),
            self.frame.ready.eq(Mux(self.own, take, self.wire.ready)),
            fifo.valid.eq(self.frame.valid & take),
            fifo.beat.eq(beat),
            fifo.commit.eq(~beat.err),
        ]
        m.d.sync += self.overflow.eq(fifo.valid & beat.last & ~beat.err & fifo.overflow)
        with m.If(self.frame.valid & self.own & ~take):
            m.d.sync += waited.eq(waited + 1)
        with m.Elif(self.frame.valid & (~lost_patience | beat.last)):
            m.d.sync += waited.eq(0)
        watch(m, "frame", self.frame)
        return m
