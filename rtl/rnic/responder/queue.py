"""A FIFO behind a register."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..stream.buffer import StreamRegister
from ..stream.fifo import StreamFifo

__all__ = ["Queue"]


class Queue(wiring.Component):
    """A `StreamFifo` of ``depth`` items and a register, for items that come out of deep logic: nothing but a register, or a
    memory read without a clock, takes them in.

    With ``direct``, for a reader that takes items to a register, the register is left out where the memory does without (4 to 32
    items): latency 1 cycle.

    Timing: latency 2 cycles when empty, one item per cycle; ``i.ready`` is one gate behind registers at most; holds up to
    ``depth`` + 1 items; order is kept.

    Members: ``i``, ``o`` streams of ``shape``.
    """

    def __init__(self, shape, depth: int, *, direct: bool = False):
        self.shape, self.depth, self.direct = shape, depth, direct
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.fifo = fifo = StreamFifo(self.shape, self.depth, direct=True)
        if self.direct and fifo.direct:
            wiring.connect(m, wiring.flipped(self.i), fifo.i)
            wiring.connect(m, fifo.o, wiring.flipped(self.o))
            return m
        m.submodules.register = register = StreamRegister(self.shape)
        first, second = (fifo, register) if fifo.direct else (register, fifo)
        wiring.connect(m, wiring.flipped(self.i), first.i)
        wiring.connect(m, first.o, second.i)
        wiring.connect(m, second.o, wiring.flipped(self.o))
        return m
