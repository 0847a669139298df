"""A small per-QP state next to a stream of jobs, updated job by job."""

from amaranth import *
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Looked", "Lookup"]


class Looked(data.StructLayout):
    """A job and the state of its QP, every earlier update included; ``own`` is the state that nobody pokes."""

    def __init__(self, job, state, own=None):
        super().__init__({"job": job, "state": state, **({} if own is None else {"own": own})})


class Lookup(wiring.Component):
    """Joins each job with the state word of its QP; whoever takes the job may write the state back.

    Jobs have a field ``qpn``. ``update`` counts in the cycle in which ``o`` is taken and is seen by the next job of
    the QP, however close. ``poke`` writes from outside; it is taken when no update needs the memory, and a job that was
    looked up already is not changed by it. ``own`` is a second word that only ``update_own`` writes, and ``clear``: 0, while no
    job is inside.

    Timing: latency 2 cycles (memory latch, output register), one job per cycle; with ``half_rate`` one every 2 cycles, as it
    stays on ``i`` until its state is there. State is 0 after power-up.

    Parameters: ``job``, ``state`` shapes; ``depth``, number of QPs; ``own``, a shape or None; ``half_rate``.
    Members: ``i``, ``o`` streams; ``update``, ``update_state``; with ``own`` also ``update_own``, ``own_state``, ``clear``,
    ``clear_index``; ``poke``, stream of {qpn, state}.
    """

    def __init__(self, job, state, depth: int, own=None, *, half_rate: bool = False):
        self.half_rate = half_rate
        self.job, self.state, self.depth, self.own = job, state, depth, own
        self.index_bits = max(1, (depth - 1).bit_length())
        super().__init__({
            "i": In(stream.Signature(job)),
            "o": Out(stream.Signature(Looked(job, state, own))),
            "update": In(1),
            "update_state": In(state),
            "poke": In(stream.Signature(data.StructLayout({"qpn": self.index_bits, "state": state}))),
            **({} if own is None else {
                "update_own": In(1), "own_state": In(own), "clear": In(1), "clear_index": In(self.index_bits)}),  # fmt: skip
        })

    def elaborate(self, platform):
        m = Module()
        latched = Signal(self.job)  # job whose state is at the memory's output
        latched_valid = Signal()
        move = Signal()
        accept = Signal()
        taken = Signal()
        same = Signal()
        m.d.comb += [
            move.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(latched_valid & move if self.half_rate else ~latched_valid | move),
            accept.eq(self.i.valid & (~latched_valid if self.half_rate else self.i.ready)),
            taken.eq(self.o.valid & self.o.ready),
            same.eq(latched.qpn == self.o.p.job.qpn),
        ]

        def table(shape, update, value):
            """A memory of one word a QP: its write port, and the word of the latched job."""
            mem = memory.Memory(shape=shape, depth=self.depth, init=[])
            write = mem.write_port()
            read = mem.read_port(transparent_for=(write,))
            m.d.comb += [read.addr.eq(self.i.p.qpn), read.en.eq(accept)]
            return mem, write, Mux(update & same, Value.cast(value), Value.cast(read.data))

        update = Signal()
        m.d.comb += update.eq(taken & self.update)
        m.submodules.mem, write, found = table(self.state, update, self.update_state)
        m.d.comb += [
            self.poke.ready.eq(~update),
            write.en.eq(update | self.poke.valid),
            write.addr.eq(Mux(update, self.o.p.job.qpn, self.poke.p.qpn)),
            write.data.eq(Mux(update, Value.cast(self.update_state), Value.cast(self.poke.p.state))),
        ]
        with m.If(move):
            m.d.sync += self.o.valid.eq(latched_valid)
            with m.If(latched_valid):
                m.d.sync += [self.o.p.job.eq(latched), self.o.p.state.eq(found)]
        if self.own is not None:
            update_own = Signal()
            m.d.comb += update_own.eq(taken & self.update_own)
            m.submodules.owns, write, found = table(self.own, update_own, self.own_state)
            m.d.comb += [write.en.eq(update_own), write.addr.eq(self.o.p.job.qpn), write.data.eq(self.own_state)]
            with m.If(self.clear):
                m.d.comb += [write.en.eq(1), write.addr.eq(self.clear_index), write.data.eq(0)]
            with m.If(move & latched_valid):
                m.d.sync += self.o.p.own.eq(found)
        if self.half_rate:
            m.d.comb += latched.eq(self.i.payload)
            m.d.sync += latched_valid.eq(Mux(latched_valid, ~move, self.i.valid))
            return m
        with m.If(self.i.ready):
            m.d.sync += latched_valid.eq(self.i.valid)
        with m.If(accept):
            m.d.sync += latched.eq(self.i.payload)
        return m
