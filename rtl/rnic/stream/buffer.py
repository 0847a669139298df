"""Registers between two streams."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["HalfRegister", "SkidBuffer", "StreamRegister"]


class StreamRegister(wiring.Component):
    """One register stage: cuts the payload and ``valid`` paths, not the ``ready`` path.

    Timing: latency 1 cycle, one item per cycle; ``i.ready`` follows ``o.ready`` combinationally. Order is kept.

    Parameters: ``shape``, the payload. Members: ``i``, ``o`` streams of ``shape``.
    """

    def __init__(self, shape):
        self.shape = shape
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.i.ready.eq(~self.o.valid | self.o.ready)
        with m.If(self.i.ready):
            m.d.sync += self.o.valid.eq(self.i.valid)
            with m.If(self.i.valid):
                m.d.sync += self.o.payload.eq(self.i.payload)
        return m


class SkidBuffer(wiring.Component):
    """Two registers: cuts payload, ``valid`` and ``ready`` paths.

    Timing: latency 1 cycle, one item per cycle with no bubble after back-pressure; all outputs come from registers.
    Holds up to two items; order is kept.

    Parameters: ``shape``, the payload. Members: ``i``, ``o`` streams of ``shape``; ``level``, items held (0..2).
    """

    def __init__(self, shape):
        self.shape = shape
        super().__init__({
            "i": In(stream.Signature(shape)),
            "o": Out(stream.Signature(shape)),
            "level": Out(2),
        })

    def elaborate(self, platform):
        m = Module()
        skid = Signal(self.shape)
        skid_full = Signal()
        m.d.comb += [
            self.i.ready.eq(~skid_full),
            self.level.eq(self.o.valid + skid_full),
        ]
        with m.If(~self.o.valid | self.o.ready):
            m.d.sync += [
                self.o.valid.eq(self.i.valid | skid_full),
                self.o.payload.eq(Mux(skid_full, Value.cast(skid), Value.cast(self.i.payload))),
                skid_full.eq(0),
            ]
        with m.Elif(self.i.valid & self.i.ready):
            m.d.sync += skid_full.eq(1)
        with m.If(~skid_full):
            m.d.sync += skid.eq(self.i.payload)
        return m


class HalfRegister(wiring.Component):
    """One register that is filled or emptied: cuts payload, ``valid`` and ``ready`` paths for half of what a `SkidBuffer` costs,
    where an item comes every other cycle at most.

    Timing: latency 1 cycle, one item every 2 cycles; all outputs come from registers. Order is kept.

    Parameters: ``shape``, the payload. Members: ``i``, ``o`` streams of ``shape``.
    """

    def __init__(self, shape):
        self.shape = shape
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.i.ready.eq(~self.o.valid)
        m.d.sync += self.o.valid.eq(Mux(self.o.valid, ~self.o.ready, self.i.valid))
        with m.If(~self.o.valid):
            m.d.sync += self.o.payload.eq(self.i.payload)
        return m
