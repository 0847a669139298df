"""Receive queue: fetches the receive WQEs that jobs took, keeps them for the rest of their messages."""

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import VendorError
from ..abi.queues import RECV_WQE
from ..clash import NO_CLASH
from ..config import Params
from ..memory.join import XlateJoin
from ..memory.ordered import OrderedXlate
from ..records import DmaReadSignature, Probe, ProbeEvent, XlateSignature, XlateStatus
from ..stream.buffer import HalfRegister
from ..stream.fifo import StreamFifo
from .parking import Parking, Ticket
from .records import FetchedJob, Job, JobKind, is_barrier

__all__ = ["ReceiveQueue", "vendor_of"]

FAST_BITS = 3  # translations under way that do not wait for a page table
WQE_ALIGN = 6  # log2 of the receive WQE's size


def vendor_of(status) -> Value:
    """Hardware VendorError number of an XlateStatus (records.XlateStatus); 0 for OK."""
    code = Value.cast(status)
    return Mux(code == 0, 0, code + VendorError.KEY_INVALID.value - XlateStatus.KEY.value)


HALF_BITS = 4 * RECV_WQE.size  # half a receive WQE


class _Half(data.StructLayout):
    """Half a receive WQE; ``error`` counts in the second one."""

    def __init__(self):
        super().__init__({"wqe": HALF_BITS, "error": VendorError})


class _Ask(data.StructLayout):
    """A receive WQE to fetch for the job in ``slot``: its ring and where it lies there."""

    def __init__(self, p: Params):
        super().__init__({"slot": range(p.parking_slots), "qpn": p.qpn_bits, "va": 16 + WQE_ALIGN})


class _Failure(data.StructLayout):
    def __init__(self, p: Params):
        super().__init__({"slot": range(p.parking_slots), "error": VendorError})


