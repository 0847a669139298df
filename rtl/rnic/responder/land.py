"""Joins landings (data of own READs and ATOMICs) with the jobs of inbound requests in front of Place."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import LandJob
from ..stream.arbiter import RoundRobin
from .records import FetchedJob, JobKind, is_barrier

__all__ = ["LandMerge"]


class LandMerge(wiring.Component):
    """Two sources of jobs for `Place`, in turn; order is kept within each.

    A FLUSH among the requests waits for every landing that came before it (`AHEAD` of them at most): what ``drained`` of the
    responder says is true of landings too.

    Timing: combinational; a job that is offered stays until it is taken, in its second cycle at the earliest (asserted), so
    that no ``ready`` depends on the choice.

    Members: ``i`` FetchedJob, ``land`` LandJob in, ``o`` FetchedJob out: streams; ``barrier``, `is_barrier` of ``o``.
    """

    AHEAD = 4  # landings that may wait in registers in front of this block

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(FetchedJob(p))),
            "land": In(stream.Signature(LandJob(p))),
            "o": Out(stream.Signature(FetchedJob(p))),
            "barrier": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.turn = turn = RoundRobin(2, spaced=True)
        land, item, job = self.land.payload, self.o.payload, self.o.payload.job
        flush, held, taken = Signal(), Signal(), Signal()
        choice, chosen, kept = Signal(), Signal(), Signal()  # landing; `kept`: as `chosen` in the cycle before
        passed = Signal(range(self.AHEAD + 1))  # landings since the FLUSH came
        m.d.comb += [
            flush.eq(self.i.valid & (self.i.payload.job.kind == JobKind.FLUSH)),
            held.eq(flush & self.land.valid & (passed != self.AHEAD)),
            turn.requests.eq(Cat(self.i.valid & ~held, self.land.valid)),
            choice.eq(Mux(kept, chosen, turn.grant)),
            self.o.valid.eq(kept | turn.requests.any()),
            taken.eq(kept & self.o.ready),
            turn.advance.eq(taken),
            self.i.ready.eq(taken & ~chosen),
            self.land.ready.eq(taken & chosen),
            self.barrier.eq(~choice & is_barrier(self.i.payload.job)),
            item.eq(self.i.payload),
        ]
        m.d.sync += [
            kept.eq(self.o.valid & ~self.o.ready), chosen.eq(choice),
            Assert(kept | ~self.o.valid | ~self.o.ready, "LandMerge: a job is taken in its first cycle"),
        ]  # fmt: skip
        with m.If(taken & ~chosen):
            m.d.sync += passed.eq(0)
        with m.Elif(self.land.ready & flush & (passed != self.AHEAD)):
            m.d.sync += passed.eq(passed + 1)
        with m.If(choice):
            m.d.comb += [
                item.as_value().eq(0),
                item.qpn.eq(land.qpn),
                job.kind.eq(JobKind.SEND),
                job.land.eq(1),
                job.tag.eq(land.tag),
                job.qpn.eq(land.qpn),
                job.psn.eq(land.psn),
                job.length.eq(land.length),
                job.has_data.eq(land.length != 0),
                job.index.eq(land.index),
                job.head.eq(land.head),
                job.immediate.eq(land.immediate),
                job.va.eq(land.value),
                job.resid.eq(land.offset),
                job.pd.eq(land.pd),
                *(item.sges[i].eq(land.sges[i]) for i in range(self.p.max_sge)),
            ]
        return m
