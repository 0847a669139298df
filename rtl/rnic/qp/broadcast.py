"""The context bus to all its tables."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import CtxBus

__all__ = ["CtxBroadcast"]


class CtxBroadcast(wiring.Component):
    """One writer, ``n`` readers: each write reaches every reader once, each in its own time.

    Ports: ``i`` the command engine's `CtxBus`; ``o`` array of ``n`` of them.

    Timing: a write is registered, offered to all readers in the next cycle, and taken from ``i`` when the last reader has
    taken it, at the earliest 2 cycles after it came. So ``i.ready`` still means: it is in every table. No path leads from
    a reader's ``ready`` to another port.
    """

    def __init__(self, p: Params, n: int):
        if n < 1:
            raise ValueError(f"number of readers is {n}, must be at least 1")
        self.n = n
        super().__init__({"i": In(CtxBus(p)), "o": Out(CtxBus(p)).array(n)})

    def elaborate(self, platform):
        m = Module()
        payload = Signal.like(self.i.payload)
        waiting = Signal(self.n)  # readers that have not taken the write
        offered = Signal()
        m.d.comb += self.i.ready.eq(offered & ~waiting.any())
        for index, port in enumerate(self.o):
            m.d.comb += [port.valid.eq(waiting[index]), port.payload.eq(payload)]
            with m.If(port.ready):
                m.d.sync += waiting[index].eq(0)
        with m.If(self.i.ready):
            m.d.sync += offered.eq(0)
        with m.Elif(self.i.valid & ~offered):
            m.d.sync += [offered.eq(1), waiting.eq(~0), payload.eq(self.i.payload)]
        return m
