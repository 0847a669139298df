"""The segments of packets: those of the packet under way become visible, or vanish, at its verdict."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from .records import Segment, max_segments

__all__ = ["SegmentRing"]


class SegmentRing(wiring.Component):
    """A ring of segments. ``put`` adds ``put_segment`` to the packet under way (only with ``room``), ``count`` says how many it
    has; ``commit`` shows them all on ``segment``, ``rollback`` forgets them.

    Timing: a segment shows 2 cycles after its packet's ``commit``, one per cycle.
    """

    def __init__(self, p: Params):
        self.most = max_segments(p)
        super().__init__({
            "put": In(1), "put_segment": In(Segment()), "commit": In(1), "rollback": In(1), "room": Out(1),
            "count": Out(range(self.most + 1)), "segment": Out(stream.Signature(Segment())),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        most = self.most
        depth = 1 << (2 * most - 1).bit_length()  # a power of two: the counters wrap by themselves
        m.submodules.kept = kept = memory.Memory(shape=Segment(), depth=depth, init=[])
        write, read = kept.write_port(), kept.read_port(domain="comb")
        committed = Signal(range(depth + 1))  # visible segments not yet taken
        first = Signal(range(depth))
        begin = Signal(range(depth))  # where the packet under way begins
        taken = Signal()
        m.d.comb += [
            self.room.eq(committed + self.count < depth),
            write.en.eq(self.put),
            write.addr.eq(begin + self.count),
            write.data.eq(self.put_segment),
            read.addr.eq(first),
            taken.eq((committed != 0) & (~self.segment.valid | self.segment.ready)),
        ]
        with m.If(~self.segment.valid | self.segment.ready):
            m.d.sync += [self.segment.valid.eq(committed != 0), self.segment.payload.eq(read.data)]
        with m.If(taken):
            m.d.sync += first.eq(first + 1)
        with m.If(self.commit):
            m.d.sync += begin.eq(begin + self.count)
        m.d.sync += committed.eq(committed - taken + Mux(self.commit, self.count, 0))
        with m.If(self.commit | self.rollback):
            m.d.sync += self.count.eq(0)
        with m.Elif(self.put):
            m.d.sync += self.count.eq(self.count + 1)
        m.d.sync += [
            Assert(~self.put | (self.count != most), Format("responder: more than {} segments", most)),
            Assert(~self.put | self.room, "responder: segment ring overflows"),
        ]
        return m
