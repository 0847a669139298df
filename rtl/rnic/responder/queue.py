"""A FIFO behind a register."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..stream.buffer import StreamRegister
from ..stream.fifo import StreamFifo

__all__ = ["Queue"]


class Queue(wiring.Component):
    """A `StreamFifo` of ``depth`` items behind a register, for items that come out of deep logic.

    Timing: latency 2 cycles when empty, one item per cycle; ``i.ready`` is one gate behind registers; holds up to ``depth`` + 1
    items; order is kept.

    Members: ``i``, ``o`` streams of ``shape``.
    """

    def __init__(self, shape, depth: int):
        self.shape, self.depth = shape, depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.entry = entry = StreamRegister(self.shape)
        m.submodules.fifo = fifo = StreamFifo(self.shape, self.depth)
        wiring.connect(m, wiring.flipped(self.i), entry.i)
        wiring.connect(m, entry.o, fifo.i)
        wiring.connect(m, fifo.o, wiring.flipped(self.o))
        return m
