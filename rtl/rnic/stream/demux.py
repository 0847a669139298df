"""One stream to one of several, chosen item by item."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Demux"]


class Demux(wiring.Component):
    """Hands every item to output ``select``. A selector out of range drops the item (and is an Assert failure).

    Timing: combinational; one item per cycle. Order is kept within an output; an output that is not ready holds the
    input.

    Parameters: ``shape``, the payload; ``n`` >= 1 outputs; ``field``, name of the payload field that selects, or None
    for a port ``select``, which must be as stable as the payload. Raises ValueError.
    Members: ``i``, stream; ``o``, array of ``n`` streams; ``select`` (only without ``field``).
    """

    def __init__(self, shape, n: int, *, field: str | None = None):
        if n < 1:
            raise ValueError(f"number of outputs is {n}, must be at least 1")
        self.shape = shape
        self.n = n
        self.field = field
        members = {"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)).array(n)}
        if field is None:
            members["select"] = In(range(n))
        super().__init__(members)

    def elaborate(self, platform):
        m = Module()
        select = self.select if self.field is None else Value.cast(self.i.payload[self.field])
        with m.Switch(select):
            for index, port in enumerate(self.o):
                with m.Case(index):
                    m.d.comb += [port.valid.eq(self.i.valid), self.i.ready.eq(port.ready)]
            with m.Default():
                m.d.comb += self.i.ready.eq(1)
                m.d.sync += Assert(~self.i.valid, Format("Demux: selector {} out of range", select))
        for port in self.o:
            m.d.comb += port.payload.eq(self.i.payload)
        return m
