"""RC requester: sends work requests as packets, takes answers, repeats what was lost.

PSN space: [una, nxt) is sent and unanswered; `cursor` is the next PSN to send and is behind `nxt` during a replay
(go-back-N, R-RTY-1). Time comes in as nanoseconds; nothing happens between calls.
Source: rules.md sections 7, 10, 12.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import OPCODES, Kind, OpcodeInfo
from rnic.wire.psn import psn_add, psn_after, psn_in_window

from .constants import (
    LOCAL_OPS,
    MAX_MESSAGE,
    PSN_MASK,
    RNR_RETRY_INFINITE,
    RNR_TIMER_NS,
    Access,
    AethType,
    Event,
    NakCode,
    QpState,
    WcStatus,
    WrOp,
    ack_timeout_ns,
)
from .memory import ProtectionError
from .queues import SendWr, check_sges, scatter
from .segment import SendWqe, packet_count, request_frame

if TYPE_CHECKING:
    from .qp import QueuePair

#: Fatal NAK code -> status of the request it names (rules.md 7.4).
FATAL_NAKS = {
    NakCode.INVALID_REQUEST: WcStatus.REM_INV_REQ_ERR,
    NakCode.REMOTE_ACCESS: WcStatus.REM_ACCESS_ERR,
    NakCode.REMOTE_OPERATIONAL: WcStatus.REM_OP_ERR,
}


class RcRequester:
    """The send side of one RC queue pair."""

    def __init__(self, qp: QueuePair):
        self.qp = qp
        self.waiting: deque[SendWqe] = deque()  # posted, not started
        self.started: deque[SendWqe] = deque()  # oldest first
        self.stopped = False  # a local error: nothing new leaves (R-ERR-7)
        self.una = self.nxt = self.cursor = 0
        self.retries_left = self.rnr_left = 0
        self.retry_started = False  # one retry per loss event (R-RTY-4)
        self.timer_at: int | None = None
        self.rnr_until: int | None = None
        self.drain_reported = False
        self.counters = {"timeouts": 0, "retries": 0, "rnr_naks": 0, "ghosts": 0, "resent": 0}

    def load(self, sq_psn: int) -> None:
        """Start from `sq_psn` (RTR to RTS, R-PSN-5)."""
        self.una = self.nxt = self.cursor = sq_psn
        self.reload_counters()

    def reload_counters(self) -> None:
        """Fresh retry budgets (R-RSP-7)."""
        self.retries_left = self.qp.attrs.retry_cnt
        self.rnr_left = self.qp.attrs.rnr_retry
        self.retry_started = False

    def __len__(self) -> int:
        return len(self.waiting) + len(self.started)

    @property
    def outstanding(self) -> int:
        """PSNs sent and not answered."""
        return (self.nxt - self.una) & PSN_MASK

    def post(self, wr: SendWr) -> None:
        """Queue a request; the QP has checked it."""
        self.waiting.append(SendWqe(wr, packet_count(wr, self.qp.attrs.path_mtu)))

    def flush(self) -> None:
        """Complete everything left with WR_FLUSH_ERR, in post order (R-ERR-3), and stop all timers."""
        left = [*self.started, *self.waiting]
        self.clear()
        for wqe in left:
            self.qp.complete_send(wqe.wr, WcStatus.WR_FLUSH_ERR)

    def clear(self) -> None:
        """Forget everything without completions (R-QP-4)."""
        self.waiting.clear()
        self.started.clear()
        self.stopped = False
        self.timer_at = self.rnr_until = None
        self.cursor = self.una = self.nxt

    # ---- sending -------------------------------------------------------------------------------------------

    def pull(self, now: int) -> Frame | None:
        """The next packet to send at `now`, or None."""
        if self.qp.state not in (QpState.RTS, QpState.SQD) or self.rnr_until is not None:
            return None  # R-QP-2; R-RNR-1: nothing leaves during the wait
        try:
            frame = self._resend() if self.cursor != self.nxt else self._send_new()
        except ProtectionError:
            self._local_error(self._unfinished(), WcStatus.LOC_PROT_ERR)
            return None
        if frame is not None and self.timer_at is None:
            self._start_timer(now)  # R-TMO-2
        return frame

    def _unfinished(self) -> SendWqe:
        """The request whose packet was about to be built."""
        return self._at(self.cursor) or self.started[-1]

    def _resend(self) -> Frame:
        wqe = self._at(self.cursor)
        if wqe is None:
            raise RuntimeError(f"no request holds PSN {self.cursor:#x}")
        index = (self.cursor - wqe.first_psn) & PSN_MASK
        frame = self._packet(wqe, index)
        if wqe.wr.op is WrOp.READ:
            wqe.restarts |= {index}
            self.cursor = wqe.end_psn
        else:
            self.cursor = psn_add(self.cursor, 1)
        self.counters["resent"] += 1
        return frame

    def _send_new(self) -> Frame | None:
        wqe = self._current()
        if wqe is None or self.outstanding >= self.qp.policy.window:  # R-PSN-6
            return None
        frame = self._packet(wqe, wqe.sent)
        step = wqe.count if wqe.wr.op is WrOp.READ else 1  # R-PSN-3
        wqe.sent += step
        self.nxt = self.cursor = psn_add(self.nxt, step)
        return frame

    def _packet(self, wqe: SendWqe, index: int) -> Frame:
        policy = self.qp.policy
        fills_window = (wqe.first_psn + index + 1 - self.una) & PSN_MASK >= policy.window  # nothing more leaves without an ACK
        ackreq = index == wqe.count - 1 or (index + 1) % policy.ack_interval == 0 or fills_window  # R-REQ-2
        return request_frame(self.qp, wqe, index, ackreq)

    def _current(self) -> SendWqe | None:
        """The request being sent; starts waiting ones as far as order, fence and READ depth allow."""
        if self.stopped:
            return None
        if self.started and self.started[-1].sent < self.started[-1].count:
            return self.started[-1]
        while self.waiting and self._may_start(self.waiting[0]):
            wqe = self.waiting.popleft()
            wqe.first_psn = self.nxt
            self.started.append(wqe)
            if not self._start(wqe):
                return None
            if wqe.count:
                return wqe
            self._retire()
        return None

    def _may_start(self, wqe: SendWqe) -> bool:
        if self.qp.state is QpState.SQD:
            return False  # R-QP-3
        if wqe.wr.fence and wqe.wr.op in LOCAL_OPS and self.started:
            return False  # R-ORD-3
        slow = [w for w in self.started if w.needs_response]
        if wqe.wr.fence and slow:
            return False  # R-ORD-2
        return not wqe.needs_response or len(slow) < self.qp.attrs.max_rd_atomic  # R-REQ-4

    def _start(self, wqe: SendWqe) -> bool:
        """Checks and local operations at the start of a request; False when it failed."""
        wr = wqe.wr
        if wr.length > MAX_MESSAGE:
            return self._local_error(wqe, WcStatus.LOC_LEN_ERR)
        if wr.op in LOCAL_OPS:
            status = self.qp.run_local(wr)
            return True if status is WcStatus.SUCCESS else self._local_error(wqe, status)
        if not wqe.needs_response and wr.inline is None:
            try:
                check_sges(self.qp.keys, self.qp.pd, wr.sges, Access.NONE)
            except ProtectionError:
                return self._local_error(wqe, WcStatus.LOC_PROT_ERR)
        return True

    def _local_error(self, wqe: SendWqe, status: WcStatus) -> bool:
        """Stop here; the error is reported once everything older has completed (R-ERR-7). Always False."""
        wqe.error = status
        self.stopped = True
        self._retire()
        return False

    # ---- answers -------------------------------------------------------------------------------------------

    def receive(self, frame: Frame, now: int) -> None:
        """Take a response packet."""
        if not psn_in_window(frame.psn, self.una, self.nxt):
            self.counters["ghosts"] += 1  # R-RSP-1
            return
        info = OPCODES[frame.opcode]
        if info.kind is Kind.ACK:
            self._take_ack(frame, now)
        else:
            self._take_data(frame, info, now)
        if self.qp.state is QpState.SQD:
            self.report_drained()

    def report_drained(self) -> None:
        """SQ_DRAINED once every started request is complete (R-QP-3)."""
        if not self.started and not self.drain_reported:
            self.drain_reported = True
            self.qp.raise_event(Event.SQ_DRAINED)

    def _take_ack(self, frame: Frame, now: int) -> None:
        kind, value = AethType(frame.syndrome >> 5 & 3), frame.syndrome & 0x1F
        if kind is AethType.ACK:
            if self._acknowledge(psn_add(frame.psn, 1), now):
                # R-RSP-3, also for an ACK that names the READ or ATOMIC itself: a responder that has sent the answer may
                # name it when it repeats an ACK (R-DUP-2), so this is a lost answer and no bad response.
                self._implied_nak(now)
        elif kind is AethType.RNR:
            if self._acknowledge(frame.psn, now):
                self._implied_nak(now)
            else:
                self._rnr(frame.psn, value, now)
        elif kind is AethType.NAK:
            self._nak(frame.psn, value, now)

    def _acknowledge(self, end: int, now: int) -> bool:
        """Everything before `end` is acknowledged (R-RSP-2); True when a READ or ATOMIC in between is unanswered."""
        before = self.una
        blocked = False
        while self.una != end and not blocked:
            wqe = self._at(self.una)
            if wqe is None:
                raise RuntimeError(f"no request holds PSN {self.una:#x}")
            if wqe.needs_response:
                blocked = True
            else:
                step = min((end - self.una) & PSN_MASK, (wqe.end_psn - self.una) & PSN_MASK)
                self._move_una(wqe, step)
        if self.una != before:
            self._progress(now)
        return blocked

    def _move_una(self, wqe: SendWqe, step: int) -> None:
        wqe.acked += step
        self.una = psn_add(self.una, step)
        if psn_after(self.una, self.cursor):
            self.cursor = self.una  # a late answer to the first transmission: skip what it covers

    def _progress(self, now: int) -> None:
        """R-RSP-7: una moved."""
        self.reload_counters()
        self.rnr_until = None
        if self.outstanding:
            self._start_timer(now)
        else:
            self.timer_at = None
        self._retire()

    def _nak(self, psn: int, code: int, now: int) -> None:
        if code == NakCode.PSN_SEQUENCE:
            self._sequence_nak(psn, now)
        elif code in FATAL_NAKS:
            if self._acknowledge(psn, now):
                self._implied_nak(now)  # rules.md 7.4: the implied NAK wins, the fatal one will come again
            else:
                self._fail(FATAL_NAKS[NakCode(code)])
        # others are reserved or RD only: ignored (rules.md 7.4)

    def _sequence_nak(self, psn: int, now: int) -> None:
        self._acknowledge(psn, now)
        self._implied_nak(now)

    def _implied_nak(self, now: int) -> None:
        """The packet or answer of una was lost: replay from una unless that has already begun (R-RTY-4).

        During an RNR wait nothing happens: the wait is neither cut short nor a retry burnt (R-RNR-2).
        """
        if not self.retry_started and self.rnr_until is None:
            self._retry(now)

    def _rnr(self, psn: int, code: int, now: int) -> None:
        if self.rnr_until is not None:
            return  # the wait for this PSN already runs
        self.counters["rnr_naks"] += 1
        if self.qp.attrs.rnr_retry != RNR_RETRY_INFINITE:  # R-RTC-2
            if self.rnr_left == 0:
                self._fail(WcStatus.RNR_RETRY_EXC_ERR)
                return
            self.rnr_left -= 1
        self.timer_at = None  # R-TMO-2
        self.rnr_until = now + RNR_TIMER_NS[code]  # R-RNR-1, R-RNR-4: at least the code's time
        self.cursor = psn

    def _take_data(self, frame: Frame, info: OpcodeInfo, now: int) -> None:
        """READ response or ATOMIC acknowledge."""
        wqe = self._at(frame.psn)
        if wqe is None:
            raise RuntimeError(f"no request holds PSN {frame.psn:#x}")
        if self._acknowledge(wqe.first_psn if wqe.acked == 0 else self.una, now):
            self._implied_nak(now)  # R-RSP-3: an older READ or ATOMIC is unanswered
            return
        if frame.psn != self.una and wqe.needs_response:
            if self.qp.policy.read_gap_retry:
                self._implied_nak(now)  # R-RSP-4
            return
        if self.qp.state is QpState.ERR:
            return  # completing the older requests overflowed the CQ
        status = self._check_response(wqe, frame, info)
        if status is WcStatus.SUCCESS:
            status = self._store(wqe, frame)
        if status is not WcStatus.SUCCESS:
            self._fail(status)  # everything older has completed: this request is the oldest
            return
        self._move_una(wqe, 1)
        self._progress(now)

    def _check_response(self, wqe: SendWqe, frame: Frame, info: OpcodeInfo) -> WcStatus:
        """R-RSP-5, R-RSP-6: the right kind, size and syndrome for this place in the request."""
        wanted = Kind.READ_RESP if wqe.wr.op is WrOp.READ else Kind.ATOMIC_ACK
        if info.kind is not wanted or not wqe.needs_response:
            return WcStatus.BAD_RESP_ERR
        if info.has_aeth and AethType(frame.syndrome >> 5 & 3) is not AethType.ACK:
            return WcStatus.BAD_RESP_ERR
        if wanted is Kind.ATOMIC_ACK:
            return WcStatus.SUCCESS
        index, pmtu = wqe.acked, self.qp.attrs.path_mtu
        if len(frame.payload) != min(pmtu, wqe.wr.length - index * pmtu):
            return WcStatus.LOC_LEN_ERR
        last = index == wqe.count - 1
        may_start = index == 0 or index in wqe.restarts
        if info.ends != last or (info.starts and not may_start) or (index == 0 and not info.starts):
            return WcStatus.BAD_RESP_ERR
        return WcStatus.SUCCESS

    def _store(self, wqe: SendWqe, frame: Frame) -> WcStatus:
        """Data into the requester's memory; an ATOMIC result in host byte order (R-AT-2)."""
        try:
            if wqe.wr.op is WrOp.READ:
                scatter(self.qp.keys, self.qp.pd, wqe.wr.sges, wqe.acked * self.qp.attrs.path_mtu, frame.payload)
            else:
                scatter(self.qp.keys, self.qp.pd, wqe.wr.sges, 0, frame.original.to_bytes(8, "little"))
        except ProtectionError:
            return WcStatus.LOC_PROT_ERR  # R-RSP-8
        return WcStatus.SUCCESS

    # ---- retiring, retrying, failing -----------------------------------------------------------------------

    def _retire(self) -> None:
        """Complete finished requests from the oldest on, in order (R-CQ-1, R-ERR-3)."""
        while self.started and self.qp.state is not QpState.ERR:
            head = self.started[0]
            if head.error is not None:
                self._fail(head.error)
                return
            if not head.done:
                return
            self.started.popleft()
            self.qp.complete_send(head.wr, WcStatus.SUCCESS)

    def _fail(self, status: WcStatus) -> None:
        """The oldest request ends with `status`, the QP goes to ERR, the rest is flushed (R-ERR-3)."""
        if self.started:
            self.qp.complete_send(self.started.popleft().wr, status)
        self.qp.enter_error()

    def _retry(self, now: int) -> None:
        """Replay from una (R-RTY-1), or give up (R-RTC-1)."""
        if self.retries_left == 0:
            self._fail(WcStatus.RETRY_EXC_ERR)
            return
        self.retries_left -= 1
        self.counters["retries"] += 1
        self.retry_started = True
        self.cursor = self.una
        self._start_timer(now)

    def _at(self, psn: int) -> SendWqe | None:
        """The started request that holds `psn`."""
        for wqe in self.started:
            if psn_in_window(psn, wqe.first_psn, wqe.end_psn):
                return wqe
        return None

    # ---- time ----------------------------------------------------------------------------------------------

    def _start_timer(self, now: int) -> None:
        timeout = ack_timeout_ns(self.qp.attrs.timeout)
        self.timer_at = None if timeout is None else now + timeout  # R-TMO-1: exactly T

    def advance(self, now: int) -> None:
        """Let timers that are due at `now` fire."""
        if self.rnr_until is not None and now >= self.rnr_until:
            self.rnr_until = None
            self.retry_started = False
            self.cursor = self.una  # R-RNR-1: from p again
            self._start_timer(now)
        if self.timer_at is not None and now >= self.timer_at:
            self._timeout(now)

    def _timeout(self, now: int) -> None:
        if not self.outstanding:
            self.timer_at = None
        elif self.cursor != self.nxt:
            self._start_timer(now)  # R-RTY-4: the replay has not left yet
        else:
            self.counters["timeouts"] += 1
            self._retry(now)  # R-TMO-3

    def next_deadline(self) -> int | None:
        """When `advance` would do something, or None."""
        times = [t for t in (self.timer_at, self.rnr_until) if t is not None]
        return min(times, default=None)
