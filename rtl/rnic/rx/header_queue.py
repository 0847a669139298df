"""Headers waiting for the verdict on their frames."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["HeaderQueue"]


class HeaderQueue(wiring.Component):
    """A FIFO whose items are written first and counted one cycle later, when it is known whether they are wanted.

    So the decision does not drive the enables of a very wide memory.

    Timing: an item is offered two cycles after ``write``, straight from a memory read without a clock; one item per cycle in and
    out. Order is kept.

    Parameters: ``shape``, the item; ``depth`` in items, a power of two (ValueError).
    Members: ``write`` and ``item``; ``wanted``, one cycle behind ``write``; ``level``, items counted, from a register; ``o``,
    stream of ``shape``. The writer must not write when ``depth`` items are there (Assert).
    """

    def __init__(self, shape, depth: int):
        if depth < 2 or depth & (depth - 1):
            raise ValueError(f"depth is {depth}, must be a power of two of at least 2 items")
        self.shape = shape
        self.depth = depth
        super().__init__({
            "write": In(1),
            "item": In(shape),
            "wanted": In(1),
            "level": Out(range(depth + 1)),
            "o": Out(stream.Signature(shape)),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = store = memory.Memory(shape=self.shape, depth=self.depth, init=[])
        write_port = store.write_port()
        read_port = store.read_port(domain="comb")
        bits = (self.depth - 1).bit_length()

        written, counted = Signal(), Signal()
        write_at, write_here, read_at = Signal(bits), Signal(bits), Signal(bits)
        taken = Signal()
        m.d.sync += written.eq(self.write)
        m.d.comb += [
            counted.eq(written & self.wanted),
            write_here.eq(write_at + counted),
            write_port.addr.eq(write_here),
            write_port.data.eq(self.item),
            write_port.en.eq(self.write),
            taken.eq(self.o.valid & self.o.ready),
            read_port.addr.eq(read_at),
            self.o.payload.eq(read_port.data),
        ]
        m.d.sync += [
            write_at.eq(write_here),
            self.level.eq(self.level + counted - taken),
            self.o.valid.eq(counted | (self.o.valid & ~(taken & (self.level == 1)))),
            read_at.eq(read_at + taken),
            Assert(self.o.valid == (self.level != 0), "HeaderQueue: valid and level differ"),
        ]
        # The slot behind the last counted item must be free: it may be written before it is known to be wanted.
        m.d.sync += Assert(~self.write | (self.level + counted < self.depth),
                           Format("HeaderQueue: write with {} of {} items", self.level, self.depth))
        return m
