"""Answers to own requests, and the end of send WQEs: success, error, flush."""

from amaranth import *
from amaranth.lib import data, enum, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import COMPLETER_CFG, COMPLETER_HOT, CtxTable, QpState, VendorError, WcOpcode, WcStatus, WqeOpcode
from ..config import Params
from ..qp.table import ContextTable
from ..records import (
    CqeRequest,
    CtxBus,
    Outstanding,
    Probe,
    ProbeEvent,
    QpError,
    QpEvent,
    ResponseDesc,
    SendFailure,
    SqFlush,
)
from ..stream.arbiter import RoundRobin
from ..stream.fifo import StreamFifo
from ..wire.opcode import Opcode
from ..wire.syndrome import SYNDROME, AethType, NakCode

__all__ = ["Completer"]

_WC_OPCODES = {
    WqeOpcode.SEND: WcOpcode.SEND, WqeOpcode.SEND_IMM: WcOpcode.SEND, WqeOpcode.SEND_INV: WcOpcode.SEND,
    WqeOpcode.WRITE: WcOpcode.RDMA_WRITE, WqeOpcode.WRITE_IMM: WcOpcode.RDMA_WRITE, WqeOpcode.READ: WcOpcode.RDMA_READ,
    WqeOpcode.CMP_SWAP: WcOpcode.COMP_SWAP, WqeOpcode.FETCH_ADD: WcOpcode.FETCH_ADD,
    WqeOpcode.LOCAL_INV: WcOpcode.LOCAL_INV, WqeOpcode.BIND_MW: WcOpcode.BIND_MW,
}  # fmt: skip

_NAK_STATUS = {  # rules.md 7.4; without loss recovery a sequence NAK has no retry left
    NakCode.PSN_SEQUENCE: (WcStatus.RETRY_EXC_ERR, VendorError.NAK_SEQUENCE),
    NakCode.INVALID_REQUEST: (WcStatus.REM_INV_REQ_ERR, VendorError.REMOTE_NAK),
    NakCode.REMOTE_ACCESS: (WcStatus.REM_ACCESS_ERR, VendorError.REMOTE_NAK),
    NakCode.REMOTE_OPERATIONAL: (WcStatus.REM_OP_ERR, VendorError.REMOTE_NAK),
}


class JobKind(enum.Enum, shape=2):
    """What the completer works on."""

    RESPONSE = 0
    FAILURE = 1
    FLUSH = 2


