"""RC responder: PSN and NAK state, READ and ATOMIC with their replay store, duplicates, answers.

A request is checked in the order of rules.md 8.1 and executed at once; READ data is read when its response leaves.
Answers wait in one queue per QP in PSN order (`jobs`); `pull` hands them out packet by packet.
Source: rules.md section 8.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import OPCODES, Kind, Opcode, OpcodeInfo, Transport, opcode_of
from rnic.wire.psn import psn_add, psn_after, psn_in_window, psn_packets

from .constants import (
    NO_CREDIT_LIMIT,
    PSN_MASK,
    Access,
    AethType,
    Event,
    NakCode,
    QpState,
    WcStatus,
    syndrome,
)
from .inbound import Inbound, InvalidateError, ReceiverNotReady, RequestError, invalid_request

if TYPE_CHECKING:
    from .qp import QueuePair


@dataclass
class Resource:
    """A READ or ATOMIC kept for duplicates (R-DUP-3, R-DUP-5). `original` is the saved value of an ATOMIC."""

    kind: Kind
    first_psn: int
    count: int
    va: int
    rkey: int
    length: int
    original: int = 0

    def holds(self, psn: int) -> bool:
        return psn_in_window(psn, self.first_psn, psn_add(self.first_psn, self.count))


@dataclass
class Job:
    """An answer that has not left. A READ answer takes several pulls; `sent` counts its packets."""

    psn: int
    msn: int
    opcode: Opcode | None = None  # None: READ response
    syndrome: int = syndrome(AethType.ACK, NO_CREDIT_LIMIT)
    original: int = 0
    resource: Resource | None = None
    va: int = 0
    rkey: int = 0
    length: int = 0
    sent: int = 0
    replay: bool = False
    middle_restart: bool = False

    @property
    def is_plain_ack(self) -> bool:
        return self.opcode is Opcode.RC_ACK and self.syndrome >> 5 == int(AethType.ACK)


class RcResponder(Inbound):
    """The receive side of one RC queue pair."""

    def __init__(self, qp: QueuePair):
        super().__init__(qp)
        self.msn = 0  # R-MSN-1
        self.ack_psn = 0  # newest PSN a repeated ACK may name (R-DUP-2)
        self.nak_state: str | None = None  # "seq" or "rnr": packets ahead are dropped silently (R-SEQ-1, R-SEQ-2)
        self.resources: deque[Resource] = deque()
        self.jobs: deque[Job] = deque()
        self.counters = {"duplicates": 0, "seq_naks": 0, "rnr_naks": 0, "dropped_ahead": 0, "dropped_dups": 0}

    def load(self, rq_psn: int) -> None:
        super().load(rq_psn)
        self.ack_psn = psn_add(rq_psn, -1)

    def clear(self) -> None:
        super().clear()
        self.msn = 0
        self.nak_state = None
        self.resources.clear()
        self.jobs.clear()

    # ---- requests ------------------------------------------------------------------------------------------

    def receive(self, frame: Frame, now: int) -> None:
        """Take a request packet."""
        info = OPCODES[frame.opcode]
        if psn_after(frame.psn, self.epsn):  # 8.1 check 1
            self._ahead()
        elif frame.psn != self.epsn:
            self._duplicate(frame, info)
        else:
            self.nak_state = None  # R-SEQ-1: the expected packet is here
            self._expected(frame, info)

    def _ahead(self) -> None:
        if self.nak_state is not None:
            self.counters["dropped_ahead"] += 1
            return
        self.nak_state = "seq"
        self.counters["seq_naks"] += 1
        self._nak(self.epsn, syndrome(AethType.NAK, NakCode.PSN_SEQUENCE))

    def _expected(self, frame: Frame, info: OpcodeInfo) -> None:
        try:
            self._execute(frame, info)
        except ReceiverNotReady:
            self.nak_state = "rnr"
            self.counters["rnr_naks"] += 1
            self._nak(frame.psn, syndrome(AethType.RNR, self.qp.attrs.min_rnr_timer))  # R-RNR-4
        except InvalidateError:
            self.fail_receive(WcStatus.LOC_QP_OP_ERR)  # 8.1 check 12: no NAK
            self.qp.enter_error(keep_answers=True)
        except RequestError as error:
            self._fatal(frame.psn, error)

    def _execute(self, frame: Frame, info: OpcodeInfo) -> None:
        """Checks 2 to 12 in order, then the effect and the answer."""
        if not self.sequence_ok(info):  # check 2
            raise invalid_request()
        self.check_rights(info)  # check 3
        self._check_resources(info)  # check 4
        self.take_receive(info)  # check 5
        self.check_length(frame, info)  # check 6
        if info.kind is Kind.READ_REQ:
            self._read(frame)
        elif info.has_atomiceth:
            self._atomic(frame, info)
        else:
            self._data(frame, info)

    def _data(self, frame: Frame, info: OpcodeInfo) -> None:
        """SEND and WRITE packets."""
        if info.kind is Kind.WRITE:
            self.open_write(frame, info)  # check 7
            self.place_write(frame, info)  # check 8
        else:
            self.place_send(frame)  # checks 10, 11
        self.close_message(frame, info)  # check 12
        if self.qp.state is QpState.ERR:
            return  # the receive CQ overflowed (R-CQ-6)
        self.epsn = psn_add(self.epsn, 1)
        self.ack_psn = frame.psn
        if info.ends:
            self.msn = psn_add(self.msn, 1)  # R-MSN-1
        if frame.ackreq:  # R-ACK-1
            self._push_ack(frame.psn)

    def _check_resources(self, info: OpcodeInfo) -> None:
        """Check 4: READs and ATOMICs not yet answered, against max_dest_rd_atomic."""
        if info.kind is not Kind.READ_REQ and not info.has_atomiceth:
            return
        unanswered = sum(1 for job in self.jobs if job.resource is not None and not job.replay)
        if unanswered >= self.qp.attrs.max_dest_rd_atomic:
            raise invalid_request()

    def _read(self, frame: Frame) -> None:
        length = frame.dma_length
        if length:  # R-RES-2
            self.remote_region(frame.rkey, frame.va, length, Access.REMOTE_READ)
        count = psn_packets(length, self.qp.attrs.path_mtu)
        resource = Resource(Kind.READ_REQ, frame.psn, count, frame.va, frame.rkey, length)
        self._save(resource)
        self.epsn = psn_add(self.epsn, count)  # R-PSN-3
        self.msn = psn_add(self.msn, 1)  # R-MSN-1: when the request is accepted
        self.jobs.append(Job(frame.psn, self.msn, resource=resource, va=frame.va, rkey=frame.rkey, length=length))

    def _atomic(self, frame: Frame, info: OpcodeInfo) -> None:
        region = self.remote_region(frame.rkey, frame.va, 8, Access.REMOTE_ATOMIC)  # check 7
        if frame.va % 8:
            raise invalid_request()  # check 9, R-AT-1
        original = int.from_bytes(region.read(frame.va, 8), "little")  # R-AT-2: host order in memory
        if info.kind is Kind.FETCH_ADD:
            result = (original + frame.swap) & (1 << 64) - 1  # R-OPC-3, R-AT-3
        else:
            result = frame.swap if original == frame.compare else original
        region.write(frame.va, result.to_bytes(8, "little"))
        resource = Resource(info.kind, frame.psn, 1, frame.va, frame.rkey, 8, original)
        self._save(resource)
        self.epsn = psn_add(self.epsn, 1)
        if self.qp.policy.reack_names_atomics:
            self.ack_psn = frame.psn
        self.msn = psn_add(self.msn, 1)  # R-MSN-1: executed
        self.jobs.append(Job(frame.psn, self.msn, Opcode.RC_ATOMIC_ACK, original=original, resource=resource))

    def _save(self, resource: Resource) -> None:
        """Keep for duplicates; the oldest makes room (R-DUP-6)."""
        self.resources.append(resource)
        while len(self.resources) > self.qp.attrs.max_dest_rd_atomic:
            self.resources.popleft()

    def _fatal(self, psn: int, error: RequestError) -> None:
        """8.2: NAK with the offending PSN, the receive in use fails, QP to ERR; else an async event."""
        self._nak(psn, syndrome(AethType.NAK, error.code))
        if not self.fail_receive(error.wc_status):
            access = error.code is NakCode.REMOTE_ACCESS
            self.qp.raise_event(Event.QP_ACCESS_ERR if access else Event.QP_REQ_ERR)
        self.qp.enter_error(keep_answers=True)

    # ---- duplicates (8.4) ----------------------------------------------------------------------------------

    def _duplicate(self, frame: Frame, info: OpcodeInfo) -> None:
        """A PSN behind ePSN: nothing is executed twice, nothing of the current message is touched (R-DUP-8)."""
        self.counters["duplicates"] += 1
        if info.kind in (Kind.SEND, Kind.WRITE):
            self._push_ack(self.ack_psn)  # R-DUP-1, R-DUP-2
        elif info.kind is Kind.READ_REQ:
            self._duplicate_read(frame)
        else:
            self._duplicate_atomic(frame, info)

    def _duplicate_read(self, frame: Frame) -> None:
        saved = self._find(frame.psn, Kind.READ_REQ)
        if saved is None or not self._inside(saved, frame):
            self.counters["dropped_dups"] += 1  # R-DUP-3, R-DUP-7: no answer
            return
        job = Job(
            frame.psn,
            self.msn,
            resource=saved,
            va=frame.va,
            rkey=frame.rkey,
            length=frame.dma_length,
            replay=True,
            middle_restart=frame.psn != saved.first_psn and not self.qp.policy.read_restart_with_first,
        )
        self._replace_stream(saved, job)

    def _inside(self, saved: Resource, frame: Frame) -> bool:
        """R-DUP-3: the same bytes for the same PSNs, never more than the original (R-DUP-4: range is kept)."""
        skipped = ((frame.psn - saved.first_psn) & PSN_MASK) * self.qp.attrs.path_mtu
        same_place = frame.rkey == saved.rkey and frame.va == saved.va + skipped
        return same_place and frame.dma_length <= saved.length - skipped

    def _replace_stream(self, saved: Resource, job: Job) -> None:
        """The new stream takes the place of one still running for the same READ, else goes behind (R-DUP-3)."""
        for position, old in enumerate(self.jobs):
            if old.resource is saved:
                job.replay = old.replay
                self.jobs[position] = job
                return
        self.jobs.append(job)

    def _duplicate_atomic(self, frame: Frame, info: OpcodeInfo) -> None:
        saved = self._find(frame.psn, info.kind)
        if saved is None:
            self.counters["dropped_dups"] += 1  # R-DUP-5
            return
        if not any(job.resource is saved for job in self.jobs):
            self.jobs.append(
                Job(frame.psn, self.msn, Opcode.RC_ATOMIC_ACK, original=saved.original, resource=saved, replay=True)
            )

    def _find(self, psn: int, kind: Kind) -> Resource | None:
        for resource in self.resources:
            if resource.kind is kind and resource.holds(psn):
                return resource
        return None

    # ---- answers -------------------------------------------------------------------------------------------

    def _push_ack(self, psn: int) -> None:
        """Queue an ACK; with coalescing it replaces an unsent ACK that is last in line (R-ACK-2)."""
        job = Job(psn, self.msn, Opcode.RC_ACK)
        if self.qp.policy.coalesce_acks and self.jobs and self.jobs[-1].is_plain_ack:
            self.jobs[-1] = job
        else:
            self.jobs.append(job)

    def _nak(self, psn: int, code: int) -> None:
        self.jobs.append(Job(psn, self.msn, Opcode.RC_ACK, syndrome=code))

    def pull(self) -> Frame | None:
        """The next answer packet, in PSN order (R-RES-7), or None."""
        while self.jobs:
            job = self.jobs[0]
            if job.opcode is None:
                frame = self._read_response(job)
                if frame is not None:
                    return frame
                continue  # a replay whose region is gone
            self.jobs.popleft()
            return self.qp.frame(
                job.opcode, job.psn, syndrome=job.syndrome, msn=job.msn, original=job.original
            )
        return None

    def _read_response(self, job: Job) -> Frame | None:
        """The next response packet of a READ (R-PSN-4); the region is checked again each time (R-RES-1)."""
        pmtu = self.qp.attrs.path_mtu
        offset = job.sent * pmtu
        size = min(pmtu, job.length - offset)
        try:
            data = self._read_bytes(job, offset, size)
        except RequestError as error:
            self.jobs.popleft()
            if not job.replay:  # R-DUP-7
                self.jobs.clear()  # the NAK takes this place in PSN order; what is behind it never happened
                self._fatal(psn_add(job.psn, job.sent), error)
            return None
        starts = job.sent == 0 and not job.middle_restart
        ends = offset + size == job.length
        frame = self.qp.frame(
            opcode_of(Transport.RC, Kind.READ_RESP, starts=starts, ends=ends),
            psn_add(job.psn, job.sent),
            payload=data,
            syndrome=syndrome(AethType.ACK, NO_CREDIT_LIMIT),
            msn=job.msn,
        )
        job.sent += 1
        if ends:
            self.jobs.popleft()
        return frame

    def _read_bytes(self, job: Job, offset: int, size: int) -> bytes:
        if size == 0:
            return b""
        region = self.remote_region(job.rkey, job.va + offset, size, Access.REMOTE_READ)
        return region.read(job.va + offset, size)
