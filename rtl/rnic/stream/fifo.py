"""A FIFO between two streams of the same clock."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.clash import NO_CLASH
from rnic.stream.buffer import HalfRegister, SkidBuffer, StreamRegister

__all__ = ["StreamFifo"]


_SHALLOW = 32  # a memory of logic cells is cheaper than a register behind a block memory
_MIDDLE = 64  # up to here no block memory is worth its while; the promise of NO_CLASH would make synthesis take one


class StreamFifo(wiring.Component):
    """Holds up to ``depth`` items in a memory behind an output register.

    Up to 32 items the memory is one of logic cells, read without a clock, else its output is registered twice (memory latch,
    output register). An item that finds nothing in front of it goes around the memory. With ``direct`` 4 to 32 items are
    read straight from the memory, without output register or way around: for a reader that takes them to a register.

    Timing: latency 1 cycle when empty (2 for ``depth`` 3), at most 3 (shallow: 2, ``direct``: 1) behind other items; one item per
    cycle in and out for ``depth`` >= 2, one item every two cycles for ``depth`` 1; ``i.ready`` depends on registers only and is
    1 while ``level < depth``. Order is kept.

    Parameters: ``shape``, the payload; ``depth`` >= 1, items. Raises ValueError for a depth below 1.
    Members: ``i``, ``o`` streams of ``shape``; ``level``, items held (0..depth), from a register.
    """

    def __init__(self, shape, depth: int, *, direct: bool = False):
        if depth < 1:
            raise ValueError(f"FIFO depth is {depth}, must be at least 1")
        self.shape = shape
        self.depth = depth
        self.direct = direct and 3 < depth <= _SHALLOW
        super().__init__({
            "i": In(stream.Signature(shape)),
            "o": Out(stream.Signature(shape)),
            "level": Out(range(depth + 1)),
        })

    def elaborate(self, platform):
        m = Module()
        if self.depth == 1:
            self._elaborate_register(m)
        elif self.depth <= 3:
            self._elaborate_pair(m)
        elif self.direct:
            self._elaborate_direct(m)
        else:
            self._elaborate_memory(m)
        return m

    def _elaborate_register(self, m):
        m.submodules.half = half = HalfRegister(self.shape)
        wiring.connect(m, wiring.flipped(self.i), half.i)
        wiring.connect(m, half.o, wiring.flipped(self.o))
        m.d.comb += self.level.eq(half.o.valid)

    def _elaborate_pair(self, m):
        # Shallower than the way through a memory: two or three registers keep one item per cycle.
        m.submodules.pair = pair = SkidBuffer(self.shape)
        wiring.connect(m, wiring.flipped(self.i), pair.i)
        if self.depth == 2:
            wiring.connect(m, pair.o, wiring.flipped(self.o))
            m.d.comb += self.level.eq(pair.level)
        else:
            m.submodules.third = third = StreamRegister(self.shape)
            wiring.connect(m, pair.o, third.i)
            wiring.connect(m, third.o, wiring.flipped(self.o))
            m.d.comb += self.level.eq(pair.level + third.o.valid)

    def _elaborate_direct(self, m):
        m.submodules.store = store = memory.Memory(shape=self.shape, depth=self.depth, init=[])
        write_port, read_port = store.write_port(), store.read_port(domain="comb")
        has_room = Signal(init=1)  # level != depth
        push, pop = Signal(), Signal()
        m.d.comb += [
            self.i.ready.eq(has_room),
            push.eq(self.i.valid & has_room),
            pop.eq(self.o.valid & self.o.ready),
            # What is behind the last item does not count: no item's arrival drives the enables of a wide memory.
            write_port.en.eq(has_room),
            write_port.data.eq(self.i.payload),
            self.o.payload.eq(read_port.data),
        ]
        for port, step in ((write_port, push), (read_port, pop)):
            with m.If(step):
                m.d.sync += port.addr.eq(port.addr + 1)
                if self.depth & (self.depth - 1):
                    with m.If(port.addr == self.depth - 1):
                        m.d.sync += port.addr.eq(0)
        with m.If(push != pop):
            m.d.sync += self.level.eq(self.level + Mux(pop, -1, 1))
        m.d.sync += [
            self.o.valid.eq(push | (self.o.valid & ~(pop & (self.level == 1)))),
            has_room.eq(pop | (has_room & ~(push & (self.level == self.depth - 1)))),
            Assert((self.o.valid == (self.level != 0)) & (has_room == (self.level != self.depth)),
                   Format("StreamFifo: flags and level {} differ", self.level)),
        ]

    def _elaborate_memory(self, m):
        m.submodules.store = store = memory.Memory(shape=self.shape, depth=self.depth, init=[],
                                                   attrs=NO_CLASH if self.depth > _MIDDLE else {})
        write_port = store.write_port()
        latch = self.depth > _SHALLOW
        read_port = store.read_port(domain="sync" if latch else "comb")

        level = Signal(range(self.depth + 1))  # all items: memory, latch, output register
        stored = Signal(range(self.depth + 1))  # items in the memory alone
        any_stored = Signal()  # stored != 0, stored == 1, level != depth: registers, as these begin long paths
        one_stored = Signal()
        has_room = Signal(init=1)
        latched = Signal()  # the latch, if there is one, holds an item
        waits = Signal()  # the memory's output is the next item
        push = Signal()
        pop = Signal()
        out_free = Signal()  # the output register takes an item at this edge
        bypass = Signal()
        store_write = Signal()
        store_read = Signal()

        m.d.comb += [
            self.level.eq(level),
            self.i.ready.eq(has_room),
            push.eq(self.i.valid & has_room),
            pop.eq(self.o.valid & self.o.ready),
            out_free.eq(~self.o.valid | self.o.ready),
            waits.eq(latched if latch else any_stored),
            bypass.eq(push & out_free & ~latched & ~any_stored),
            store_write.eq(push & ~bypass),
            store_read.eq(any_stored & ((~latched | out_free) if latch else out_free)),
            write_port.data.eq(self.i.payload),
            write_port.en.eq(store_write),
        ]
        # The ports' addresses are the write and the read pointer.
        for port, step in ((write_port, store_write), (read_port, store_read)):
            with m.If(step):
                m.d.sync += port.addr.eq(port.addr + 1)
                if self.depth & (self.depth - 1):
                    with m.If(port.addr == self.depth - 1):
                        m.d.sync += port.addr.eq(0)
        # One adder each, not two in a row.
        with m.If(push != pop):
            m.d.sync += level.eq(level + Mux(pop, -1, 1))
        with m.If(store_write != store_read):
            m.d.sync += [
                stored.eq(stored + Mux(store_read, -1, 1)),
                one_stored.eq(Mux(store_read, stored == 2, ~any_stored)),
            ]
        m.d.sync += [
            any_stored.eq(store_write | (any_stored & ~(store_read & one_stored))),
            has_room.eq(pop | (has_room & ~(push & (level == self.depth - 1)))),
        ]
        if latch:
            m.d.comb += read_port.en.eq(store_read)
            with m.If(store_read):
                m.d.sync += latched.eq(1)
            with m.Elif(out_free):
                m.d.sync += latched.eq(0)
        with m.If(out_free):
            m.d.sync += [
                self.o.valid.eq(waits | bypass),
                self.o.payload.eq(Mux(waits, Value.cast(read_port.data), Value.cast(self.i.payload))),
            ]

        m.d.sync += [
            Assert(level <= self.depth, Format("StreamFifo: level {} above depth {}", level, self.depth)),
            Assert((any_stored == (stored != 0)) & (one_stored == (stored == 1)) & (has_room == (level != self.depth)),
                   "StreamFifo: flags and levels differ"),
            Assert(level == stored + latched + self.o.valid,
                   Format("StreamFifo: level {} but {} stored, {} latched, {} out", level, stored, latched,
                          self.o.valid)),
        ]
