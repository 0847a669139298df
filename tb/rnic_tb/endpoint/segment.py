"""From a work request to its packets: how many, which opcode, which headers, which bytes.

`request_frame` is a pure function of the request and the packet's place in it, so a packet sent again is the same
packet (R-RTY-3). Source: rules.md R-REQ-1..3, R-PSN-3, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame
from rnic.wire.opcode import Kind, Opcode, Transport, opcode_of
from rnic.wire.psn import psn_add, psn_packets

from .constants import ATOMIC_OPS, LOCAL_OPS, SEND_OPS, WcStatus, WrOp
from .queues import SendWr, gather

if TYPE_CHECKING:
    from .qp import QueuePair


@dataclass
class SendWqe:
    """A send work request on its way. PSN counts are in packets from `first_psn`."""

    wr: SendWr
    count: int  # PSNs the request takes; 0 for local operations
    first_psn: int = 0
    sent: int = 0  # PSNs handed to the wire at least once
    acked: int = 0  # PSNs answered: ACKed, or response packets received in order
    restarts: frozenset[int] = frozenset()  # READ: packet numbers a repeated request started at (R-RSP-6)
    error: WcStatus | None = None  # found locally; reported when the request is the oldest (R-ERR-7)

    @property
    def needs_response(self) -> bool:
        """READ and ATOMIC: an ACK does not complete them (R-RSP-3)."""
        return self.wr.op is WrOp.READ or self.wr.op in ATOMIC_OPS

    @property
    def done(self) -> bool:
        return self.acked == self.count and self.sent == self.count

    @property
    def end_psn(self) -> int:
        """PSN behind the last one of the request."""
        return psn_add(self.first_psn, self.count)


def packet_count(wr: SendWr, pmtu: int) -> int:
    """PSNs of a request: one per packet, for a READ one per response packet (R-PSN-3)."""
    if wr.op in LOCAL_OPS:
        return 0
    if wr.op in ATOMIC_OPS:
        return 1
    return psn_packets(wr.length, pmtu)


def request_frame(qp: QueuePair, wqe: SendWqe, index: int, ackreq: bool) -> Frame:
    """Packet `index` of a request; for a READ the request for everything from `index` on (R-RTY-1).

    Raises ProtectionError when the data cannot be read.
    """
    psn = psn_add(wqe.first_psn, index)
    if wqe.wr.op is WrOp.READ:
        return _read_request(qp, wqe.wr, index, psn)
    if wqe.wr.op in ATOMIC_OPS:
        return _atomic_request(qp, wqe.wr, psn)
    return _data_packet(qp, wqe, index, psn, ackreq)


def _read_request(qp: QueuePair, wr: SendWr, index: int, psn: int) -> Frame:
    skipped = index * qp.attrs.path_mtu
    return qp.frame(
        Opcode.RC_READ_REQUEST,
        psn,
        ackreq=True,  # R-REQ-2: always answered; marked as rxe does
        va=(wr.remote_addr + skipped) & (1 << 64) - 1,
        rkey=wr.rkey,
        dma_length=wr.length - skipped,
    )


def _atomic_request(qp: QueuePair, wr: SendWr, psn: int) -> Frame:
    if wr.op is WrOp.FETCH_ADD:
        opcode, swap, compare = Opcode.RC_FETCH_ADD, wr.add, 0  # R-OPC-3: the addend is in the swap field
    else:
        opcode, swap, compare = Opcode.RC_CMP_SWAP, wr.swap, wr.compare
    return qp.frame(opcode, psn, ackreq=True, va=wr.remote_addr, rkey=wr.rkey, swap=swap, compare=compare)


def _data_packet(qp: QueuePair, wqe: SendWqe, index: int, psn: int, ackreq: bool) -> Frame:
    wr, pmtu = wqe.wr, qp.attrs.path_mtu
    starts, ends = index == 0, index == wqe.count - 1
    offset = index * pmtu
    size = min(pmtu, wr.length - offset)
    imm = ends and wr.op in (WrOp.SEND_IMM, WrOp.WRITE_IMM)
    inv = ends and wr.op is WrOp.SEND_INV
    fields: dict = {}
    if wr.op in (WrOp.WRITE, WrOp.WRITE_IMM) and starts:  # R-REQ-1: RETH on FIRST and ONLY
        fields |= {"va": wr.remote_addr, "rkey": wr.rkey, "dma_length": wr.length}
    if imm:
        fields["imm"] = wr.imm
    if inv:
        fields["rkey"] = wr.inv_rkey
    kind = Kind.SEND if wr.op in SEND_OPS else Kind.WRITE
    solicited = wr.solicited and ends and (kind is Kind.SEND or imm)  # R-REQ-3
    return qp.frame(
        opcode_of(Transport[qp.type.name], kind, starts=starts, ends=ends, imm=imm, inv=inv),
        psn,
        payload=message_bytes(qp, wr, offset, size),
        ackreq=ackreq,
        se=solicited,
        **fields,
    )


def message_bytes(qp: QueuePair, wr: SendWr, offset: int, size: int) -> bytes:
    """`size` bytes of the message from `offset`: inline data or gathered. Raises ProtectionError."""
    if wr.inline is not None:
        return wr.inline[offset : offset + size]
    return gather(qp.keys, qp.pd, wr.sges, offset, size)
