"""Event counters in memory."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Counters"]

COUNTER_BITS = 32
STEPS = 4  # cycles of one read-modify-write


class Counters(wiring.Component):
    """``n`` counters of 32 bits, wrapping, zero after power-up; every input may pulse in every cycle, none is ever lost.

    The pulses of an input collect in a few bits until its turn comes, once every ``n`` cycles (at least 4); then they are added
    to its counter in the memory. So a reading lags up to ``n`` + 4 cycles behind.

    Ports: ``pulses``, bit i counts into counter i; ``index``, ``value``: read port, ``value`` is that of the ``index`` of two
    cycles before.

    Parameters: ``n`` >= 1, number of counters (ValueError).
    """

    def __init__(self, n: int):
        if n < 1:
            raise ValueError(f"number of counters is {n}, must be at least 1")
        self.n = n
        super().__init__({"pulses": In(n), "index": In(range(n)), "value": Out(COUNTER_BITS)})

    def elaborate(self, platform):
        m = Module()
        turns = max(self.n, STEPS)  # a counter is written before it is read again
        m.submodules.values = values = memory.Memory(shape=COUNTER_BITS, depth=turns, init=[])
        write, read, look = values.write_port(), values.read_port(), values.read_port()

        turn = Signal(range(turns))
        m.d.sync += turn.eq(Mux(turn == turns - 1, 0, turn + 1))

        amount = Signal(range(turns + 1))  # collected by the input whose turn it is
        for i in range(self.n):
            pending = Signal(range(turns + 1), name=f"pending_{i}")
            with m.If(turn == i):
                m.d.comb += amount.eq(pending)
                m.d.sync += pending.eq(self.pulses[i])
            with m.Else():
                m.d.sync += [
                    pending.eq(pending + self.pulses[i]),
                    Assert(pending < turns, Format("counter {} was not served for {} pulses", i, pending)),
                ]

        # Read, register, add, write.
        amounts = [amount] + [Signal.like(amount, name=f"amount_{i}") for i in (1, 2)]
        places = [turn] + [Signal.like(turn, name=f"turn_{i}") for i in (1, 2, 3)]
        for later, earlier in [*zip(amounts[1:], amounts, strict=False), *zip(places[1:], places, strict=False)]:
            m.d.sync += later.eq(earlier)
        old = Signal(COUNTER_BITS)
        started = Signal(3)  # nothing to write before the first turn has passed the pipe
        m.d.sync += started.eq(Cat(1, started[:-1]))
        m.d.comb += [read.addr.eq(turn), write.addr.eq(places[3]), write.en.eq(started[2]), look.addr.eq(self.index)]
        m.d.sync += [old.eq(read.data), write.data.eq(old + amounts[2]), self.value.eq(look.data)]
        return m