class Completer(wiring.Component):
    """Retires send WQEs in post order (R-CQ-1, R-ERR-3).

    An ACK of PSN p retires every WQE whose last PSN is not after p, a NAK those that end before p (R-RSP-2); an answer outside
    [una, next PSN) is discarded (R-RSP-1). A NAK, or an RNR NAK, ends the WQE that contains p with the status of rules.md 7.4
    (there is no retry: every NAK is final). A `SendFailure` is kept until its WQE is the oldest (R-ERR-7), the older of two
    counts. After an error the QP is dead: ``qp_error`` goes out, later answers are ignored, and when the QP is in ERR a
    `SqFlush` ends every WQE up to its producer with WR_FLUSH_ERR. Success makes a CQE only when signaled, errors and flushes
    always do (R-ERR-1, R-ERR-4). A command's write of word 0 of COMPLETER_HOT gives a dead QP a new life.

    READ responses and ATOMIC ACKs fit no request of this requester: cells freed, ``bad_response``, as for reserved syndromes
    and PSNs never sent.

    Ports: ``response``, ``failure``, ``flush``; ``ctx`` (a write to the COMPLETER_HOT of the QP under work waits);
    ``remember_*``, write of the outstanding table; ``hot_addr`` / ``hot_psn``, ``hot_send_index`` 2-cycle read of the segmenter;
    ``done_index_addr`` / ``done_index``, ``una_addr`` / ``una`` 2-cycle read ports; ``cqe``; ``wake``, after WQEs were
    retired; ``qp_error``; ``free``, first packet-store cell of a response with payload; ``bad_response`` pulse; ``probe``
    (RESPONSE_IN), ``probe_retired`` (WQE_RETIRED, all endings).

    Timing: one answer that retires one WQE per 6 cycles, 3 for each further WQE, 1 per flushed WQE. A job gives way after
    ``TURN`` WQEs (an answer one later), unless another job of its kind did already or the next one is of the same QP. A full
    ``cqe`` stops this block alone.
    """

    TURN = 16

    def __init__(self, p: Params):
        self.p = p
        self.entry_bits = (p.num_qps * p.sq_outstanding - 1).bit_length()
        super().__init__({
            "response": In(stream.Signature(ResponseDesc(p))),
            "failure": In(stream.Signature(SendFailure(p))),
            "flush": In(stream.Signature(SqFlush(p))),
            "ctx": In(CtxBus(p)),
            "remember_en": In(1),
            "remember_index": In(self.entry_bits),
            "remember_data": In(Outstanding(p)),
            "hot_addr": Out(p.qpn_bits),
            "hot_psn": In(24),
            "hot_send_index": In(16),
            "done_index_addr": In(p.qpn_bits),
            "done_index": Out(16),
            "una_addr": In(p.qpn_bits),
            "una": Out(24),
            "cqe": Out(stream.Signature(CqeRequest(p))),
            "wake": Out(stream.Signature(QpEvent(p))),
            "qp_error": Out(stream.Signature(QpError(p))),
            "free": Out(stream.Signature(p.cell_bits)),
            "bad_response": Out(1),
            "probe": Out(Probe()),
            "probe_retired": Out(Probe()),
        })  # fmt: skip

    def elaborate(self, platform):
        p = self.p
        m = Module()
        self._job_shape = data.StructLayout({
            "kind": JobKind, "qpn": p.qpn_bits, "psn": 24, "opcode": 8, "syndrome": SYNDROME, "index": 16, "status": WcStatus,
            "vendor_err": VendorError,
        })  # fmt: skip
        self._failed_shape = data.StructLayout({
            "dead": 1, "pending": 1, "index": 16, "status": WcStatus, "vendor_err": VendorError,
        })  # fmt: skip
        m.submodules.cfg = self._cfg = ContextTable(p, CtxTable.COMPLETER_CFG, COMPLETER_CFG, p.num_qps)
        m.submodules.hot = self._table = ContextTable(p, CtxTable.COMPLETER_HOT, COMPLETER_HOT, p.num_qps, read_ports=3,
                                                      engine_writes=True)  # fmt: skip
        m.submodules.failed = failed = memory.Memory(shape=self._failed_shape, depth=p.num_qps, init=[])
        m.submodules.outstanding = outstanding = memory.Memory(shape=Outstanding(p), depth=p.num_qps * p.sq_outstanding,
                                                               init=[])  # fmt: skip
        m.submodules.errors = self._errors = StreamFifo(QpError(p), p.num_qps)
        wiring.connect(m, self._errors.o, wiring.flipped(self.qp_error))
        self._failed_read, self._failed_write = failed.read_port(), failed.write_port()
        self._entry_read = outstanding.read_port()
        remember = outstanding.write_port()
        m.d.comb += [
            remember.en.eq(self.remember_en),
            remember.addr.eq(self.remember_index),
            remember.data.eq(self.remember_data),
            self._table.read_index_1.eq(self.done_index_addr),
            self.done_index.eq(self._table.read_1.done_index),
            self._table.read_index_2.eq(self.una_addr),
            self.una.eq(self._table.read_2.una),
        ]
        self._job = Signal(self._job_shape, name="job")
        self._working = Signal(name="working")
        self._idle = Signal(name="idle")
        self._start = Signal(name="start")
        self._next = Signal(self._job_shape, name="next_job")  # chosen while the one before is worked on
        self._next_valid = Signal(name="next_valid")
        self._again = {kind: Signal(self._job_shape, name=f"again_{kind.name.lower()}")
                       for kind in (JobKind.RESPONSE, JobKind.FLUSH)}  # fmt: skip
        self._again_valid = {kind: Signal(name=f"again_{kind.name.lower()}_valid") for kind in self._again}
        self._elaborate_ctx(m)
        self._elaborate_choice(m)
        self._elaborate_work(m)
        return m

    def _elaborate_ctx(self, m):
        """A command's write must not fall between the read and the write of a QP under work, or meet a job of its old life."""
        bus = self.ctx.payload
        is_hot, hold, clear = Signal(), Signal(), Signal()
        self._failed_set = Signal(name="failed_set")
        same = [self._again_valid[kind] & (bus.index == self._again[kind].qpn) for kind in self._again]
        same += [
            self._working & (bus.index == self._job.qpn), self._next_valid & (bus.index == self._next.qpn), self._failed_set,
        ]  # fmt: skip
        m.d.comb += [
            is_hot.eq(bus.table == CtxTable.COMPLETER_HOT),
            hold.eq(is_hot & Cat(same).any()),
            self._cfg.ctx.payload.eq(bus),
            self._cfg.ctx.valid.eq(self.ctx.valid),
            self._table.ctx.payload.eq(bus),
            self._table.ctx.valid.eq(self.ctx.valid & ~hold),
            self.ctx.ready.eq(self._cfg.ctx.ready & self._table.ctx.ready & ~hold),
            clear.eq(self.ctx.valid & self.ctx.ready & is_hot & (bus.word == 0)),
        ]
        with m.If(clear):
            m.d.comb += [self._failed_write.en.eq(1), self._failed_write.addr.eq(bus.index)]

    def _elaborate_choice(self, m):
        """Whose job is next: round robin over the inputs and the jobs that gave way."""
        m.submodules.turn = turn = RoundRobin(5)
        r, f, s = self.response, self.failure, self.flush
        again, waits = self._again, self._again_valid
        response_held, free_ready, take = Signal(), Signal(), Signal()
        chosen = Signal(self._job_shape)
        m.d.comb += [
            free_ready.eq(~self.free.valid | self.free.ready),
            # An answer must not overtake one of the same QP that gave way.
            response_held.eq(waits[JobKind.RESPONSE] & (again[JobKind.RESPONSE].qpn == r.payload.qpn)),
            turn.requests.eq(Cat(
                r.valid & ~response_held & free_ready, f.valid, s.valid & ~waits[JobKind.FLUSH],
                waits[JobKind.RESPONSE], waits[JobKind.FLUSH],
            )),
            self._start.eq(self._idle & self._next_valid),
            take.eq(turn.requests.any() & (~self._next_valid | self._start)),
            turn.advance.eq(take),
            r.ready.eq(take & (turn.grant == 0)),
            f.ready.eq(take & (turn.grant == 1)),
            s.ready.eq(take & (turn.grant == 2)),
        ]  # fmt: skip
        with m.If(self._start):
            m.d.sync += [self._next_valid.eq(0), self._job.eq(self._next)]
        with m.If(take):
            m.d.sync += [self._next_valid.eq(1), self._next.eq(chosen)]
        with m.Switch(turn.grant):
            with m.Case(0):
                m.d.comb += [
                    chosen.kind.eq(JobKind.RESPONSE), chosen.qpn.eq(r.payload.qpn), chosen.psn.eq(r.payload.psn),
                    chosen.opcode.eq(r.payload.opcode), Value.cast(chosen.syndrome).eq(r.payload.syndrome),
                ]  # fmt: skip
            with m.Case(1):
                m.d.comb += [
                    chosen.kind.eq(JobKind.FAILURE), chosen.qpn.eq(f.payload.qpn), chosen.index.eq(f.payload.wqe_index),
                    chosen.status.eq(f.payload.status), chosen.vendor_err.eq(f.payload.vendor_err),
                ]  # fmt: skip
            with m.Case(2):
                m.d.comb += [
                    chosen.kind.eq(JobKind.FLUSH), chosen.qpn.eq(s.payload.qpn), chosen.index.eq(s.payload.producer),
                ]  # fmt: skip
            with m.Case(3):
                m.d.comb += chosen.eq(again[JobKind.RESPONSE])
            with m.Case(4):
                m.d.comb += chosen.eq(again[JobKind.FLUSH])
        for grant, kind in ((3, JobKind.RESPONSE), (4, JobKind.FLUSH)):
            with m.If(take & (turn.grant == grant)):
                m.d.sync += waits[kind].eq(0)
        with m.If(self.free.ready):
            m.d.sync += self.free.valid.eq(0)
        with m.If(r.ready & (r.payload.length != 0)):
            m.d.sync += [self.free.valid.eq(1), self.free.payload.eq(r.payload.head)]
        m.d.sync += [
            self.probe.valid.eq(r.ready),
            self.probe.event.eq(ProbeEvent.RESPONSE_IN),
            self.probe.qpn.eq(r.payload.qpn),
            self.probe.psn.eq(r.payload.psn),
            self.probe.opcode.eq(r.payload.syndrome),
        ]

    def _elaborate_work(self, m):
        p = self.p
        job, table, cfg_table = self._job, self._table, self._cfg
        entry_bits = (p.sq_outstanding - 1).bit_length()
        qpn_now = Signal(p.qpn_bits)
        cfg = Signal(COMPLETER_CFG.layout, name="cfg_now")
        hot = Signal(COMPLETER_HOT.layout, name="hot_now")
        failed = Signal(self._failed_shape, name="failed_now")
        failed_read = Signal(self._failed_shape)
        entry = Signal(Outstanding(p))
        index, next_index, send_index = Signal(16), Signal(16), Signal(16)  # counter of the WQE looked at, and + 1
        ahead, span = Signal(24), Signal(24)  # from una: PSN of the answer, next PSN
        flush_left, age, failed_age = Signal(16), Signal(16), Signal(16)
        retired = Signal(range(self.TURN + 1))
        progress = Signal()
        give_way = Signal()  # the turn is over, there is a slot to wait in, and no job of this QP would overtake
        m.d.comb += [
            qpn_now.eq(Mux(self._idle, self._next.qpn, job.qpn)),
            cfg_table.read_index_0.eq(qpn_now),
            table.read_index_0.eq(qpn_now),
            self._failed_read.addr.eq(qpn_now),
            self.hot_addr.eq(qpn_now),
        ]
        m.d.sync += failed_read.eq(self._failed_read.data)
        slot_taken = Mux(job.kind == JobKind.FLUSH, self._again_valid[JobKind.FLUSH], self._again_valid[JobKind.RESPONSE])
        m.d.comb += give_way.eq((retired == self.TURN) & ~slot_taken & ~(self._next_valid & (self._next.qpn == job.qpn)))

        # ---- output registers
        cqe_free, wake_free = Signal(), Signal()
        m.d.comb += [cqe_free.eq(~self.cqe.valid | self.cqe.ready), wake_free.eq(~self.wake.valid | self.wake.ready)]
        with m.If(self.cqe.ready):
            m.d.sync += self.cqe.valid.eq(0)
        with m.If(self.wake.ready):
            m.d.sync += self.wake.valid.eq(0)
        m.d.sync += [self.bad_response.eq(0), self.probe_retired.valid.eq(0), self.probe_retired.event.eq(ProbeEvent.WQE_RETIRED)]

        def finish(done, una):
            """End of the job, or of its turn: write what changed, wake the scheduler if there is room again."""
            m.d.comb += [
                table.write_en.eq(1),
                table.write_data.eq(hot),
                table.write_data.done_index.eq(done),
                table.write_data.una.eq(una),
            ]
            m.next = "IDLE"

        def wake():
            m.d.sync += [self.wake.valid.eq(1), self.wake.payload.qpn.eq(job.qpn)]

        wc_opcode = Signal(WcOpcode)
        with m.Switch(entry.opcode):
            for operation, code in _WC_OPCODES.items():
                with m.Case(operation):
                    m.d.comb += wc_opcode.eq(code)

        def report(status, vendor_err, *, opcode=wc_opcode, byte_len=0, make_cqe=1):
            """The end of WQE ``index``, with a CQE or without."""
            m.d.sync += [
                self.cqe.valid.eq(make_cqe),
                self.cqe.payload.cqn.eq(cfg.cqn),
                self.cqe.payload.qpn.eq(job.qpn),
                self.cqe.payload.wqe_counter.eq(index),
                self.cqe.payload.opcode.eq(opcode),
                self.cqe.payload.status.eq(status),
                self.cqe.payload.vendor_err.eq(vendor_err),
                self.cqe.payload.byte_len.eq(byte_len),
                self.probe_retired.valid.eq(1),
                self.probe_retired.qpn.eq(job.qpn),
                self.probe_retired.index.eq(index),
                self.probe_retired.opcode.eq(status),
                index.eq(next_index),
                next_index.eq(next_index + 1),
                retired.eq(Mux(retired == self.TURN, self.TURN, retired + 1)),
            ]

        # ---- what the answer says
        is_ack, is_nak, known = Signal(), Signal(), Signal()
        error_status, error_vendor = Signal(WcStatus), Signal(VendorError)  # why WQE `index` fails
        nak_status, nak_vendor = Signal(WcStatus), Signal(VendorError)
        syndrome = job.syndrome
        with m.If(job.opcode == Opcode.RC_ACK.value):
            with m.If(syndrome.type == AethType.ACK):
                m.d.comb += is_ack.eq(1)
            with m.If(syndrome.type == AethType.RNR_NAK):
                m.d.comb += [
                    is_nak.eq(1), nak_status.eq(WcStatus.RNR_RETRY_EXC_ERR), nak_vendor.eq(VendorError.RNR),
                ]  # fmt: skip
            with m.If(syndrome.type == AethType.NAK):
                with m.Switch(syndrome.value):
                    for code, (status, vendor) in _NAK_STATUS.items():
                        with m.Case(code):
                            m.d.comb += [is_nak.eq(1), nak_status.eq(status), nak_vendor.eq(vendor)]
        running, in_window, ghost, alive = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            known.eq(is_ack | is_nak),
            running.eq((cfg.state == QpState.RTS) | (cfg.state == QpState.SQD)),
            alive.eq(running & ~failed.dead),
            in_window.eq(ahead < span),  # R-RSP-1
            ghost.eq(~in_window & ~ahead[-1]),
        ]
        # ---- the WQE looked at against the answer
        distance = Signal(24)
        covered, exact, exists, failed_here, failed_next = (
            Signal(name=n) for n in ("covered", "exact", "exists", "failed_here", "failed_next"))  # fmt: skip
        m.d.comb += distance.eq(job.psn - entry.last_psn)

        with m.FSM(name="complete") as fsm:
            m.d.comb += [self._idle.eq(fsm.ongoing("IDLE")), self._working.eq(~fsm.ongoing("IDLE"))]
            with m.State("IDLE"):
                with m.If(self._start):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += [retired.eq(0), progress.eq(0)]
                m.next = "CONTEXT"
            with m.State("CONTEXT"):
                now = table.read_0
                m.d.comb += self._entry_read.addr.eq(Cat(now.done_index[:entry_bits], job.qpn))
                m.d.sync += [
                    cfg.eq(cfg_table.read_0),
                    hot.eq(now),
                    failed.eq(failed_read),
                    index.eq(now.done_index),
                    next_index.eq(now.done_index + 1),
                    send_index.eq(self.hot_send_index),
                    ahead.eq(job.psn - now.una),
                    span.eq(self.hot_psn - now.una),
                    flush_left.eq(job.index - now.done_index),
                    age.eq(job.index - now.done_index),
                    failed_age.eq(failed_read.index - now.done_index),
                ]
                m.next = "DECIDE"
            with m.State("DECIDE"):
                m.d.sync += [
                    entry.eq(self._entry_read.data),
                    error_status.eq(Mux(job.kind == JobKind.FAILURE, job.status, nak_status)),
                    error_vendor.eq(Mux(job.kind == JobKind.FAILURE, job.vendor_err, nak_vendor)),
                ]
                m.next = "IDLE"
                with m.Switch(job.kind):
                    with m.Case(JobKind.RESPONSE):
                        m.d.sync += self.bad_response.eq(alive & (~known | ghost))
                        with m.If(alive & known & in_window):
                            m.next = "LOOK"
                    with m.Case(JobKind.FAILURE):
                        with m.If(alive & (age == 0)):
                            m.next = "ERROR"
                        with m.Elif(alive & ~age[-1] & (~failed.pending | (age < failed_age))):
                            m.next = "KEEP"  # R-ERR-7: not before its turn
                    with m.Case(JobKind.FLUSH):
                        with m.If((cfg.state == QpState.ERR) & (~flush_left[-1] | (flush_left[:-1] == 0))):
                            m.next = "FLUSH"
            with m.State("KEEP"):
                m.d.comb += [
                    self._failed_set.eq(1),
                    self._failed_write.data.pending.eq(1),
                    self._failed_write.data.index.eq(job.index),
                    self._failed_write.data.status.eq(job.status),
                    self._failed_write.data.vendor_err.eq(job.vendor_err),
                ]
                m.next = "IDLE"
            with m.State("LOOK"):
                m.d.sync += [
                    exact.eq(distance == 0),
                    covered.eq(~distance[-1] & (is_ack | (distance != 0))),
                    exists.eq(index != send_index),
                    failed_here.eq(failed.pending & (failed.index == index)),
                    failed_next.eq(failed.pending & (failed.index == next_index)),
                ]
                m.next = "RETIRE"
            with m.State("FETCH"):
                m.d.sync += entry.eq(self._entry_read.data)
                m.next = "LOOK"
            with m.State("RETIRE"):
                m.d.comb += self._entry_read.addr.eq(Cat(next_index[:entry_bits], job.qpn))
                with m.If(failed_here):
                    m.d.sync += [error_status.eq(failed.status), error_vendor.eq(failed.vendor_err)]
                    m.next = "ERROR"
                with m.Elif(covered & exists):  # R-RSP-2
                    with m.If(cqe_free & wake_free):
                        report(WcStatus.SUCCESS, VendorError.NONE, byte_len=entry.length, make_cqe=entry.signaled)  # R-CQ-1
                        m.d.sync += [progress.eq(1), hot.una.eq(entry.last_psn + 1)]
                        m.next = "FETCH"
                        with m.If(is_ack & exact & ~failed_next):
                            finish(next_index, job.psn + 1)
                            wake()
                        with m.Elif(give_way):
                            m.next = "GIVE_WAY"
                with m.Elif(is_nak):
                    m.next = "ERROR"
                with m.Elif(wake_free):
                    finish(index, job.psn + 1)
                    with m.If(progress):
                        wake()
            with m.State("ERROR"):
                with m.If(cqe_free & self._errors.i.ready):
                    report(error_status, error_vendor)  # R-ERR-1
                    finish(next_index, hot.una)
                    m.d.comb += [
                        self._failed_set.eq(1),
                        self._failed_write.data.dead.eq(1),
                        self._errors.i.valid.eq(1),
                    ]
            with m.State("FLUSH"):
                with m.If(flush_left == 0):
                    finish(index, hot.una)
                with m.Elif(give_way):
                    m.next = "GIVE_WAY"
                with m.Elif(cqe_free):
                    report(WcStatus.WR_FLUSH_ERR, VendorError.NONE, opcode=WcOpcode.SEND)  # R-ERR-2, R-ERR-3, R-ERR-4
                    m.d.sync += flush_left.eq(flush_left - 1)
            with m.State("GIVE_WAY"):
                with m.If(wake_free):
                    finish(index, hot.una)
                    for kind, slot in self._again.items():
                        with m.If(job.kind == kind):
                            m.d.sync += [slot.eq(job), self._again_valid[kind].eq(1)]
                    with m.If(progress):
                        wake()
        m.d.comb += [
            table.write_index.eq(job.qpn),
            table.write_words.eq(~0),
            self._errors.i.payload.qpn.eq(job.qpn),
        ]
        with m.If(self._failed_set):
            m.d.comb += [self._failed_write.en.eq(1), self._failed_write.addr.eq(job.qpn)]
