"""Receive queue: fetches the receive WQEs that jobs took, keeps them for the rest of their messages."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import VendorError
from ..abi.queues import RECV_WQE
from ..config import Params
from ..memory.ordered import OrderedXlate
from ..records import DmaReadSignature, Probe, ProbeEvent, XlateSignature, XlateStatus
from ..stream.buffer import SkidBuffer
from .queue import Queue
from .records import FetchedJob, Job, JobKind

__all__ = ["ReceiveQueue", "TAG_BITS", "vendor_of"]

TAG_BITS = 3  # translations under way
WQE_ALIGN = 6  # log2 of the receive WQE's size


def vendor_of(status) -> Value:
    """Hardware VendorError number of an XlateStatus (records.XlateStatus); 0 for OK."""
    code = Value.cast(status)
    return Mux(code == 0, 0, code + VendorError.KEY_INVALID.value - XlateStatus.KEY.value)


class _Stored(data.StructLayout):
    """A receive WQE as kept between the packets of a message."""

    def __init__(self):
        super().__init__({"wqe": 8 * RECV_WQE.size, "error": VendorError})


class ReceiveQueue(wiring.Component):
    """Adds the receive WQE to every SEND job, in order.

    A job with ``fetch`` has its ring entry translated (ring bounds) and read, 64 bytes; the later packets of its message
    get the WQE from a memory with one entry per QP. An entry whose physical address is no multiple of 64 counts as
    unreadable. An error travels in ``wqe_error``.

    Timing: jobs wait in one FIFO, several fetches are under way; a job without fetch passes in 3 cycles when nothing is
    before it; one job every 2 cycles, one fetched WQE every max(2, 512 / data_width) cycles. No more reads are under way
    than jobs wait, so the read engine's words are taken at once when the job is due.

    Members: ``i`` Job, ``o`` FetchedJob streams; ``xlate``, ``read`` clients; ``probe`` (RECV_WQE_FETCHED).
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(Job(p))),
            "o": Out(stream.Signature(FetchedJob(p))),
            "xlate": Out(XlateSignature(p, TAG_BITS)),
            "read": Out(DmaReadSignature(p)),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.waiting = waiting = Queue(Job(p), p.desc_depth)
        m.submodules.translate = translate = OrderedXlate(p, TAG_BITS)
        # Outcome of each translation, in order; the job FIFO bounds the number.
        m.submodules.outcomes = outcomes = Queue(VendorError, p.desc_depth)
        wiring.connect(m, translate.xlate, wiring.flipped(self.xlate))

        self._enter(m, waiting, translate)
        self._issue_reads(m, translate, outcomes)
        self._leave(m, waiting, outcomes)
        return m

    def _enter(self, m, waiting, translate):
        p = self.p
        asked = Signal()  # the translation of the offered job is under way
        wants = Signal()
        index_mask = Signal(16)
        m.d.comb += [
            waiting.i.payload.eq(self.i.payload),
            wants.eq(self.i.p.fetch & ~asked),
            translate.request.valid.eq(self.i.valid & wants),
            translate.request.p.ring.eq(1),
            translate.request.p.key.eq(p.tpt_rq_base + self.i.p.qpn),
            index_mask.eq(((1 << self.i.p.log_rq) - 1)[:16]),
            translate.request.p.va.eq((self.i.p.index & index_mask) << WQE_ALIGN),
            translate.request.p.length.eq(RECV_WQE.size),
            waiting.i.valid.eq(self.i.valid & ~wants),
            self.i.ready.eq(waiting.i.ready & ~wants),
        ]
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += asked.eq(0)
        with m.Elif(translate.request.valid & translate.request.ready):
            m.d.sync += asked.eq(1)

    def _issue_reads(self, m, translate, outcomes):
        answer = translate.response
        command = self.read.command
        fine = Signal()
        outcome = Signal(VendorError)
        m.d.comb += [
            outcome.eq(vendor_of(answer.p.status)),
            fine.eq(Value.cast(outcome) == 0),
        ]
        aligned = Signal()
        m.d.comb += [
            aligned.eq(answer.p.address[:WQE_ALIGN] == 0),
            command.p.address.eq(answer.p.address),
            command.p.length.eq(RECV_WQE.size),
            command.valid.eq(answer.valid & fine & aligned & outcomes.i.ready),
            outcomes.i.valid.eq(answer.valid & (command.ready | ~fine | ~aligned)),
            outcomes.i.payload.eq(Mux(fine & ~aligned, VendorError.HOST_BUS, outcome)),
            answer.ready.eq(outcomes.i.ready & (command.ready | ~fine | ~aligned)),
        ]

    def _leave(self, m, waiting, outcomes):
        p = self.p
        words = 8 * RECV_WQE.size // p.data_width
        m.submodules.kept = kept = memory.Memory(shape=_Stored(), depth=p.num_qps, init=[])
        write, read = kept.write_port(), kept.read_port()
        m.submodules.out = out = SkidBuffer(FetchedJob(p))
        wiring.connect(m, out.o, wiring.flipped(self.o))

        job = waiting.o.p
        buffer = Signal(8 * RECV_WQE.size)
        bus_error = Signal()
        left = Signal(range(words + 1), init=words)  # words of the WQE still to come
        stored = Signal(_Stored())
        m.d.comb += [
            read.addr.eq(job.qpn),
            write.addr.eq(job.qpn),
            write.data.eq(stored),
            out.i.p.job.eq(job),
            out.i.p.sges.as_value().eq(stored.wqe),
            out.i.p.wqe_error.eq(stored.error),
            self.probe.event.eq(ProbeEvent.RECV_WQE_FETCHED),
            self.probe.qpn.eq(job.qpn),
            self.probe.index.eq(job.index),
            self.probe.psn.eq(job.psn),
        ]
        with m.FSM(name="receive_queue"):
            with m.State("Look"):
                m.d.sync += [left.eq(words), bus_error.eq(0)]
                with m.If(waiting.o.valid):
                    with m.If(job.fetch):
                        with m.If(outcomes.o.valid):
                            with m.If(outcomes.o.payload == VendorError.NONE):
                                m.next = "Words"
                            with m.Else():
                                m.next = "Fetched"
                    with m.Elif((job.kind == JobKind.SEND) & ~job.starts):
                        m.next = "Kept"
                    with m.Else():
                        m.d.comb += [out.i.valid.eq(1), waiting.o.ready.eq(out.i.ready)]
            with m.State("Words"):
                m.d.comb += self.read.word.ready.eq(1)
                with m.If(self.read.word.valid):
                    m.d.sync += [
                        buffer.eq(Cat(buffer, self.read.word.p.data)[p.data_width :]),
                        bus_error.eq(bus_error | self.read.word.p.err),
                        left.eq(left - 1),
                        Assert((self.read.word.p.first == 0) & (self.read.word.p.count == p.lanes),
                               "responder: receive WQE word is not aligned"),
                        Assert(self.read.word.p.last == (left == 1), "responder: receive WQE has a wrong number of words"),
                    ]
                    with m.If(self.read.word.p.last):
                        m.next = "Fetched"
            with m.State("Fetched"):
                m.d.comb += [
                    stored.wqe.eq(buffer),
                    stored.error.eq(Mux(outcomes.o.payload == VendorError.NONE,
                                        Mux(bus_error, VendorError.HOST_BUS, VendorError.NONE), outcomes.o.payload)),
                    out.i.valid.eq(1),
                    waiting.o.ready.eq(out.i.ready),
                    outcomes.o.ready.eq(out.i.ready),
                    write.en.eq(out.i.ready),
                    self.probe.valid.eq(out.i.ready),
                ]
                with m.If(out.i.ready):
                    m.next = "Look"
            with m.State("Kept"):  # the memory's output belongs to this QP
                m.d.comb += [stored.eq(read.data), out.i.valid.eq(1), waiting.o.ready.eq(out.i.ready)]
                with m.If(out.i.ready):
                    m.next = "Look"
