"""Answers to own requests, and the end of send WQEs: success, error, flush."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import COMPLETER_CFG, COMPLETER_HOT, CtxTable, QpState, VendorError, WcOpcode, WcStatus, WqeOpcode
from ..clash import NO_CLASH
from ..config import Params
from ..qp.table import ContextTable
from ..records import (
    CqeRequest,
    CtxBus,
    LandJob,
    LandResult,
    LandTag,
    Outstanding,
    Probe,
    ProbeEvent,
    QpError,
    QpEvent,
    ReadEntry,
    ResponseDesc,
    SendFailure,
    SqFlush,
)
from ..stream.fifo import StreamFifo
from ..wire.syndrome import SYNDROME
from .complete_parts import CompleterParts, JobKind
from .response_check import ResponseCheck

__all__ = ["Completer"]

_READS = (WqeOpcode.READ, WqeOpcode.CMP_SWAP, WqeOpcode.FETCH_ADD)


class Completer(CompleterParts):
    """Retires send WQEs in post order (R-CQ-1, R-ERR-3).

    An ACK of PSN p acknowledges every SEND and WRITE whose last PSN is not after p, a NAK or a response with data those that
    end before p (R-RSP-2); an answer outside [una, next PSN) is discarded (R-RSP-1). READs and ATOMICs are answered by their
    own responses only, in order (`ResponseCheck`, R-RSP-3..6); una advances with every response (R-RSP-7). Accepted data goes
    out on ``land``; the READ or ATOMIC is retired when its last landing is through, all write responses included (R-ORD-2,
    R-ORD-5), and counts as outstanding until then. The packet-store cells of every other response are freed.

    A NAK, an RNR NAK, an implied NAK or a response that does not fit ends the WQE that contains p (there is no retry: every
    NAK is final). A `SendFailure` is kept until its WQE is the oldest (R-ERR-7), the older of two counts. A landing that
    fails ends its READ or ATOMIC (R-RSP-8). After an error the QP is dead: ``qp_error`` goes out, later answers are ignored,
    and when the QP is in ERR a `SqFlush` ends every WQE up to its producer with WR_FLUSH_ERR. Errors of READs and flushes go
    once through the landing street first: no data is on its way to a buffer whose WQE has ended. Success makes a CQE only when
    signaled, errors and flushes always do (R-ERR-1, R-ERR-4). A command's write of word 0 of COMPLETER_HOT gives a dead QP a
    new life. ``bad_response``: reserved syndromes, PSNs never sent.

    Ports: ``response``, ``failure``, ``flush``; ``land``, ``landed``; ``ctx`` (a write to the COMPLETER_HOT of the QP under work
    waits); ``remember_*``, write of the outstanding table; ``read_*`` write of the read table; ``hot_addr`` / ``hot_psn``,
    ``hot_send_index``, ``hot_reads`` 2-cycle read of the segmenter; ``done_index_addr`` / ``done_index``, ``una_addr`` / ``una``,
    ``landed_count`` 2-cycle read ports; ``cqe``; ``wake``, after WQEs were retired; ``qp_error``; ``free``, first
    packet-store cell of a response not landed; ``bad_response`` pulse; ``probe`` (RESPONSE_IN), ``probe_retired`` (WQE_RETIRED).

    Timing: one answer that retires one WQE per 6 cycles, 3 more while READs are unanswered, 3 for each further WQE, and 3 for
    each further ACK of the same QP that waits behind and goes on where this one ends; a response with data 7 cycles and its
    last landing 5; 2 per flushed WQE. A job gives way after ``TURN`` WQEs, unless another did
    already or the next one is of the same QP. A full ``cqe`` stops this block alone. ``landed`` never waits: at most
    ``results_depth`` landings are under way.
    """

    TURN = 16

    def __init__(self, p: Params):
        self.p = p
        self.entry_bits = (p.num_qps * p.sq_outstanding - 1).bit_length()
        self.read_bits = (p.num_qps * p.max_rd_atomic - 1).bit_length()
        self.results_depth = 4 * p.desc_depth  # what the landing street holds
        super().__init__({
            "response": In(stream.Signature(ResponseDesc(p))),
            "failure": In(stream.Signature(SendFailure(p))),
            "flush": In(stream.Signature(SqFlush(p))),
            "land": Out(stream.Signature(LandJob(p))),
            "landed": In(stream.Signature(LandResult(p))),
            "ctx": In(CtxBus(p)),
            "remember_en": In(1),
            "remember_index": In(self.entry_bits),
            "remember_data": In(Outstanding(p)),
            "read_en": In(1),
            "read_index": In(self.read_bits),
            "read_data": In(ReadEntry(p)),
            "hot_addr": Out(p.qpn_bits),
            "hot_psn": In(24),
            "hot_send_index": In(16),
            "hot_reads": In(8),
            "done_index_addr": In(p.qpn_bits),
            "done_index": Out(16),
            "una_addr": In(p.qpn_bits),
            "una": Out(24),
            "landed_count": Out(8),
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
            "vendor_err": VendorError, "head": p.cell_bits, "length": 13, "original": 64, "credit": 1,
            "plain_ack": 1,
        })  # fmt: skip
        self._failed_shape = data.StructLayout({
            "dead": 1, "pending": 1,
            "by_una": 1,  # the first WQE not acknowledged fails, else WQE `index`
            "closed": 1,  # no answer counts any more
            "index": 16, "status": WcStatus, "vendor_err": VendorError,
        })  # fmt: skip
        m.submodules.cfg = self._cfg = ContextTable(p, CtxTable.COMPLETER_CFG, COMPLETER_CFG, p.num_qps)
        m.submodules.hot = self._table = ContextTable(p, CtxTable.COMPLETER_HOT, COMPLETER_HOT, p.num_qps, read_ports=3,
                                                      engine_writes=True, exclusive=True)  # fmt: skip
        m.submodules.failed = failed = memory.Memory(shape=self._failed_shape, depth=p.num_qps, init=[])
        m.submodules.outstanding = outstanding = memory.Memory(shape=Outstanding(p), depth=p.num_qps * p.sq_outstanding,
                                                               init=[], attrs=NO_CLASH)  # fmt: skip
        m.submodules.reads = reads = memory.Memory(shape=ReadEntry(p), depth=p.num_qps * p.max_rd_atomic, init=[], attrs=NO_CLASH)
        m.submodules.errors = self._errors = StreamFifo(QpError(p), p.num_qps)
        result_shape = data.StructLayout({
            "kind": JobKind, "news": 1, "qpn": p.qpn_bits, "index": 16, "status": WcStatus, "vendor_err": VendorError,
        })  # fmt: skip
        m.submodules.results = self._results = StreamFifo(result_shape, self.results_depth)
        m.submodules.check = self._check = ResponseCheck(p)
        wiring.connect(m, self._errors.o, wiring.flipped(self.qp_error))
        self._failed_read, self._failed_write = failed.read_port(), failed.write_port()
        self._entry_read, self._reads_read = outstanding.read_port(), reads.read_port()
        remember, remember_read = outstanding.write_port(), reads.write_port()
        m.d.comb += [
            remember.en.eq(self.remember_en),
            remember.addr.eq(self.remember_index),
            remember.data.eq(self.remember_data),
            remember_read.en.eq(self.read_en),
            remember_read.addr.eq(self.read_index),
            remember_read.data.eq(self.read_data),
            self._table.read_index_1.eq(self.done_index_addr),
            self.done_index.eq(self._table.read_1.done_index),
            self._table.read_index_2.eq(self.una_addr),
            self.una.eq(self._table.read_2.una),
            self.landed_count.eq(self._table.read_2.landed),
        ]
        m.d.sync += Assert(~self.landed.valid | self.landed.ready, Format("Completer: more landings than {}", self.results_depth))
        self._job = Signal(self._job_shape, name="job")
        self._working = Signal(name="working")
        self._idle = Signal(name="idle")
        self._start = Signal(name="start")
        self._next = Signal(self._job_shape, name="next_job")  # chosen while the one before is worked on
        self._next_valid = Signal(name="next_valid")
        self._again_qpn = Signal(p.qpn_bits, name="again_qpn")  # a SWEEP that gave way
        self._again_valid = Signal(name="again_valid")
        self._credit = Signal(name="credit")  # the job may yet start a landing
        self._take = Signal(name="take")
        self._giving_way = Signal(name="giving_way")
        self._absorb = Signal(name="absorb")  # the next job is an ACK that only moves the job's limit
        self._owes_free = Signal(name="owes_free")  # the job's packet-store cells have no new owner
        self._elaborate_ctx(m)
        self._elaborate_results(m)
        self._elaborate_choice(m)
        self._elaborate_work(m)
        return m

    def _elaborate_work(self, m):
        p = self.p
        job, table, cfg_table, check = self._job, self._table, self._cfg, self._check
        entry_bits = (p.sq_outstanding - 1).bit_length()
        qpn_now = Signal(p.qpn_bits)
        cfg = Signal(COMPLETER_CFG.layout, name="cfg_now")
        hot = Signal(COMPLETER_HOT.layout, name="hot_now")
        failed = Signal(self._failed_shape, name="failed_now")
        failed_read = Signal(self._failed_shape)
        entry, read = Signal(Outstanding(p), name="entry"), Signal(ReadEntry(p), name="read_entry")
        # counter of the WQE looked at, and + 1; of the next WQE to be sent
        index, next_index, send_index = (Signal(16, name=n) for n in ("index", "next_index", "send_index"))
        ahead, span = Signal(24, name="ahead"), Signal(24, name="span")  # from una: PSN of the answer, next PSN
        limit = Signal(24)  # newest PSN that is acknowledged
        reads_open = Signal()  # a READ or ATOMIC is not fully answered
        unlanded = Signal()  # data of a READ or ATOMIC may be on its way to memory
        flush_left, age, failed_age = (Signal(16, name=n) for n in ("flush_left", "age", "failed_age"))
        flush_done = Signal()  # a cycle late; no CQE leaves in the cycle behind another
        m.d.sync += flush_done.eq((flush_left == 0) | (flush_left > 1 << 15))  # a late flush of what is retired
        known = Signal(name="known")
        retired = Signal(range(self.TURN + 1))
        progress = Signal()
        give_way = Signal()  # the turn is over, there is a place to wait in, and no job of this QP would overtake
        m.d.comb += [
            qpn_now.eq(Mux(self._idle, self._next.qpn, job.qpn)),
            cfg_table.read_index_0.eq(qpn_now),
            table.read_index_0.eq(qpn_now),
            self._failed_read.addr.eq(qpn_now),
            self.hot_addr.eq(qpn_now),
            give_way.eq((retired == self.TURN) & (~self._again_valid | (job.kind == JobKind.FLUSH_NOW))
                        & ~(self._next_valid & (self._next.qpn == job.qpn))),
            check.opcode.eq(job.opcode),
            check.syndrome.eq(job.syndrome),
            check.length.eq(job.length),
            check.ahead.eq(ahead),
            check.una.eq(hot.una),
            check.open.eq(reads_open),
            check.entry.eq(read),
            check.received.eq(hot.received),
            check.path_mtu.eq(cfg.path_mtu),
        ]
        m.d.sync += failed_read.eq(self._failed_read.data)

        # ---- output registers
        cqe_free, wake_free, land_free = Signal(), Signal(), Signal()
        for port, free in ((self.cqe, cqe_free), (self.wake, wake_free), (self.land, land_free)):
            m.d.comb += free.eq(~port.valid)
            with m.If(port.ready):
                m.d.sync += port.valid.eq(0)
        m.d.sync += [self.bad_response.eq(0), self.probe_retired.valid.eq(0), self.probe_retired.event.eq(ProbeEvent.WQE_RETIRED)]

        def finish(done, **changes):
            """End of the job, or of its turn: write what changed."""
            m.d.comb += [
                table.write_en.eq(1),
                table.write_data.eq(hot),
                table.write_data.done_index.eq(done),
                table.write_data.una.eq(limit + 1),
                *(table.write_data[name].eq(value) for name, value in changes.items()),
            ]
            m.next = "IDLE"

        def wake():
            m.d.sync += [self.wake.valid.eq(1), self.wake.payload.qpn.eq(job.qpn)]

        def start_landing(tag, of, length):
            """The job's credit and packet-store cells go with it."""
            land = self.land.payload
            m.d.sync += [
                self.land.valid.eq(1), self._credit.eq(0),
                land.qpn.eq(job.qpn), land.tag.eq(tag), land.psn.eq(job.psn), land.pd.eq(cfg.pd), land.index.eq(of),
                land.head.eq(job.head), land.length.eq(length), land.offset.eq(hot.received), land.value.eq(job.original),
                land.immediate.eq(is_atomic), land.sges.eq(read.sges),
            ]  # fmt: skip

        wc_opcode = self._wc_opcode(m, entry.opcode)

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

        is_ack, is_nak, is_data, is_atomic, nak_status, nak_vendor = self._elaborate_answer(m)
        error_status, error_vendor = Signal(WcStatus), Signal(VendorError)  # why a WQE fails
        running, in_window, ghost, alive, listens, from_response = (
            Signal(name=n) for n in ("running", "in_window", "ghost", "alive", "listens", "from_response"))  # fmt: skip
        m.d.comb += [
            known.eq(is_ack | is_nak | is_data),
            running.eq((cfg.state == QpState.RTS) | (cfg.state == QpState.SQD)),  # R-QP-2, R-QP-5
            alive.eq(running & ~failed.dead),  # R-ERR-3
            listens.eq(alive & ~failed.closed),
            in_window.eq(ahead < span),  # R-RSP-1
            ghost.eq(~in_window & ~ahead[-1]),  # R-RSP-1
            from_response.eq(job.kind == JobKind.RESPONSE),
        ]
        # ---- the WQE looked at against what is acknowledged
        distance = Signal(24)
        exists, covered, is_read = Signal(), Signal(), Signal()
        certain = Signal()  # the WQE's landing says it is done
        m.d.comb += [
            distance.eq(limit - entry.last_psn),
            exists.eq(index != send_index),
            covered.eq(exists & ~distance[-1]),  # R-RSP-2, R-PSN-2
            is_read.eq(Cat(entry.opcode == code for code in _READS).any()),  # R-RSP-3
        ]
        # ... registered: to be retired, last one that is, acknowledged, not acknowledged while an answer failed it
        retire_now, exact, lies_behind, failed_by_una, failed_here, failed_next = (
            Signal(name=n)
            for n in ("retire_now", "exact", "lies_behind", "failed_by_una", "failed_here", "failed_next"))  # fmt: skip
        # ---- the next job, where it is an ACK of the same QP that goes on where this one ends
        absorbable = Signal()
        after_limit, before_end = Signal(24), Signal(24)
        m.d.comb += [
            after_limit.eq(limit - self._next.psn),
            before_end.eq(self._next.psn - self.hot_psn),  # R-RSP-1
        ]
        m.d.sync += absorbable.eq(
            self._next_valid & self._next.plain_ack & (self._next.qpn == job.qpn) & after_limit[-1] & before_end[-1]
            & is_ack & from_response & (self.hot_reads == hot.answered) & ~failed.pending & ~self._absorb & ~self._idle)

        with m.FSM(name="complete") as fsm:
            m.d.comb += [self._idle.eq(fsm.ongoing("IDLE")), self._working.eq(~fsm.ongoing("IDLE"))]
            with m.State("IDLE"):
                with m.If(self._start):
                    m.next = "WAIT"
            with m.State("WAIT"):
                m.d.sync += [retired.eq(0), progress.eq(0), certain.eq(0)]
                m.next = "CONTEXT"
            with m.State("CONTEXT"):
                now = table.read_0
                m.d.comb += [
                    self._entry_read.addr.eq(Cat(now.done_index[:entry_bits], job.qpn)),
                    self._reads_read.addr.eq(Cat(now.answered[: (p.max_rd_atomic - 1).bit_length()], job.qpn)),
                ]
                m.d.sync += [
                    cfg.eq(cfg_table.read_0),
                    hot.eq(now),
                    failed.eq(failed_read),
                    index.eq(now.done_index),
                    next_index.eq(now.done_index + 1),
                    send_index.eq(self.hot_send_index),
                    ahead.eq(job.psn - now.una),
                    span.eq(self.hot_psn - now.una),
                    limit.eq(Mux(from_response, job.psn, now.una) - ~(from_response & is_ack)),  # R-RSP-2
                    reads_open.eq(self.hot_reads != now.answered),  # R-RSP-3
                    unlanded.eq((now.answered != now.landed) | (now.received != 0)),
                    flush_left.eq(job.index - now.done_index),
                    age.eq(job.index - now.done_index),
                    failed_age.eq(failed_read.index - now.done_index),
                ]
                m.next = "DECIDE"
            with m.State("DECIDE"):
                m.d.sync += [
                    entry.eq(self._entry_read.data),
                    read.eq(self._reads_read.data),
                    error_status.eq(Mux(from_response, nak_status, job.status)),
                    error_vendor.eq(Mux(from_response, nak_vendor, job.vendor_err)),
                ]
                m.next = "IDLE"
                with m.Switch(job.kind):
                    with m.Case(JobKind.RESPONSE):
                        m.d.sync += self.bad_response.eq(listens & (~known | ghost))
                        with m.If(listens & known & in_window):
                            m.d.sync += hot.more.eq(hot.more | (is_ack & (hot.answered != hot.landed)))
                            m.next = "LOOK"
                            with m.If(reads_open | is_data):
                                m.next = "MEASURE"
                            with m.Elif(is_nak):
                                m.next = "MARK"
                    with m.Case(JobKind.FAILURE):
                        with m.If(listens & (age == 0)):
                            m.next = "ERROR"
                        with m.Elif(listens & ~age[-1] & (~failed.pending | (age < failed_age))):
                            m.next = "KEEP"  # R-ERR-7: not before its turn
                    with m.Case(JobKind.LAND_FAILED):
                        with m.If(alive & (~failed.pending | failed.by_una | (age < failed_age))):
                            m.next = "KEEP"
                    with m.Case(JobKind.LANDED):  # R-ORD-5
                        with m.If(alive):
                            m.d.sync += [
                                hot.landed.eq(hot.landed + 1), certain.eq(1), retire_now.eq(1), lies_behind.eq(0),
                                exact.eq(~hot.more), failed_by_una.eq(0), failed_here.eq(0), failed_next.eq(0),
                                Assert(age == 0, Format("QP {}: WQE {} landed, {} is the oldest", job.qpn, job.index, index)),
                            ]  # fmt: skip
                            m.next = "RETIRE"
                            with m.If(failed.pending):
                                m.next = "LOOK"
                    with m.Case(JobKind.SWEEP):
                        with m.If(alive):
                            m.next = "LOOK"
                    with m.Case(JobKind.FLUSH):
                        m.next = "BARRIER"
                    with m.Case(JobKind.FLUSH_NOW):
                        with m.If(cfg.state == QpState.ERR):
                            m.next = "FLUSH"
            with m.State("KEEP"):
                m.d.comb += [
                    self._failed_set.eq(1),
                    self._failed_write.data.pending.eq(1),
                    self._failed_write.data.closed.eq(job.kind == JobKind.LAND_FAILED),
                    self._failed_write.data.index.eq(job.index),
                    self._failed_write.data.status.eq(job.status),
                    self._failed_write.data.vendor_err.eq(job.vendor_err),
                ]
                m.next = "IDLE"
                with m.If(job.kind == JobKind.LAND_FAILED):  # R-RSP-8, when the rest of the data has settled
                    m.next = "BARRIER"
            with m.State("MEASURE"):  # ResponseCheck works
                m.next = "JUDGE"
            with m.State("JUDGE"):
                m.next = "ACT"
            with m.State("ACT"):
                with m.If(check.implied):  # R-RSP-3, R-RSP-4
                    m.d.sync += limit.eq(hot.una + check.expected - 1)
                with m.If(check.implied | check.wrong):
                    m.d.sync += [error_status.eq(check.status), error_vendor.eq(check.vendor_err)]
                with m.If(check.implied | check.wrong | is_nak):
                    m.next = "MARK"
                with m.Elif(is_ack):
                    m.next = "LOOK"
                with m.Elif(land_free):
                    answered = hot.answered + check.final
                    start_landing(Mux(check.final, LandTag.LAST, LandTag.PART), read.wqe_index,
                                  Mux(is_atomic, 8, job.length))
                    m.d.sync += [
                        self._owes_free.eq(0), limit.eq(job.psn), hot.received.eq(check.next_received),
                        hot.answered.eq(answered), hot.more.eq(hot.more | (check.passes & (hot.answered != hot.landed))),
                    ]  # fmt: skip
                    with m.If(check.passes):
                        m.next = "LOOK"
                    with m.Else():  # R-RSP-7
                        finish(index, una=job.psn + 1, received=check.next_received, answered=answered)  # R-RSP-7
            with m.State("MARK"):  # the first WQE not acknowledged fails
                m.d.comb += [
                    self._failed_set.eq(1),
                    self._failed_write.data.pending.eq(1),
                    self._failed_write.data.by_una.eq(1),
                    self._failed_write.data.closed.eq(1),
                    self._failed_write.data.status.eq(error_status),
                    self._failed_write.data.vendor_err.eq(error_vendor),
                ]
                m.d.sync += failed.eq(self._failed_write.data)
                m.next = "LOOK"
                with m.If(unlanded):
                    m.next = "BARRIER"
            with m.State("BARRIER"):
                with m.If(land_free):
                    flushes = (job.kind == JobKind.FLUSH) | (job.kind == JobKind.FLUSH_NOW)
                    start_landing(Mux(flushes, LandTag.FLUSH, LandTag.SWEEP), job.index, 0)
                    finish(index)
            with m.State("LOOK"):
                m.d.sync += [
                    exact.eq(limit == entry.last_psn),  # R-RSP-2
                    retire_now.eq(certain | (covered & ~is_read)),  # R-RSP-2, R-RSP-3
                    lies_behind.eq(covered),
                    failed_by_una.eq(failed.by_una & ~covered),
                    failed_here.eq(failed.pending & ~failed.by_una & (failed.index == index)),  # R-ERR-7
                    failed_next.eq(failed.pending & (failed.by_una | (failed.index == next_index))),
                ]
                m.next = "RETIRE"
            with m.State("FETCH"):
                m.d.sync += entry.eq(self._entry_read.data)
                m.next = "LOOK"
            with m.State("RETIRE"):
                m.d.comb += self._entry_read.addr.eq(Cat(next_index[:entry_bits], job.qpn))
                with m.If(failed_here):  # R-ERR-7
                    m.d.sync += [error_status.eq(failed.status), error_vendor.eq(failed.vendor_err)]
                    m.next = "ERROR"
                with m.Elif(retire_now):
                    with m.If(cqe_free & wake_free):
                        report(WcStatus.SUCCESS, VendorError.NONE, byte_len=entry.length, make_cqe=entry.signaled)  # R-CQ-1
                        m.d.sync += [progress.eq(1), certain.eq(0)]
                        m.next = "FETCH"
                        with m.If(exact & ~failed_next):
                            finish(next_index, more=0)
                            wake()
                            with m.If(absorbable & (retired != self.TURN)):
                                m.d.comb += self._absorb.eq(1)
                                m.d.sync += [
                                    self._next_valid.eq(0), hot.more.eq(0), limit.eq(self._next.psn),
                                    send_index.eq(self.hot_send_index),
                                ]  # fmt: skip
                                m.next = "FETCH"
                        with m.Elif(give_way):
                            m.next = "GIVE_WAY"
                with m.Elif(failed_by_una):
                    m.d.sync += [error_status.eq(failed.status), error_vendor.eq(failed.vendor_err)]
                    m.next = "ERROR"
                with m.Elif(wake_free):
                    finish(index, more=hot.more & lies_behind)  # what lies behind a READ that lands is looked at later
                    with m.If(progress):
                        wake()
            with m.State("ERROR"):
                with m.If(cqe_free & self._errors.i.ready):
                    report(error_status, error_vendor)  # R-ERR-1
                    finish(next_index)
                    m.d.comb += [
                        self._failed_set.eq(1),
                        self._failed_write.data.dead.eq(1),  # R-ERR-3
                        self._errors.i.valid.eq(1),
                    ]
            with m.State("FLUSH"):
                with m.If(flush_done):  # R-ERR-4, R-ERR-5
                    finish(index)
                with m.Elif(give_way):
                    m.next = "BARRIER"  # the rest comes back later
                with m.Elif(cqe_free):
                    report(WcStatus.WR_FLUSH_ERR, VendorError.NONE, opcode=WcOpcode.SEND)  # R-ERR-2, R-ERR-3, R-ERR-4
                    m.d.sync += flush_left.eq(flush_left - 1)
            with m.State("GIVE_WAY"):
                with m.If(wake_free):
                    finish(index)
                    m.d.comb += self._giving_way.eq(1)
                    m.d.sync += [self._again_qpn.eq(job.qpn), self._again_valid.eq(1)]
                    wake()
        m.d.comb += [
            table.write_index.eq(job.qpn),
            table.write_words.eq(~0),
            self._errors.i.payload.qpn.eq(job.qpn),
        ]
        with m.If(self._failed_set):
            m.d.comb += [self._failed_write.en.eq(1), self._failed_write.addr.eq(job.qpn)]
