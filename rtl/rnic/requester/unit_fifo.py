"""Bus words in, whole units out."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["UnitFifo"]


class UnitFifo(wiring.Component):
    """A FIFO of units of several bus words. Each word goes to its place in the memory at once, where it counts with the last
    one of its unit.

    Timing: a unit shows one cycle after its last word, straight from memories without a clock: for a reader that takes it to a
    register. One word per cycle in, one unit per cycle out; ``i.ready`` is a register. Order is kept.

    Parameters: ``width`` of a word and ``unit`` in bits, a multiple of it; ``depth`` in units (both ValueError).
    Members: ``i``, stream of words, the first one lowest in its unit; ``ends``, the word on ``i`` is the last of its unit, a
    register; ``o``, stream of units.
    """

    def __init__(self, width: int, unit: int, depth: int):
        if unit % width:
            raise ValueError(f"unit is {unit}, must be a multiple of {width}")
        if depth < 2:
            raise ValueError(f"depth is {depth}, must be at least 2")
        self.width, self.words, self.depth = width, unit // width, depth
        super().__init__({
            "i": In(stream.Signature(width)),
            "ends": Out(1),
            "o": Out(stream.Signature(unit)),
        })

    def elaborate(self, platform):
        m = Module()
        bits = (self.depth - 1).bit_length()
        write_at, read_at = Signal(bits), Signal(bits)
        place = Signal(self.words, init=1)  # one bit per word of the unit: the next one
        level = Signal(range(self.depth + 1))  # whole units
        has_room = Signal(init=1)  # level != depth
        take, push, pop = Signal(), Signal(), Signal()
        words = []
        for i in range(self.words):
            m.submodules[f"word_{i}"] = store = memory.Memory(shape=self.width, depth=self.depth, init=[])
            write, read = store.write_port(), store.read_port(domain="comb")
            m.d.comb += [
                write.addr.eq(write_at),
                write.data.eq(self.i.payload),
                write.en.eq(has_room & place[i]),  # until the word comes, what is there does not count
                read.addr.eq(read_at),
            ]
            words.append(read.data)
        m.d.comb += [
            self.i.ready.eq(has_room),
            self.ends.eq(place[-1]),
            self.o.payload.eq(Cat(words)),
            take.eq(self.i.valid & has_room),
            push.eq(take & self.ends),
            pop.eq(self.o.valid & self.o.ready),
        ]
        with m.If(take):
            m.d.sync += place.eq(place.rotate_left(1))
        for at, step in ((write_at, push), (read_at, pop)):
            with m.If(step):
                m.d.sync += at.eq(Mux(at == self.depth - 1, 0, at + 1))
        with m.If(push != pop):
            m.d.sync += level.eq(level + Mux(pop, -1, 1))
        m.d.sync += [
            self.o.valid.eq(push | (self.o.valid & ~(pop & (level == 1)))),
            has_room.eq(pop | (has_room & ~(push & (level == self.depth - 1)))),
            Assert((self.o.valid == (level != 0)) & (has_room == (level != self.depth)),
                   Format("UnitFifo: flags and level {} differ", level)),
        ]
        return m
