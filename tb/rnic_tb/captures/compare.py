"""The one comparison of frames and completions against a capture, and the one table of allowed differences.

It judges any implementation: header for header and payload for payload, except for `EXCEPTIONS`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame, FrameError, parse_frame
from rnic.wire.opcode import Opcode

from .steps import ExpectedWc

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class FrameException:
    """A difference between the peer and a right implementation.

    `names`: capture names (wildcards) it concerns; `field`: the differing :class:`Frame` field; `actual`: the value the
    rules ask for, None for any; `expected`: the peer's value, None for any.
    """

    names: str
    field: str
    expected: object
    actual: object
    rule: str
    reason: str


REPEATED_READ = "rxe goes on with MIDDLE or LAST in a repeated READ, others start again (section 21 #4)"

EXCEPTIONS: tuple[FrameException, ...] = (
    FrameException("*", "ident", None, None, "R-FRM-4", "IPv4 identification may be any value; checksum and ICRC follow"),
    FrameException("rc_err_send_too_long", "syndrome", 0x63, 0x61, "8.1 #10", "rxe answers remote operational error"),
    FrameException("crafted_last_zero", "psn", 0x501, 0x500, "R-LEN-3", "FIRST carries all of the RETH length: rxe lets it pass"),
    FrameException("rc_*read_resp*", "opcode", Opcode.RC_READ_RESP_MIDDLE, Opcode.RC_READ_RESP_FIRST, "R-RSP-6", REPEATED_READ),
    FrameException("rc_*read_resp*", "opcode", Opcode.RC_READ_RESP_LAST, Opcode.RC_READ_RESP_ONLY, "R-RSP-6", REPEATED_READ),
    FrameException("rc_*read_resp*", "syndrome", 0, 0x1F, "R-RSP-6", "FIRST has the AETH that rxe's MIDDLE lacks"),
    FrameException("rc_*read_resp*", "msn", 0, None, "R-RSP-6", "FIRST has the AETH that rxe's MIDDLE lacks"),
    FrameException("rc_loss_multi_ack1", "payload", None, None, "", "the recorded program rewrote the buffer before it was sent"),
    FrameException("crafted_read_wrong_psn_next", "psn", 0xFFFFFF, 0x4FF, "R-DUP-2", "rxe's ACK PSN before any ACK is -1"),
)


#: (capture, end) no right implementation repeats frame for frame, and why.
LEFT_OUT: dict[tuple[str, str], str] = {
    ("rc_rnr_multi", "b"): "rxe NAKs the packets behind an RNR NAK (section 21 #3, R-SEQ-2)",
    ("rc_rnr_write_imm", "a"): "rxe goes back to its oldest PSN after an RNR NAK that acknowledged it (R-RNR-1)",
    ("uc_loss_send_middle", "b"): "rxe loses the message behind a lost one (R-UC-1)",
    ("crafted_uc_gap", "a"): "rxe stays stuck after a FIRST without LAST (R-UC-1)",
    ("crafted_send_inv_badkey", "a"): "rxe ACKs a SEND whose invalidate fails (8.1 #12: no answer)",
    ("crafted_send_inv_mr", "a"): "rxe ACKs a SEND whose invalidate fails (8.1 #12: no answer)",
    ("crafted_req_atomic_plain_ack", "a"): "rxe completes an atomic by a plain ACK (R-RSP-3: implied NAK)",
    ("crafted_req_read_wrong_len", "a"): "rxe takes a READ response of the wrong length (R-RSP-5: LOC_LEN_ERR)",
    ("crafted_req_nak_40", "a"): "rxe treats a reserved syndrome as an ACK (rules.md 7.4: ignored)",
    ("crafted_req_nak_64", "a"): "rxe ends with an error on NAK 4 (rules.md 7.4: ignored)",
}


@dataclass(frozen=True)
class Difference:
    """A header field (or "frame", "length") that is not as recorded."""

    number: int
    field: str
    expected: object
    actual: object

    def __str__(self) -> str:
        return f"frame {self.number}: {self.field} is {_show(self.actual)}, recorded {_show(self.expected)}"


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return f"{value[:24].hex()}{'...' if len(value) > 24 else ''} ({len(value)} bytes)"
    return hex(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def compare_frame(expected: bytes, actual: bytes, name: str, number: int = 0) -> list[Difference]:
    """Differences of one frame, header field by header field and in the payload.

    IP checksum and ICRC are checked by parsing: they must be right, not equal. `name` is the capture's.
    """
    want = parse_frame(expected)
    try:
        have = parse_frame(actual)
    except FrameError as error:
        return [Difference(number, "frame", want.opcode, str(error))]
    out = []
    for field in dataclasses.fields(Frame):
        wanted, had = getattr(want, field.name), getattr(have, field.name)
        if wanted != had and not _excused(name, field.name, wanted, had):
            out.append(Difference(number, field.name, wanted, had))
    if len(expected) != len(actual) and want.opcode is have.opcode:
        out.append(Difference(number, "length", len(expected), len(actual)))
    return out


def _excused(name: str, field: str, expected: object, actual: object) -> bool:
    return any(
        e.field == field and fnmatch(name, e.names) and e.expected in (None, expected) and e.actual in (None, actual)
        for e in EXCEPTIONS
    )


def compare_frames(
    expected: Sequence[bytes], actual: Sequence[bytes], name: str, coalesced_acks: bool = False
) -> list[Difference]:
    """Differences of what one end sent. With `coalesced_acks` a recorded plain ACK may be covered by a later one.

    An ACK is covered by a later ACK, READ response or ATOMIC ACK of the same stream (R-ACK-1, R-ACK-2).
    """
    out: list[Difference] = []
    have = list(actual)
    for number, want in enumerate(expected, 1):
        if not have:
            out.append(Difference(number, "frame", parse_frame(want).opcode, "nothing"))
            continue
        if coalesced_acks and _covered(want, have[0]):
            continue
        out += compare_frame(want, have.pop(0), name, number)
    out += [Difference(len(expected) + i, "frame", "nothing", parse_frame(f).opcode) for i, f in enumerate(have, 1)]
    return out


def _covered(want: bytes, have: bytes) -> bool:
    """Is `want` a plain ACK and `have` an answer to a later PSN?"""
    ack, answer = parse_frame(want), parse_frame(have)
    plain = ack.opcode.name == "RC_ACK" and ack.syndrome >> 5 == 0
    newer = 0 < (answer.psn - ack.psn) & 0xFFFFFF < 1 << 23
    return plain and newer and answer.opcode.name in ("RC_ACK", "RC_ATOMIC_ACK") + tuple(
        f"RC_READ_RESP_{part}" for part in ("FIRST", "LAST", "ONLY")
    )


@dataclass(frozen=True)
class WcException:
    """A completion status where the peer and the rules differ."""

    names: str
    expected: int
    actual: int
    rule: str
    reason: str


WC_EXCEPTIONS: tuple[WcException, ...] = (
    WcException("rc_err_send_too_long", 2, 1, "8.1 #10", "rxe: LOC_QP_OP_ERR; rules: LOC_LEN_ERR at the receiver"),
    WcException("rc_err_recv_lkey", 2, 4, "8.1 #11", "rxe: LOC_QP_OP_ERR; pib and the rules' first choice: LOC_PROT_ERR"),
)


def compare_completion(expected: ExpectedWc, actual: ExpectedWc, name: str) -> list[str]:
    """Differences of a completion; in errors only wr_id and status count (R-ERR-2).

    Byte length counts for receives, READ and ATOMIC (R-CQ-3), immediate and flags for receives (R-CQ-4; the GRH flag of
    connected receives, which rxe always sets, does not count).
    """
    out = []
    excused = any(
        fnmatch(name, e.names) and (e.expected, e.actual) == (expected.status, actual.status) for e in WC_EXCEPTIONS
    )
    if expected.wr_id != actual.wr_id or (expected.status != actual.status and not excused):
        out.append(f"wr {actual.wr_id} status {actual.status}, recorded wr {expected.wr_id} status {expected.status}")
    if expected.status or actual.status:
        return out
    if expected.opcode is None:
        return out
    if expected.opcode != actual.opcode:
        out.append(f"wr {actual.wr_id} opcode {actual.opcode}, recorded {expected.opcode}")
    receive = expected.opcode >= 128
    if (receive or expected.opcode in (2, 3, 4)) and expected.length != actual.length:
        out.append(f"wr {actual.wr_id} length {actual.length}, recorded {expected.length}")
    if receive and (expected.imm, (expected.flags or 0) & ~1) != (actual.imm, (actual.flags or 0) & ~1):
        out.append(f"wr {actual.wr_id} imm/inv {actual.imm} flags {actual.flags}, recorded {expected}")
    return out
