"""UC and UD: senders without answers and receivers that drop what they cannot take.

Source: rules.md sections 17 (UD), 18 (UC), R-ERR-6 (SQE), R-QKEY-1..2.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import OPCODES, Kind, Opcode, OpcodeInfo
from rnic.wire.psn import psn_add

from .constants import (
    GRH_BYTES,
    LOCAL_OPS,
    MAX_MESSAGE,
    Access,
    Event,
    QpState,
    WcFlag,
    WcOp,
    WcStatus,
    WrOp,
)
from .inbound import Inbound, InvalidateError, ReceiverNotReady, RequestError
from .memory import ProtectionError
from .queues import SendWr, WorkCompletion, check_sges, scatter
from .segment import SendWqe, message_bytes, packet_count, request_frame

if TYPE_CHECKING:
    from .qp import QueuePair


class DatagramRequester:
    """The send side of a UC or UD queue pair: a request completes when its last packet is sent (R-UC-2, R-UD-5)."""

    def __init__(self, qp: QueuePair):
        self.qp = qp
        self.waiting: deque[SendWqe] = deque()
        self.nxt = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def load(self, sq_psn: int) -> None:
        self.nxt = sq_psn

    def post(self, wr: SendWr) -> None:
        """Queue a request; the QP has checked it."""
        count = 1 if self.qp.is_ud else packet_count(wr, self.qp.attrs.path_mtu)
        self.waiting.append(SendWqe(wr, count))

    def flush(self) -> None:
        """Complete everything left with WR_FLUSH_ERR, in post order."""
        left = list(self.waiting)
        self.waiting.clear()
        for wqe in left:
            self.qp.complete_send(wqe.wr, WcStatus.WR_FLUSH_ERR)

    def clear(self) -> None:
        self.waiting.clear()

    def pull(self, now: int) -> Frame | None:
        """The next packet to send, or None."""
        while self.waiting and self._may_send():
            wqe = self.waiting[0]
            if wqe.sent == 0:
                status = self._start(wqe)
                if status is not WcStatus.SUCCESS or wqe.count == 0:
                    self._finish(status)
                    continue
            try:
                return self._packet(wqe)
            except ProtectionError:
                self._finish(WcStatus.LOC_PROT_ERR)
        return None

    def _may_send(self) -> bool:
        if self.qp.state is QpState.RTS:
            return True
        return self.qp.state is QpState.SQD and self.waiting[0].sent > 0  # R-QP-3

    def _start(self, wqe: SendWqe) -> WcStatus:
        wr = wqe.wr
        if wr.length > (self.qp.port_mtu if self.qp.is_ud else MAX_MESSAGE):
            return WcStatus.LOC_LEN_ERR  # R-UD-1
        if wr.op in LOCAL_OPS:
            return self.qp.run_local(wr)
        if wr.inline is None:
            try:
                check_sges(self.qp.keys, self.qp.pd, wr.sges, Access.NONE)
            except ProtectionError:
                return WcStatus.LOC_PROT_ERR
        wqe.first_psn = self.nxt
        return WcStatus.SUCCESS

    def _packet(self, wqe: SendWqe) -> Frame:
        if self.qp.is_ud:
            frame = self._datagram(wqe.wr)
        else:
            frame = request_frame(self.qp, wqe, wqe.sent, self.qp.policy.ackreq_unacked)
        wqe.sent += 1
        self.nxt = psn_add(self.nxt, 1)
        if wqe.sent == wqe.count:
            self._finish(WcStatus.SUCCESS)
        return frame

    def _datagram(self, wr: SendWr) -> Frame:
        qkey = self.qp.attrs.qkey if wr.remote_qkey >> 31 else wr.remote_qkey  # R-QKEY-2
        imm = wr.op is WrOp.SEND_IMM
        return self.qp.frame(
            Opcode.UD_SEND_ONLY_IMM if imm else Opcode.UD_SEND_ONLY,
            self.nxt,
            av=wr.ah,
            dest_qpn=wr.remote_qpn,
            payload=message_bytes(self.qp, wr, 0, wr.length),
            ackreq=self.qp.policy.ackreq_unacked,
            se=wr.solicited,
            qkey=qkey,
            src_qp=self.qp.qpn,
            imm=wr.imm,
        )

    def _finish(self, status: WcStatus) -> None:
        """Complete the oldest request; an error stops the SQ (R-ERR-6) and flushes it."""
        self.qp.complete_send(self.waiting.popleft().wr, status)
        if status is not WcStatus.SUCCESS:
            self.qp.enter_sqe()
        elif self.qp.state is QpState.SQD:
            self.report_drained()

    def report_drained(self) -> None:
        """SQ_DRAINED when no request is half sent (R-QP-3)."""
        if not self.waiting or self.waiting[0].sent == 0:
            self.qp.raise_event(Event.SQ_DRAINED)

    def receive(self, frame: Frame, now: int) -> None:
        """UC and UD have no answers; the filter drops them before."""
        raise RuntimeError(f"answer {frame.opcode} to a QP without answers")

    def advance(self, now: int) -> None:
        """No timers (R-UC-2)."""

    def next_deadline(self) -> int | None:
        return None


class UcResponder(Inbound):
    """The receive side of a UC queue pair (rules.md section 18): whatever is wrong drops the message, silently."""

    def __init__(self, qp: QueuePair):
        super().__init__(qp)
        self.skipping = False  # the rest of the current message is dropped
        self.counters = {"dropped": 0, "abandoned": 0}

    def clear(self) -> None:
        super().clear()
        self.skipping = False

    def receive(self, frame: Frame, now: int) -> None:
        """Take a request packet."""
        info = OPCODES[frame.opcode]
        in_order = frame.psn == self.epsn
        if info.starts:
            self._abandon()  # R-UC-1: a new message, whatever was open is gone
            self.skipping = False
        elif not in_order or self.skipping or not self.sequence_ok(info):
            self._abandon()
            self.skipping = True
            self.counters["dropped"] += 1
            return
        self.epsn = psn_add(frame.psn, 1)
        try:
            self._execute(frame, info)
        except (RequestError, ReceiverNotReady, InvalidateError):
            self._abandon()
            self.skipping = not info.ends  # R-UC-3
            self.counters["dropped"] += 1

    def _execute(self, frame: Frame, info: OpcodeInfo) -> None:
        self.check_rights(info)
        self.take_receive(info)
        self.check_length(frame, info)
        if info.kind is Kind.WRITE:
            self.open_write(frame, info)
            self.place_write(frame, info)
        else:
            self.place_send(frame)
        self.close_message(frame, info)

    def _abandon(self) -> None:
        """Drop the open message; its receive is used again, with an SRQ it completes in error (R-UC-1)."""
        if self.open_kind is not None:
            self.counters["abandoned"] += 1
        rwqe, self.rwqe = self.rwqe, None
        self.open_kind = self.write = None
        if rwqe is not None and not self.qp.give_back_receive(rwqe):
            self.rwqe = rwqe
            self.fail_receive(WcStatus.LOC_QP_OP_ERR)

    def pull(self) -> Frame | None:
        return None  # R-UC-2


class UdResponder:
    """The receive side of a UD queue pair (rules.md section 17)."""

    def __init__(self, qp: QueuePair):
        self.qp = qp
        self.counters = {"no_receive": 0, "too_long": 0}

    def load(self, rq_psn: int) -> None:
        """UD does not check PSNs (R-UD-4)."""

    def clear(self) -> None:
        """Nothing is kept between packets."""

    def fail_receive(self, status: WcStatus) -> bool:
        return False

    def receive(self, frame: Frame, now: int, grh: bytes = bytes(GRH_BYTES)) -> None:
        """Take a datagram; `grh` is what goes in front of the payload (R-UD-2)."""
        info = OPCODES[frame.opcode]
        length = GRH_BYTES + len(frame.payload)
        if len(frame.payload) > self.qp.port_mtu:
            self.counters["too_long"] += 1
            return
        rwqe = self.qp.take_receive()
        if rwqe is None:
            self.counters["no_receive"] += 1  # R-UD-3
            return
        if rwqe.length < length:
            self.qp.give_back_receive(rwqe, always=True)  # R-UD-2: dropped, the receive stays usable
            self.counters["too_long"] += 1
            return
        try:
            scatter(self.qp.keys, self.qp.pd, rwqe.sges, 0, grh + frame.payload)
        except ProtectionError:
            self.qp.complete_receive(WorkCompletion(rwqe.wr_id, WcStatus.LOC_PROT_ERR, WcOp.RECV, self.qp.qpn))
            self.qp.enter_error()
            return
        self._complete(rwqe.wr_id, frame, info, length)

    def _complete(self, wr_id: int, frame: Frame, info: OpcodeInfo, length: int) -> None:
        self.qp.complete_receive(
            WorkCompletion(
                wr_id=wr_id,
                status=WcStatus.SUCCESS,
                opcode=WcOp.RECV,
                qpn=self.qp.qpn,
                byte_len=length,  # R-CQ-3
                imm=frame.imm if info.has_imm else 0,
                flags=WcFlag.GRH | (WcFlag.WITH_IMM if info.has_imm else WcFlag.NONE),  # R-CQ-4
                src_qpn=frame.src_qp,
                solicited=frame.se,
            )
        )

    def pull(self) -> Frame | None:
        return None
