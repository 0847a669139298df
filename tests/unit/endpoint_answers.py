"""Answers to the endpoint's requester and what it sends and completes."""

from __future__ import annotations

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import WcStatus, WrOp
from rnic_tb.endpoint.constants import NakCode, ack_timeout_ns
from rnic_tb.endpoint.pair import ACK, Pair, nak

OK = WcStatus.SUCCESS
SEQ = nak(NakCode.PSN_SEQUENCE)
T = ack_timeout_ns(8)
assert T is not None


def shape(frames: list[Frame], pair: Pair) -> list[tuple[Op, int, bool]]:
    """(opcode, PSN from the first, AckReq)."""
    return [(f.opcode, (f.psn - pair.psn_a) & 0xFFFFFF, f.ackreq) for f in frames]


def psns(frames: list[Frame], pair: Pair) -> list[int]:
    return [psn for _, psn, _ in shape(frames, pair)]


def write(pair: Pair, wr_id: int, length: int, **fields) -> None:
    pair.a.post(WrOp.WRITE, wr_id, 0, length, remote_addr=pair.b.base, rkey=pair.b.key, **fields)


def read(pair: Pair, wr_id: int, length: int, offset: int = 0, **fields) -> None:
    pair.a.post(WrOp.READ, wr_id, offset, length, remote_addr=pair.b.base, rkey=pair.b.key, **fields)


def fadd(pair: Pair, wr_id: int, **fields) -> None:
    pair.a.post(WrOp.FETCH_ADD, wr_id, 64, 8, remote_addr=pair.b.base, rkey=pair.b.key, **({"add": 1} | fields))


def response(pair: Pair, op: Op, psn: int, size: int = 256, code: int = ACK) -> Frame:
    data = bytes((psn + i) & 255 for i in range(size))
    return pair.answer(op, psn, payload=data, syndrome=code, msn=1)


def atomic_ack(pair: Pair, psn: int, original: int = 5) -> Frame:
    return pair.answer(Op.RC_ATOMIC_ACK, psn, original=original, syndrome=ACK, msn=1)


FIRST, MIDDLE, LAST, ONLY = Op.RC_READ_RESP_FIRST, Op.RC_READ_RESP_MIDDLE, Op.RC_READ_RESP_LAST, Op.RC_READ_RESP_ONLY
