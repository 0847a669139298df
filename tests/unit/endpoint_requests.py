"""Request frames for the endpoint's responder and what it answers."""

from __future__ import annotations

from rnic.wire.frame import Frame
from rnic.wire.opcode import Opcode as Op
from rnic_tb.endpoint import (
    Event,
    QpState,
)
from rnic_tb.endpoint.constants import NakCode
from rnic_tb.endpoint.pair import Pair, nak

DATA = bytes(range(256))
INVALID = nak(NakCode.INVALID_REQUEST)
ACCESS = nak(NakCode.REMOTE_ACCESS)


def answers(frames: list[Frame], pair: Pair) -> list[tuple[Op, int, int, int]]:
    """(opcode, PSN from a's first, syndrome, MSN) of what b sent."""
    return [(f.opcode, (f.psn - pair.psn_a) & 0xFFFFFF, f.syndrome, f.msn) for f in frames]


def acks(frames: list[Frame], pair: Pair) -> list[tuple[int, int, int]]:
    """(PSN, syndrome, MSN); everything must be an ACK packet."""
    assert all(f.opcode is Op.RC_ACK for f in frames)
    return [row[1:] for row in answers(frames, pair)]


def write(pair: Pair, psn: int, data: bytes = b"abcd", offset: int = 0, **fields) -> Frame:
    return pair.frame(
        Op.RC_WRITE_ONLY, psn, payload=data, **(pair.write_fields(len(data), offset) | {"ackreq": True} | fields)
    )


def send(pair: Pair, psn: int, data: bytes = b"abcd", op: Op = Op.RC_SEND_ONLY, **fields) -> Frame:
    return pair.frame(op, psn, payload=data, **({"ackreq": True} | fields))


def read(pair: Pair, psn: int, length: int, offset: int = 0, **fields) -> Frame:
    return pair.frame(Op.RC_READ_REQUEST, psn, **(pair.write_fields(length, offset) | {"ackreq": True} | fields))


def fadd(pair: Pair, psn: int, add: int, offset: int = 0, op: Op = Op.RC_FETCH_ADD, **fields) -> Frame:
    where = {"va": pair.b.base + offset, "rkey": pair.b.key}
    return pair.frame(op, psn, **(where | {"swap": add, "ackreq": True} | fields))


def fatal(pair: Pair, frame: Frame, code: int, psn: int = 0, event: Event | None = Event.QP_REQ_ERR) -> None:
    """`frame` draws one fatal NAK and sends b to ERR; later packets draw nothing (8.2)."""
    assert acks(pair.b.take(frame), pair) == [(psn, code, pair.b.qp.responder.msn)]
    assert pair.b.qp.state is QpState.ERR
    assert pair.b.qp.events == ([event] if event else [])
    assert pair.b.take(write(pair, psn)) == []
