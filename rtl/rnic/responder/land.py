"""Joins landings (data of own READs and ATOMICs) with the jobs of inbound requests in front of Place."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import LandJob
from ..stream.arbiter import RoundRobin
from ..stream.buffer import SkidBuffer
from .records import FetchedJob, JobKind

__all__ = ["LandMerge"]


class LandMerge(wiring.Component):
    """Two sources of jobs for `Place`, in turn; order is kept within each.

    A FLUSH among the requests waits for every landing that came before it (`AHEAD` of them at most): what ``drained`` of the
    responder says is true of landings too.

    Timing: latency 1 cycle, one job per cycle.

    Members: ``i`` FetchedJob, ``land`` LandJob in, ``o`` FetchedJob out: streams.
    """

    AHEAD = 4  # landings that may wait in registers in front of this block

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(FetchedJob(p))),
            "land": In(stream.Signature(LandJob(p))),
            "o": Out(stream.Signature(FetchedJob(p))),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.out = out = SkidBuffer(FetchedJob(self.p))
        m.submodules.turn = turn = RoundRobin(2)
        wiring.connect(m, out.o, wiring.flipped(self.o))
        land, item, job = self.land.payload, out.i.payload, out.i.payload.job
        flush, held, waits, taken = Signal(), Signal(), Signal(), Signal()
        passed = Signal(range(self.AHEAD + 1))  # landings since the FLUSH came
        m.d.comb += [
            flush.eq(self.i.valid & (self.i.payload.job.kind == JobKind.FLUSH)),
            held.eq(flush & self.land.valid & (passed != self.AHEAD)),
            turn.requests.eq(Cat(self.i.valid & ~held, self.land.valid)),
            waits.eq(turn.requests.any()),
            out.i.valid.eq(waits),
            taken.eq(waits & out.i.ready),
            turn.advance.eq(taken),
            self.i.ready.eq(out.i.ready & waits & (turn.grant == 0)),
            self.land.ready.eq(out.i.ready & waits & (turn.grant == 1)),
            item.eq(self.i.payload),
        ]
        with m.If(taken & (turn.grant == 0)):
            m.d.sync += passed.eq(0)
        with m.Elif(self.land.ready & flush & (passed != self.AHEAD)):
            m.d.sync += passed.eq(passed + 1)
        with m.If(turn.grant == 1):
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
