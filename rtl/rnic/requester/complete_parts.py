"""The front of the completer: whose job is next, and what a command's write has to wait for."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import enum, wiring

from ..abi import CtxTable, VendorError, WcOpcode, WcStatus, WqeOpcode
from ..records import LandTag, ProbeEvent
from ..stream.arbiter import RoundRobin
from ..wire.opcode import Opcode
from ..wire.syndrome import AethType, NakCode
from .response_check import DATA_OPCODES

__all__ = ["CompleterParts", "JobKind"]

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


class JobKind(enum.Enum, shape=3):
    """What the completer works on."""

    RESPONSE = 0
    FAILURE = 1
    FLUSH = 2  # sends a FLUSH through the landing street
    LANDED = 3  # all data of the oldest READ or ATOMIC is in memory
    LAND_FAILED = 4
    SWEEP = 5  # retires what is acknowledged; then the error kept for the QP is reported
    FLUSH_NOW = 6  # the FLUSH came back: no data of the QP is on its way any more


class CompleterParts(wiring.Component):
    """What `Completer`, which sets the attributes, does beside its work: command writes, ends of landings, choice of jobs."""

    def _elaborate_ctx(self, m):
        """A command's write must not fall between the read and the write of a QP under work, or meet a job of its old life."""
        bus = self.ctx.payload
        is_hot, hold, clear = Signal(), Signal(), Signal()
        self._failed_set = Signal(name="failed_set")
        # Compared a cycle ahead: a write that just came, or a QP that just did, waits for the verdict.
        asked, moved, is_next, is_again = Signal(), Signal(), Signal(), Signal()
        m.d.sync += [
            asked.eq(self.ctx.valid & ~self.ctx.ready),
            moved.eq(self._take | self._giving_way),
            is_next.eq(bus.index == self._next.qpn),
            is_again.eq(bus.index == self._again_qpn),
        ]
        busy = [
            ~self._idle, ~asked, moved, self._next_valid & is_next, self._again_valid & is_again, self._results.o.valid,
        ]  # fmt: skip
        m.d.comb += [
            is_hot.eq(bus.table == CtxTable.COMPLETER_HOT),
            hold.eq(is_hot & Cat(busy).any()),  # this engine writes only while it is not idle
            self._cfg.ctx.payload.eq(bus),
            self._cfg.ctx.valid.eq(self.ctx.valid),
            self._table.ctx.payload.eq(bus),
            self._table.ctx.valid.eq(self.ctx.valid & ~hold),
            self.ctx.ready.eq(~hold),
            # Before the table takes the write is soon enough: the QP does not run while a command writes here.
            clear.eq(self.ctx.valid & ~hold & is_hot & (bus.word == 0)),
        ]
        with m.If(clear):
            m.d.comb += [self._failed_write.en.eq(1), self._failed_write.addr.eq(bus.index)]

    def _elaborate_results(self, m):
        """What a landing's end means, decided in front of the queue."""
        landed, i = self.landed.payload, self._results.i
        failed, kind = Signal(), i.payload.kind
        m.d.comb += [
            i.valid.eq(self.landed.valid),
            self.landed.ready.eq(i.ready),
            *(i.payload[name].eq(landed[name]) for name in ("qpn", "index", "status", "vendor_err")),
            failed.eq(landed.status != WcStatus.SUCCESS),
            # Of a READ that goes on there is nothing to say but an error.
            i.payload.news.eq((landed.tag != LandTag.PART) | failed),
            kind.eq(Mux(failed, JobKind.LAND_FAILED, JobKind.LANDED)),
        ]
        with m.If(landed.tag == LandTag.SWEEP):
            m.d.comb += kind.eq(JobKind.SWEEP)
        with m.If(landed.tag == LandTag.FLUSH):
            m.d.comb += kind.eq(JobKind.FLUSH_NOW)

    def _elaborate_choice(self, m):
        """Whose job is next: round robin over the inputs and the sweep that gave way."""
        m.submodules.turn = turn = RoundRobin(5, spaced=True)
        r, f, s, result = self.response, self.failure, self.flush, self._results.o
        take, room, dropped, returned = self._take, Signal(), Signal(), Signal()
        eligible = Signal(5)
        under_way = Signal(range(self.results_depth + 1))  # landings, and jobs that may start one
        chosen = Signal(self._job_shape)

        def overtakes(qpn):
            """An answer, or a landing, must not overtake the sweep of the same QP that gave way."""
            return self._again_valid & (self._again_qpn == qpn)

        m.d.comb += [
            room.eq(under_way != self.results_depth),
            dropped.eq(result.valid & ~result.payload.news),
            turn.requests.eq(eligible),
            # An ended job that still owns something gives it back in the idle cycle.
            self._start.eq(self._idle & self._next_valid & ~self._owes_free & ~self.free.valid),
            take.eq(turn.requests.any() & (~self._next_valid | self._start)),
            turn.advance.eq(take),
            r.ready.eq(take & (turn.grant == 0)),
            f.ready.eq(take & (turn.grant == 1)),
            s.ready.eq(take & (turn.grant == 2)),
            result.ready.eq((take & (turn.grant == 3)) | dropped),
            returned.eq(self._idle & self._credit),
        ]  # fmt: skip
        # Judged a cycle ahead: what waits stays; what would change the verdict (a job taken, a sweep that gives way) asks again.
        m.d.sync += eligible.eq(Mux(take | self._giving_way, 0, Cat(
            r.valid & room & ~overtakes(r.payload.qpn), f.valid, s.valid & room,
            result.valid & result.payload.news & ~overtakes(result.payload.qpn), self._again_valid,
        )))
        m.d.sync += under_way.eq(under_way + (r.ready | s.ready) - dropped - returned - self._absorb)
        with m.If(self._idle):
            m.d.sync += [self._credit.eq(0), self._owes_free.eq(0)]
        with m.If(self._start):
            m.d.sync += [
                self._next_valid.eq(0), self._job.eq(self._next), self._credit.eq(self._next.credit),
                self._owes_free.eq((self._next.kind == JobKind.RESPONSE) & (self._next.length != 0)),
            ]  # fmt: skip
        with m.If(take):
            m.d.sync += [self._next_valid.eq(1), self._next.eq(chosen)]
        with m.Switch(turn.grant):
            with m.Case(0):
                m.d.comb += [
                    chosen.kind.eq(JobKind.RESPONSE), Value.cast(chosen.syndrome).eq(r.payload.syndrome), chosen.credit.eq(1),
                    chosen.plain_ack.eq((r.payload.opcode == Opcode.RC_ACK.value) & (chosen.syndrome.type == AethType.ACK)),
                    *(chosen[name].eq(r.payload[name]) for name in ("qpn", "psn", "opcode", "head", "length", "original")),
                ]  # fmt: skip
            with m.Case(1):
                m.d.comb += [
                    chosen.kind.eq(JobKind.FAILURE), chosen.qpn.eq(f.payload.qpn), chosen.index.eq(f.payload.wqe_index),
                    chosen.status.eq(f.payload.status), chosen.vendor_err.eq(f.payload.vendor_err),
                ]  # fmt: skip
            with m.Case(2):
                m.d.comb += [
                    chosen.kind.eq(JobKind.FLUSH), chosen.qpn.eq(s.payload.qpn), chosen.index.eq(s.payload.producer),
                    chosen.credit.eq(1),
                ]  # fmt: skip
            with m.Case(3):
                m.d.comb += [
                    chosen.qpn.eq(result.payload.qpn), chosen.index.eq(result.payload.index),
                    chosen.status.eq(result.payload.status), chosen.vendor_err.eq(result.payload.vendor_err),
                    chosen.credit.eq(1), chosen.kind.eq(result.payload.kind),
                ]  # fmt: skip
            with m.Case(4):
                m.d.comb += [chosen.kind.eq(JobKind.SWEEP), chosen.qpn.eq(self._again_qpn)]
        with m.If(take & (turn.grant == 4)):
            m.d.sync += self._again_valid.eq(0)
        with m.If(self.free.ready):
            m.d.sync += self.free.valid.eq(0)
        with m.If(self._idle & self._owes_free):
            m.d.sync += [self.free.valid.eq(1), self.free.payload.eq(self._job.head)]
        m.d.sync += [
            self.probe.valid.eq(r.ready),
            self.probe.event.eq(ProbeEvent.RESPONSE_IN),
            self.probe.qpn.eq(r.payload.qpn),
            self.probe.psn.eq(r.payload.psn),
            self.probe.opcode.eq(r.payload.syndrome),
            Assert(under_way <= self.results_depth, Format("Completer: {} landings under way", under_way)),
        ]

    def _elaborate_answer(self, m):
        """What the answer says, from state CONTEXT on: is it an ACK, a NAK, data, the original value of an ATOMIC; and what a NAK
        means."""
        is_ack, is_nak, is_data, is_atomic = (Signal(name=n) for n in ("is_ack", "is_nak", "is_data", "is_atomic"))
        nak_status, nak_vendor = Signal(WcStatus), Signal(VendorError)
        job, syndrome = self._job, self._job.syndrome
        m.d.sync += [is_ack.eq(0), is_nak.eq(0), is_data.eq(0), is_atomic.eq(job.opcode == Opcode.RC_ATOMIC_ACK.value)]
        with m.Switch(job.opcode):  # registered from state CONTEXT on
            with m.Case(*DATA_OPCODES):
                m.d.sync += is_data.eq(1)
            with m.Case(Opcode.RC_ACK.value):
                with m.If(syndrome.type == AethType.ACK):
                    m.d.sync += is_ack.eq(1)
                with m.If(syndrome.type == AethType.RNR_NAK):
                    m.d.sync += [
                        is_nak.eq(1), nak_status.eq(WcStatus.RNR_RETRY_EXC_ERR), nak_vendor.eq(VendorError.RNR),
                    ]  # fmt: skip
                with m.If(syndrome.type == AethType.NAK):
                    with m.Switch(syndrome.value):
                        for code, (status, vendor) in _NAK_STATUS.items():  # 7.4
                            with m.Case(code):
                                m.d.sync += [is_nak.eq(1), nak_status.eq(status), nak_vendor.eq(vendor)]
        return is_ack, is_nak, is_data, is_atomic, nak_status, nak_vendor

    def _wc_opcode(self, m, opcode):
        """The CQE's opcode for a WQE's."""
        wc_opcode = Signal(WcOpcode)
        with m.Switch(opcode):
            for operation, code in _WC_OPCODES.items():
                with m.Case(operation):
                    m.d.comb += wc_opcode.eq(code)
        return wc_opcode
