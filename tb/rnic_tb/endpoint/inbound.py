"""What RC and UC share on the receive side: sequence, checks 2 to 12 of rules.md 8.1, placement, receive completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import Kind, OpcodeInfo

from .constants import MAX_MESSAGE, Access, NakCode, WcFlag, WcOp, WcStatus
from .memory import MemoryRegion, ProtectionError
from .queues import RecvWr, WorkCompletion, scatter

if TYPE_CHECKING:
    from .qp import QueuePair


class RequestError(Exception):
    """A request that is answered with a fatal NAK; `wc_status` is for the receive WQE in use."""

    def __init__(self, code: NakCode, wc_status: WcStatus = WcStatus.LOC_QP_OP_ERR):
        super().__init__(code.name)
        self.code = code
        self.wc_status = wc_status


class ReceiverNotReady(Exception):
    """No receive WQE for a packet that needs one."""


class InvalidateError(Exception):
    """The key of a SEND with invalidate may not be invalidated (8.1 check 12)."""


def invalid_request() -> RequestError:
    return RequestError(NakCode.INVALID_REQUEST)


@dataclass
class WriteState:
    """The WRITE message being received: where the next byte goes and how many are to come."""

    va: int
    rkey: int
    resid: int
    length: int


class Inbound:
    """Receives SEND and WRITE messages of a connected QP: sequence, placement, receive completions."""

    #: QP right a request kind needs (8.1 check 3).
    RIGHTS = {
        Kind.WRITE: Access.REMOTE_WRITE,
        Kind.READ_REQ: Access.REMOTE_READ,
        Kind.CMP_SWAP: Access.REMOTE_ATOMIC,
        Kind.FETCH_ADD: Access.REMOTE_ATOMIC,
    }

    def __init__(self, qp: QueuePair):
        self.qp = qp
        self.epsn = 0
        self.open_kind: Kind | None = None  # kind of the message whose LAST is still to come
        self.write: WriteState | None = None
        self.rwqe: RecvWr | None = None
        self.placed = 0  # bytes of the SEND so far

    def load(self, rq_psn: int) -> None:
        """Start expecting `rq_psn` (INIT to RTR, R-PSN-5)."""
        self.epsn = rq_psn

    def clear(self) -> None:
        """Forget the message being received."""
        self.open_kind = self.write = self.rwqe = None
        self.placed = 0

    def sequence_ok(self, info: OpcodeInfo) -> bool:
        """8.1 check 2: FIRST/MIDDLE/LAST nest, and one message is one kind."""
        if info.starts:
            return self.open_kind is None
        return self.open_kind is info.kind

    def check_rights(self, info: OpcodeInfo) -> None:
        """8.1 check 3."""
        if self.RIGHTS.get(info.kind, Access.NONE) & ~self.qp.attrs.access:
            raise invalid_request()

    def take_receive(self, info: OpcodeInfo) -> None:
        """8.1 check 5; a SEND takes its receive WQE here, WRITE_IMM only makes sure there is one (R-OPC-2, R-RES-5)."""
        if not info.takes_rwqe:
            return
        if info.kind is Kind.WRITE:
            if not self.qp.receive_available():
                raise ReceiverNotReady
            return
        self.rwqe = self.qp.take_receive()
        self.placed = 0
        if self.rwqe is None:
            raise ReceiverNotReady

    def check_length(self, frame: Frame, info: OpcodeInfo) -> None:
        """8.1 check 6: payload size for the opcode, padding, message size (R-LEN-1, R-LEN-2, R-LEN-4, R-PAD-2)."""
        if not info.payload_ok(len(frame.payload), self.qp.attrs.path_mtu):
            raise invalid_request()
        if info.has_reth and frame.dma_length > MAX_MESSAGE:
            raise invalid_request()

    def open_write(self, frame: Frame, info: OpcodeInfo) -> None:
        """8.1 check 7 for WRITE: at FIRST/ONLY the whole range, later what is left (R-RES-1, R-RES-2)."""
        if info.starts:
            self.write = WriteState(frame.va, frame.rkey, frame.dma_length, frame.dma_length)
        write = self.write
        if write is not None and write.resid:
            self.remote_region(write.rkey, write.va, write.resid, Access.REMOTE_WRITE)

    def remote_region(self, rkey: int, va: int, length: int, need: Access) -> MemoryRegion:
        """8.1 check 7: the region of a remote access. Raises RequestError (NAK remote access)."""
        try:
            return self.qp.keys.remote(rkey, self.qp.pd, self.qp.qpn, va, length, need)
        except ProtectionError:
            raise RequestError(NakCode.REMOTE_ACCESS, WcStatus.LOC_PROT_ERR) from None

    def place_write(self, frame: Frame, info: OpcodeInfo) -> None:
        """8.1 check 8, then the data (R-LEN-3, R-RES-3)."""
        write = self.write
        size, pmtu = len(frame.payload), self.qp.attrs.path_mtu
        if write is None:
            raise invalid_request()
        fits = size == pmtu and not info.ends if write.resid > pmtu else size == write.resid and info.ends
        if not fits:
            raise invalid_request()
        if size:
            self.remote_region(write.rkey, write.va, size, Access.REMOTE_WRITE).write(write.va, frame.payload)
        write.va += size
        write.resid -= size

    def place_send(self, frame: Frame) -> None:
        """8.1 checks 10 and 11, then the data."""
        rwqe, size = self.rwqe, len(frame.payload)
        if rwqe is None:
            raise invalid_request()
        if self.placed + size > rwqe.length:
            raise RequestError(NakCode.INVALID_REQUEST, WcStatus.LOC_LEN_ERR)
        try:
            scatter(self.qp.keys, self.qp.pd, rwqe.sges, self.placed, frame.payload)
        except ProtectionError:
            raise RequestError(NakCode.REMOTE_OPERATIONAL, WcStatus.LOC_PROT_ERR) from None
        self.placed += size

    def close_message(self, frame: Frame, info: OpcodeInfo) -> None:
        """After the packet is placed: sequence state, and at the end of a message its completion."""
        self.open_kind = None if info.ends else info.kind
        if not info.ends:
            return
        if info.makes_cqe:
            self._complete(frame, info)
        self.write = None

    def _complete(self, frame: Frame, info: OpcodeInfo) -> None:
        """The receive completion (R-CQ-2, R-CQ-3, R-CQ-4)."""
        if info.has_ieth:
            self._invalidate(frame.rkey)  # before the completion (rules.md 19.2)
        is_write = info.kind is Kind.WRITE
        rwqe = self.qp.take_receive() if is_write else self.rwqe
        length = self.write.length if is_write and self.write is not None else self.placed
        self.rwqe = None
        if rwqe is None:
            raise ReceiverNotReady
        flags = (WcFlag.WITH_IMM if info.has_imm else WcFlag.NONE) | (
            WcFlag.WITH_INV if info.has_ieth else WcFlag.NONE
        )
        self.qp.complete_receive(
            WorkCompletion(
                wr_id=rwqe.wr_id,
                status=WcStatus.SUCCESS,
                opcode=WcOp.RECV_RDMA_WITH_IMM if is_write else WcOp.RECV,
                qpn=self.qp.qpn,
                byte_len=length,
                imm=frame.imm if info.has_imm else 0,
                inv_rkey=frame.rkey if info.has_ieth else 0,
                flags=flags,
                src_qpn=self.qp.attrs.dest_qpn,
                solicited=frame.se,
            )
        )

    def _invalidate(self, rkey: int) -> None:
        """8.1 check 12."""
        try:
            self.qp.keys.invalidate_by_peer(rkey, self.qp.qpn, self.qp.pd)
        except ProtectionError:
            raise InvalidateError from None

    def fail_receive(self, status: WcStatus) -> bool:
        """Complete the receive WQE in use with an error; False when there is none."""
        rwqe, self.rwqe = self.rwqe, None
        if rwqe is None:
            return False
        self.qp.complete_receive(WorkCompletion(rwqe.wr_id, status, WcOp.RECV, self.qp.qpn))
        return True
