"""One stream to all of several."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Fork"]


class Fork(wiring.Component):
    """Hands every item to each of ``n`` outputs; each takes it when it can, the input moves on when all have it.

    Timing: combinational; one item per cycle when all outputs are ready; ``i.ready`` follows the outputs' ``ready``.

    Parameters: ``shape``, the payload; ``n`` >= 1 outputs. Raises ValueError.
    Members: ``i``, stream; ``o``, array of ``n`` streams.
    """

    def __init__(self, shape, n: int):
        if n < 1:
            raise ValueError(f"number of outputs is {n}, must be at least 1")
        self.shape = shape
        self.n = n
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)).array(n)})

    def elaborate(self, platform):
        m = Module()
        served = Signal(self.n)  # outputs that already have the present item
        satisfied = Signal(self.n)
        for index, port in enumerate(self.o):
            m.d.comb += [
                port.valid.eq(self.i.valid & ~served[index]),
                port.payload.eq(self.i.payload),
                satisfied[index].eq(served[index] | port.ready),
            ]
        m.d.comb += self.i.ready.eq(satisfied.all())
        with m.If(self.i.valid):
            m.d.sync += served.eq(Mux(self.i.ready, 0, satisfied))
        return m
