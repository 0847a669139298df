"""ACK and NAK packets."""

from amaranth import *
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from ..config import Params
from ..records import AckJob, TxHeader
from ..stream.buffer import SkidBuffer
from ..wire.opcode import Opcode
from ..wire.syndrome import AethType

__all__ = ["AckSender"]


class AckSender(wiring.Component):
    """Makes the packet header of an ACK or NAK: RC_ACK with the job's PSN, syndrome and MSN; or of an ATOMIC ACK; no payload.

    Coalesces (R-ACK-2): an ACK that waits behind the header on offer gives way to the next job where that is an ACK of the same
    QP. What is neither dropped nor passed: NAKs, ATOMIC ACKs, and the header on offer.

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
        offered, waiting = Signal(AckJob(self.p)), Signal(AckJob(self.p))
        waits = Signal()  # `waiting` holds a job
        go, superseded = Signal(), Signal()
        header = self.header.payload

        def plain(job):
            return ~job.atomic & (job.syndrome[5:7] == AethType.ACK.value)

        new = jobs.o.payload
        m.d.comb += [
            go.eq(~self.header.valid | self.header.ready),
            superseded.eq(plain(new) & plain(waiting) & (new.qpn == waiting.qpn)),  # R-ACK-2
            jobs.o.ready.eq(go | ~waits | superseded),
            header.qpn.eq(offered.qpn),
            header.opcode.eq(Mux(offered.atomic, Opcode.RC_ATOMIC_ACK, Opcode.RC_ACK)),
            header.swap.eq(offered.original),
            header.psn.eq(offered.psn),
            header.syndrome.eq(offered.syndrome),
            header.msn.eq(offered.msn),
        ]
        with m.If(go):
            m.d.sync += [self.header.valid.eq(waits | jobs.o.valid), offered.eq(Mux(waits, waiting, new))]
        with m.If(jobs.o.valid & jobs.o.ready):
            m.d.sync += waiting.eq(new)
        with m.If(go):
            m.d.sync += waits.eq(waits & jobs.o.valid)
        with m.Elif(jobs.o.valid):
            m.d.sync += waits.eq(1)
        return m
