"""ACK and NAK packets."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import AckJob, TxHeader
from ..stream.buffer import SkidBuffer
from ..wire.opcode import Opcode

__all__ = ["AckSender"]


class AckSender(wiring.Component):
    """Makes the packet header of an ACK or NAK: RC_ACK with the job's PSN, syndrome and MSN; or of an ATOMIC ACK; no payload.

    Timing: latency 1 cycle, one job per cycle; order is kept; all outputs come from registers.

    The responder reports ACK_SENT when it gives the job.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "job": In(stream.Signature(AckJob(p))),
            "header": Out(stream.Signature(TxHeader(p))),
        })

    def elaborate(self, platform):
        m = Module()
        m.submodules.jobs = jobs = SkidBuffer(AckJob(self.p))
        wiring.connect(m, wiring.flipped(self.job), jobs.i)
        job = jobs.o.payload
        header = self.header.payload
        m.d.comb += [
            self.header.valid.eq(jobs.o.valid),
            jobs.o.ready.eq(self.header.ready),
            header.qpn.eq(job.qpn),
            header.opcode.eq(Mux(job.atomic, Opcode.RC_ATOMIC_ACK, Opcode.RC_ACK)),
            header.swap.eq(job.original),
            header.psn.eq(job.psn),
            header.syndrome.eq(job.syndrome),
            header.msn.eq(job.msn),
        ]
        return m
