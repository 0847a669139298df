"""Who has waited too long: the watchdog over streams and jobs."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

__all__ = ["OpenJobs", "Watchdog"]


class Watchdog(wiring.Component):
    """Names the first of several streams or jobs that has waited for ``limit`` cycles without a pause.

    Ports: ``waiting``, bit i is on in every cycle in which stream i has an item nobody takes, or job i does not go on;
    ``limit`` cycles, 0 turns it off; ``tripped`` and ``index`` of the first one found (lowest, of several), kept until
    ``clear``. In simulation a trip is a failing assertion that says the name.

    Timing: who waits is looked at once every ``limit`` cycles, so a trip comes after ``limit`` to 2 x ``limit`` cycles and as
    many as there are streams; three register bits a stream.

    Parameters: ``names`` of the streams, at least one, at most 256 (ValueError).
    """

    def __init__(self, names: list[str]):
        if not 1 <= len(names) <= 256:
            raise ValueError(f"number of watched streams is {len(names)}, must be 1 to 256")
        self.names = names
        super().__init__({
            "waiting": In(len(names)), "limit": In(32), "clear": In(1), "tripped": Out(1), "index": Out(8),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        n = len(self.names)
        elapsed = Signal(32)
        look, over = Signal(), Signal()
        now, held, found = Signal(n), Signal(n), Signal(n)  # waits; has waited since the last look; has waited all the time
        m.d.sync += [
            now.eq(self.waiting),
            elapsed.eq(elapsed + 1),
            over.eq((elapsed >= self.limit) & (self.limit != 0)),
            look.eq(0),
            held.eq(held & now),
            found.eq(0),
        ]
        with m.If(over & ~look):
            m.d.sync += [look.eq(1), elapsed.eq(0)]
        with m.If(look):
            m.d.sync += [held.eq(now), found.eq(held & now), over.eq(0)]
        with m.If(self.limit == 0):
            m.d.sync += held.eq(0)
        # The bits are looked through one by one; what is found meanwhile waits.
        stuck = Signal(n)
        at = Signal(range(n))
        m.d.sync += [stuck.eq(stuck | found), at.eq(Mux((at == n - 1) | found.any(), 0, at + 1))]
        with m.If(stuck.bit_select(at, 1) & ~self.tripped):
            m.d.sync += [self.tripped.eq(1), self.index.eq(at)]
        for i, name in enumerate(self.names):
            m.d.sync += Assert(~found[i], Format(f"watchdog: {name} has waited {{}} cycles", self.limit))
        with m.If(self.clear):
            m.d.sync += [self.tripped.eq(0), stuck.eq(0)]
        return m


class OpenJobs(wiring.Component):
    """Jobs that begin and end, several at once, as the watchdog sees them: ``waiting`` while one is open and none ends.

    Ports: ``begin``, ``end`` pulses; ``waiting``. Timing: the count follows a pulse by a cycle. An end without a begin is a
    failing assertion, as is an overflow of the 16-bit count.
    """

    def __init__(self, name: str):
        self.name = name
        super().__init__({"begin": In(1), "end": In(1), "waiting": Out(1)})

    def elaborate(self, platform):
        m = Module()
        count = Signal(16)
        m.d.comb += self.waiting.eq((count != 0) & ~self.end)
        m.d.sync += [
            count.eq(count + self.begin - self.end),
            Assert((count != 0) | ~self.end | self.begin, f"watchdog: {self.name} ends that never began"),
            Assert(~count.all() | ~self.begin | self.end, f"watchdog: too many of {self.name}"),
        ]
        return m