class ReceiveQueue(wiring.Component):
    """Adds the receive WQE to every SEND job, in order within a QP.

    A job with ``fetch`` has its ring entry translated (ring bounds) and read, 64 bytes; the later packets of its message
    get the WQE from a memory with one entry per QP. An entry whose physical address is no multiple of 64 counts as
    unreadable. An error travels in ``wqe_error``. While a QP waits for a receive WQE all its jobs wait aside (`Parking`); those
    of other QPs pass.

    Timing: a job of a QP that does not wait passes in 6 cycles, one every 2 (a later packet of a SEND in 7, one every 3); the
    first packet of a SEND takes 8 cycles of this block in all, and any number of fetches are under way. Translations that need
    no page table are asked for first come, first served, those that do wait among themselves.

    Members: ``i`` Job, ``o`` FetchedJob streams; ``xlate`` (tag width ``tag_bits``), ``read`` clients; ``probe``
    (RECV_WQE_FETCHED).
    """

    @staticmethod
    def tag_bits(p: Params) -> int:
        return XlateJoin.width([p.cold_bits, FAST_BITS])

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(Job(p))),
            "o": Out(stream.Signature(FetchedJob(p))),
            "xlate": Out(XlateSignature(p, self.tag_bits(p))),
            "read": Out(DmaReadSignature(p)),
            "probe": Out(Probe()),
        })

    def elaborate(self, platform):
        p = self.p
        m = Module()
        slots = p.parking_slots
        ticket = Ticket(Job(p), 1, slots, p.qpn_bits)
        m.submodules.parking = parking = Parking(Job(p), ticket, slots, 1, p.num_qps)
        m.submodules.asks = self._asks = StreamFifo(_Ask(p), slots)
        m.submodules.failures = self._failures = StreamFifo(_Failure(p), slots)
        m.submodules.order = self._order = StreamFifo(range(slots), slots)  # of the reads under way
        # Receive WQEs, in halves: by QP those of the messages under way, above them by slot those that came for jobs that wait.
        self._rows = max(p.qpn_bits, (slots - 1).bit_length())
        m.submodules.wqes = self._wqes = memory.Memory(shape=_Half(), depth=2 * ((1 << self._rows) + slots), init=[],
                                                       attrs=NO_CLASH)
        self._keeps = Signal()  # the verdict writes `wqes` or `arrived`
        m.submodules.arrived = arrived = memory.Memory(shape=1, depth=slots, init=[])
        self._arrived_write = arrived.write_port()
        self._judged = Signal()  # the verdict writes `arrived`
        wiring.connect(m, wiring.flipped(self.i), parking.i)
        wiring.connect(m, parking.enter, parking.leave)
        m.d.comb += parking.i_barrier.eq(is_barrier(self.i.p))
        self._translate(m)
        write = self._wqes.write_port()
        self._words(m, parking, write)
        self._leave(m, parking, write, arrived.read_port())
        return m

    def _translate(self, m):
        """Ring entries: at first without waiting for a page table; those that need one once more, patiently."""
        p = self.p
        m.submodules.join = join = XlateJoin(p, [p.cold_bits, FAST_BITS])
        m.submodules.fast = fast = OrderedXlate(p, FAST_BITS, _Ask(p))
        m.submodules.patient = patient = OrderedXlate(p, p.cold_bits, _Ask(p))
        m.submodules.cold = cold = StreamFifo(_Ask(p), p.parking_slots)
        wiring.connect(m, patient.xlate, join.client_0)
        wiring.connect(m, fast.xlate, join.client_1)
        wiring.connect(m, join.xlate, wiring.flipped(self.xlate))
        for client, asks, hit_only in ((fast, self._asks, 1), (patient, cold, 0)):
            m.d.comb += [
                client.request.valid.eq(asks.o.valid),
                asks.o.ready.eq(client.request.ready),
                client.request.p.ring.eq(1),
                client.request.p.key.eq(p.tpt_rq_base + asks.o.p.qpn),
                client.request.p.va.eq(asks.o.p.va),
                client.request.p.length.eq(RECV_WQE.size),
                client.request.p.hit_only.eq(hit_only),
                client.request.p.meta.eq(asks.o.p),
            ]

        command, order, failure = self.read.command, self._order.i, self._failures.i
        m.submodules.reads = reads = HalfRegister(data.StructLayout({"address": 64, "length": 16}))
        wiring.connect(m, reads.o, wiring.flipped(command))
        turn = Signal()  # the patient one's answer is at hand
        answer = Signal(patient.response.payload.shape())
        valid, missed, outcome, aligned = Signal(), Signal(), Signal(VendorError), Signal()
        m.d.comb += [
            turn.eq(patient.response.valid),
            answer.eq(Mux(turn, Value.cast(patient.response.payload), Value.cast(fast.response.payload))),
            valid.eq((turn | fast.response.valid) & reads.i.ready),  # the others have room for every slot
            patient.response.ready.eq(turn & reads.i.ready),
            fast.response.ready.eq(~turn & reads.i.ready),
            missed.eq(~turn & (answer.status == XlateStatus.MISS)),
            aligned.eq(answer.address[:WQE_ALIGN] == 0),
            outcome.eq(Mux(answer.status == XlateStatus.OK, Mux(aligned, VendorError.NONE, VendorError.HOST_BUS),
                           vendor_of(answer.status))),
            cold.i.payload.eq(answer.meta),
            cold.i.valid.eq(valid & missed),
            reads.i.p.address.eq(answer.address),
            reads.i.p.length.eq(RECV_WQE.size),
            reads.i.valid.eq(valid & (answer.status == XlateStatus.OK) & aligned),
            order.payload.eq(answer.meta.slot),
            order.valid.eq(reads.i.valid),
            failure.p.slot.eq(answer.meta.slot),
            failure.p.error.eq(outcome),
            failure.valid.eq(valid & ~missed & ~reads.i.valid),
        ]
        for name, queue in (("cold", cold), ("order", self._order), ("failures", self._failures), ("asks", self._asks)):
            m.d.sync += Assert(~queue.i.valid | queue.i.ready, f"receive queue: {name} overflows")

    def _row(self, slot):
        """Where in `wqes` that of the job in ``slot`` is."""
        return Cat(slot, Const(0, self._rows - len(slot)), 1)

    def _words(self, m, parking, write):
        """A receive WQE has come, or will not: it is stored, its job called."""
        p = self.p
        words = 8 * RECV_WQE.size // p.data_width
        word, order, failure = self.read.word, self._order.o, self._failures.o
        half = Signal(HALF_BITS)  # the newest words
        error = Signal(VendorError)
        left = Signal(range(words + 1), init=words)  # words of the WQE still to come
        slot = Signal(range(p.parking_slots))
        arrives = Signal()
        m.d.comb += [
            write.addr.eq(Cat(1, self._row(slot))),
            write.data.wqe.eq(half),
            write.data.error.eq(error),
            write.en.eq(arrives),
            parking.wake.p.slot.eq(slot),
        ]
        with m.FSM(name="words"):
            with m.State("Idle"):
                m.d.sync += [error.eq(VendorError.NONE), left.eq(words)]
                with m.If(failure.valid):
                    m.d.comb += failure.ready.eq(1)
                    m.d.sync += [slot.eq(failure.p.slot), error.eq(failure.p.error)]
                    m.next = "Arrive"
                with m.Elif(order.valid):
                    m.d.comb += order.ready.eq(1)
                    m.d.sync += slot.eq(order.payload)
                    m.next = "Words"
            with m.State("Words"):
                m.d.comb += word.ready.eq(~self._keeps)
                with m.If(word.valid & word.ready):
                    with m.If(left == words - words // 2):  # the first half is complete
                        m.d.comb += [
                            write.en.eq(1), write.addr.eq(Cat(0, self._row(slot))),
                            write.data.wqe.eq(half if words > 1 else word.p.data[:HALF_BITS]),
                        ]  # fmt: skip
                    m.d.sync += [
                        half.eq(Cat(half, word.p.data)[-HALF_BITS:]),
                        left.eq(left - 1),
                        Assert((word.p.first == 0) & (word.p.count == p.lanes), "responder: receive WQE word is not aligned"),
                        Assert(word.p.last == (left == 1), "responder: receive WQE has a wrong number of words"),
                    ]
                    with m.If(word.p.err):
                        m.d.sync += error.eq(VendorError.HOST_BUS)
                    with m.If(word.p.last):
                        m.next = "Arrive"
            with m.State("Arrive"):
                # The WQE is there before the call.
                m.d.comb += [parking.wake.valid.eq(~self._keeps), arrives.eq(~self._keeps & parking.wake.ready)]
                with m.If(arrives):
                    m.next = "Idle"
        write_flag = self._arrived_write
        with m.If(~self._judged):
            m.d.comb += [write_flag.en.eq(arrives), write_flag.addr.eq(slot), write_flag.data.eq(1)]

    def _leave(self, m, parking, write, arrived):
        p = self.p
        read = self._wqes.read_port()
        # A job's second cycle has the first half at the memory's output, all later ones the second half.
        second, third = Signal(), Signal()
        first_half = Signal(HALF_BITS)
        whole = Signal()  # the WQE is there, or not needed
        keeps_second, keeps_qpn = Signal(), Signal(p.qpn_bits)
        m.submodules.out = out = HalfRegister(FetchedJob(p))
        wiring.connect(m, out.o, wiring.flipped(self.o))
        ticket = parking.o.p.job
        job = ticket.job
        goes, take, asks = Signal(), Signal(), Signal()
        there = Signal()  # the WQE of a job that was aside
        m.d.sync += there.eq(arrived.data)
        m.d.comb += [
            read.addr.eq(Cat(second, Mux(job.fetch, self._row(ticket.slot), job.qpn))),
            arrived.addr.eq(ticket.slot),
            whole.eq(third | (job.kind != JobKind.SEND)),
            self._keeps.eq((take & job.fetch) | keeps_second),
            parking.park.eq(job.fetch & ~(ticket.again & there)),
            goes.eq(~parking.blocked & ~parking.park),
            take.eq(parking.settled & ((out.i.ready & whole) | ~goes)),
            parking.o.ready.eq(take),
            asks.eq(take & job.fetch & ~ticket.again),
            self._asks.i.valid.eq(asks),
            self._asks.i.p.slot.eq(ticket.slot),
            self._asks.i.p.qpn.eq(job.qpn),
            self._asks.i.p.va.eq((job.index & ((1 << job.log_rq) - 1)[:16]) << WQE_ALIGN),
            self._judged.eq(asks),
            out.i.valid.eq(parking.settled & goes & whole),
            out.i.p.qpn.eq(job.qpn),
            out.i.p.job.eq(job),
            out.i.p.sges.as_value().eq(Cat(first_half, read.data.wqe)),
            out.i.p.wqe_error.eq(read.data.error),
            self.probe.valid.eq(take & goes & job.fetch),
            self.probe.event.eq(ProbeEvent.RECV_WQE_FETCHED),
            self.probe.qpn.eq(job.qpn),
            self.probe.index.eq(job.index),
            self.probe.psn.eq(job.psn),
        ]
        m.d.sync += [
            second.eq(parking.o.valid & ~take),
            third.eq(parking.o.valid & ~take & second),
            keeps_second.eq(take & goes & job.fetch),
            keeps_qpn.eq(job.qpn),
            Assert(~(keeps_second & second), "receive queue: the second half is not at hand any more"),
        ]
        with m.If(~third):
            m.d.sync += first_half.eq(read.data.wqe)
        with m.If(keeps_second):
            m.d.comb += [write.en.eq(1), write.addr.eq(Cat(1, keeps_qpn)), write.data.eq(read.data)]
        with m.Elif(take & job.fetch):
            m.d.comb += [write.en.eq(goes), write.addr.eq(Cat(0, job.qpn)), write.data.wqe.eq(first_half)]
        with m.If(self._judged):
            m.d.comb += [self._arrived_write.en.eq(1), self._arrived_write.addr.eq(ticket.slot), self._arrived_write.data.eq(0)]
