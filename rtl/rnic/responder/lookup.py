"""A small per-QP state next to a stream of jobs, updated job by job."""

from amaranth import *
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Lookup", "Looked"]


class Looked(data.StructLayout):
    """A job and the state of its QP, every earlier update included."""

    def __init__(self, job, state):
        super().__init__({"job": job, "state": state})


class Lookup(wiring.Component):
    """Joins each job with the state word of its QP; whoever takes the job may write the state back.

    Jobs have a field ``qpn``. ``update`` counts in the cycle in which ``o`` is taken and is seen by the next job of
    the QP, however close. ``poke`` writes from outside; it is taken when no update needs the memory, and a job that was
    looked up already is not changed by it.

    Timing: latency 2 cycles (memory latch, output register), one job per cycle. State is 0 after power-up.

    Parameters: ``job``, ``state`` shapes; ``depth``, number of QPs.
    Members: ``i``, ``o`` streams; ``update``, ``update_state``; ``poke``, stream of {qpn, state}.
    """

    def __init__(self, job, state, depth: int):
        self.job, self.state, self.depth = job, state, depth
        self.index_bits = max(1, (depth - 1).bit_length())
        super().__init__({
            "i": In(stream.Signature(job)),
            "o": Out(stream.Signature(Looked(job, state))),
            "update": In(1),
            "update_state": In(state),
            "poke": In(stream.Signature(data.StructLayout({"qpn": self.index_bits, "state": state}))),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.mem = mem = memory.Memory(shape=self.state, depth=self.depth, init=[])
        write = mem.write_port()
        read = mem.read_port(transparent_for=(write,))

        latched = Signal(self.job)  # job whose state is at the memory's output
        latched_valid = Signal()
        move = Signal()
        accept = Signal()
        update = Signal()
        forward = Signal()
        m.d.comb += [
            move.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(~latched_valid | move),
            accept.eq(self.i.valid & self.i.ready),
            update.eq(self.o.valid & self.o.ready & self.update),
            forward.eq(update & (latched.qpn == self.o.p.job.qpn)),
            read.addr.eq(self.i.p.qpn),
            read.en.eq(accept),
            self.poke.ready.eq(~update),
            write.en.eq(update | self.poke.valid),
            write.addr.eq(Mux(update, self.o.p.job.qpn, self.poke.p.qpn)),
            write.data.eq(Mux(update, Value.cast(self.update_state), Value.cast(self.poke.p.state))),
        ]
        with m.If(move):
            m.d.sync += self.o.valid.eq(latched_valid)
            with m.If(latched_valid):
                m.d.sync += [
                    self.o.p.job.eq(latched),
                    self.o.p.state.eq(Mux(forward, Value.cast(self.update_state), Value.cast(read.data))),
                ]
        with m.If(self.i.ready):
            m.d.sync += latched_valid.eq(self.i.valid)
        with m.If(accept):
            m.d.sync += latched.eq(self.i.payload)
        return m
