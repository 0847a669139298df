"""Frames for the host side: whole frames or nothing, never in the way of the frames behind."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.clash import NO_CLASH
from rnic.stream.beat import Beat, StoredBeat
from rnic.stream.check import watch

__all__ = ["EthFifo"]


class EthFifo(wiring.Component):
    """A frame FIFO with commit and rollback.

    A frame becomes visible when its last beat has been written with ``commit``; without, or when it did not fit, nothing
    of it remains. No beat is without a byte. A frame larger than the FIFO never fits.

    Timing: takes a beat every cycle, always; a frame's first beat is offered three cycles after its last was taken; one
    beat per cycle out. Frames keep their order.

    Parameters: ``width`` of the bus in bits; ``depth`` in beats, a power of two. Raises ValueError.
    Members: ``valid``, ``beat``, ``commit`` (with the last beat) in; ``overflow``, with the last beat: the frame does not
    fit; ``o``, stream of Beat.
    """

    def __init__(self, width: int, depth: int):
        if depth < 2 or depth & (depth - 1):
            raise ValueError(f"depth is {depth}, must be a power of two of at least 2 beats")
        self.width = width
        self.depth = depth
        super().__init__({
            "valid": In(1),
            "beat": In(Beat(width)),
            "commit": In(1),
            "overflow": Out(1),
            "o": Out(stream.Signature(Beat(width))),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = store = memory.Memory(shape=StoredBeat(self.width), depth=self.depth, init=[], attrs=NO_CLASH)
        write_port = store.write_port()
        read_port = store.read_port()
        bits = self.depth.bit_length()  # one more than the address: full and empty differ

        write_at, commit_at, read_at = Signal(bits), Signal(bits), Signal(bits)
        used = Signal(bits)
        lost = Signal()  # a beat of this frame did not fit
        full = Signal()
        m.d.comb += [
            used.eq(write_at - read_at),
            full.eq(used == self.depth),
            self.overflow.eq(lost | full),
            write_port.addr.eq(write_at),
            StoredBeat.put(write_port.data, self.beat),
            write_port.en.eq(self.valid & ~self.overflow),
        ]
        with m.If(self.valid):
            with m.If(self.beat.last):
                m.d.sync += lost.eq(0)
                with m.If(self.commit & ~self.overflow):
                    m.d.sync += [write_at.eq(write_at + 1), commit_at.eq(write_at + 1)]
                with m.Else():
                    m.d.sync += write_at.eq(commit_at)
            with m.Elif(full):
                m.d.sync += lost.eq(1)
            with m.Elif(~lost):
                m.d.sync += write_at.eq(write_at + 1)

        latched, out_free, fetch = Signal(), Signal(), Signal()
        out_beat = Signal(StoredBeat(self.width), reset_less=True)  # no reset: the memory's output goes straight into it
        m.d.comb += [
            StoredBeat.get(self.o.payload, out_beat),
            out_free.eq(~self.o.valid | self.o.ready),
            fetch.eq((read_at != commit_at) & (~latched | out_free)),
            read_port.addr.eq(read_at),
            read_port.en.eq(fetch),
        ]
        with m.If(fetch):
            m.d.sync += [read_at.eq(read_at + 1), latched.eq(1)]
        with m.Elif(out_free):
            m.d.sync += latched.eq(0)
        with m.If(out_free):
            m.d.sync += [self.o.valid.eq(latched), out_beat.eq(read_port.data)]

        watch(m, "o", self.o)
        m.d.sync += Assert(used <= self.depth, Format("EthFifo: {} beats used of {}", used, self.depth))
        return m
