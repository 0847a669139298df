"""The one table of BTH opcodes, for Python and (as :func:`decode`) for hardware. Source: rules.md section 2."""

from dataclasses import dataclass

from amaranth import *
from amaranth.lib import data, enum

from .headers import (
    AETH,
    ATOMIC_ACK_ETH,
    ATOMIC_ETH,
    BTH,
    CNP_RESERVED_BYTES,
    DETH,
    IETH,
    IMM_DT,
    RETH,
)

__all__ = [
    "OPCODES", "Kind", "Opcode", "OpcodeFlags", "OpcodeInfo", "PayloadRule", "Transport", "decode", "flags_of",
    "opcode_of",
]  # fmt: skip


class Opcode(enum.Enum, shape=8):
    """BTH.OpCode: bits 7:5 transport, bits 4:0 operation."""

    RC_SEND_FIRST = 0x00
    RC_SEND_MIDDLE = 0x01
    RC_SEND_LAST = 0x02
    RC_SEND_LAST_IMM = 0x03
    RC_SEND_ONLY = 0x04
    RC_SEND_ONLY_IMM = 0x05
    RC_WRITE_FIRST = 0x06
    RC_WRITE_MIDDLE = 0x07
    RC_WRITE_LAST = 0x08
    RC_WRITE_LAST_IMM = 0x09
    RC_WRITE_ONLY = 0x0A
    RC_WRITE_ONLY_IMM = 0x0B
    RC_READ_REQUEST = 0x0C
    RC_READ_RESP_FIRST = 0x0D
    RC_READ_RESP_MIDDLE = 0x0E
    RC_READ_RESP_LAST = 0x0F
    RC_READ_RESP_ONLY = 0x10
    RC_ACK = 0x11
    RC_ATOMIC_ACK = 0x12
    RC_CMP_SWAP = 0x13
    RC_FETCH_ADD = 0x14
    RC_SEND_LAST_INV = 0x16
    RC_SEND_ONLY_INV = 0x17
    UC_SEND_FIRST = 0x20
    UC_SEND_MIDDLE = 0x21
    UC_SEND_LAST = 0x22
    UC_SEND_LAST_IMM = 0x23
    UC_SEND_ONLY = 0x24
    UC_SEND_ONLY_IMM = 0x25
    UC_WRITE_FIRST = 0x26
    UC_WRITE_MIDDLE = 0x27
    UC_WRITE_LAST = 0x28
    UC_WRITE_LAST_IMM = 0x29
    UC_WRITE_ONLY = 0x2A
    UC_WRITE_ONLY_IMM = 0x2B
    UD_SEND_ONLY = 0x64
    UD_SEND_ONLY_IMM = 0x65
    CNP = 0x81


class Transport(enum.Enum, shape=2):
    RC = 0
    UC = 1
    UD = 2
    CNP = 3


class Kind(enum.Enum, shape=4):
    SEND = 0
    WRITE = 1
    READ_REQ = 2
    READ_RESP = 3
    ACK = 4
    ATOMIC_ACK = 5
    CMP_SWAP = 6
    FETCH_ADD = 7
    CNP = 8


class PayloadRule(enum.Enum, shape=2):
    """Legal payload sizes (R-LEN-1, R-LEN-4)."""

    ZERO = 0
    PMTU = 1
    ONE_TO_PMTU = 2
    ZERO_TO_PMTU = 3


OpcodeFlags = data.StructLayout({
    "known": 1,
    "transport": Transport,
    "kind": Kind,
    "first": 1,
    "middle": 1,
    "last": 1,
    "only": 1,
    "starts": 1,
    "ends": 1,
    "has_deth": 1,
    "has_reth": 1,
    "has_atomiceth": 1,
    "has_aeth": 1,
    "has_atomicack": 1,
    "has_imm": 1,
    "has_ieth": 1,
    "payload": PayloadRule,
    "is_request": 1,
    "is_response": 1,
    "takes_rwqe": 1,
    "makes_cqe": 1,
    "header_words": 4,
})  # fmt: skip
"""What hardware knows of an opcode. All zero (``known`` too) for a value that is no opcode.

Exactly one of ``first``, ``middle``, ``last``, ``only`` is set for a known opcode; ``starts`` = first or only, ``ends``
= last or only. ``header_words`` is BTH and extended headers in 4-byte words (3..10).
"""


@dataclass(frozen=True)
class OpcodeInfo:
    """One row of the opcode table.

    ``header_bytes`` counts BTH and extended headers (for CNP also its 16 reserved bytes). ``takes_rwqe``: the packet
    consumes a receive WQE (R-OPC-2). ``makes_cqe``: it ends a message that makes a receive CQE. A CNP is neither
    request nor response (R-CC-3).
    """

    opcode: Opcode
    transport: Transport
    kind: Kind
    first: bool
    middle: bool
    last: bool
    only: bool
    has_deth: bool
    has_reth: bool
    has_atomiceth: bool
    has_aeth: bool
    has_atomicack: bool
    has_imm: bool
    has_ieth: bool
    header_bytes: int
    payload: PayloadRule
    is_request: bool
    is_response: bool
    takes_rwqe: bool
    makes_cqe: bool

    @property
    def starts(self) -> bool:
        """First packet of a message."""
        return self.first or self.only

    @property
    def ends(self) -> bool:
        """Last packet of a message."""
        return self.last or self.only

    def payload_ok(self, size: int, pmtu: int) -> bool:
        """Whether ``size`` payload bytes are legal at a path MTU of ``pmtu`` bytes (R-LEN-1, R-LEN-4)."""
        match self.payload:
            case PayloadRule.ZERO:
                return size == 0
            case PayloadRule.PMTU:
                return size == pmtu
            case PayloadRule.ONE_TO_PMTU:
                return 1 <= size <= pmtu
            case _:
                return 0 <= size <= pmtu


_KINDS = {  # operation name after the transport prefix -> kind, longest prefix first
    "SEND": Kind.SEND, "WRITE": Kind.WRITE, "READ_REQUEST": Kind.READ_REQ, "READ_RESP": Kind.READ_RESP, "ACK": Kind.ACK,
    "ATOMIC_ACK": Kind.ATOMIC_ACK, "CMP_SWAP": Kind.CMP_SWAP, "FETCH_ADD": Kind.FETCH_ADD,
}  # fmt: skip
_RESPONSES = (Kind.READ_RESP, Kind.ACK, Kind.ATOMIC_ACK)


def _row(opcode: Opcode) -> OpcodeInfo:
    """The row of an opcode, from its name: the names follow the table's own grammar."""
    if opcode is Opcode.CNP:
        transport, kind, words = Transport.CNP, Kind.CNP, ["ONLY"]
    else:
        prefix, operation = opcode.name.split("_", 1)
        transport = Transport[prefix]
        kind = next(kind for name, kind in _KINDS.items() if operation.startswith(name))
        words = operation.split("_")
    first, middle, last = "FIRST" in words, "MIDDLE" in words, "LAST" in words
    only = not (first or middle or last)
    starts, ends = first or only, last or only
    data_kind = kind in (Kind.SEND, Kind.WRITE, Kind.READ_RESP)
    has = {
        "deth": transport is Transport.UD,
        "reth": kind is Kind.READ_REQ or (kind is Kind.WRITE and starts),
        "atomiceth": kind in (Kind.CMP_SWAP, Kind.FETCH_ADD),
        "aeth": kind in _RESPONSES and not middle,
        "atomicack": kind is Kind.ATOMIC_ACK,
        "imm": "IMM" in words,
        "ieth": "INV" in words,
    }
    sizes = {
        "deth": DETH.size_bytes, "reth": RETH.size_bytes, "atomiceth": ATOMIC_ETH.size_bytes, "aeth": AETH.size_bytes,
        "atomicack": ATOMIC_ACK_ETH.size_bytes, "imm": IMM_DT.size_bytes, "ieth": IETH.size_bytes,
    }  # fmt: skip
    header_bytes = BTH.size_bytes + sum(sizes[name] for name, present in has.items() if present)
    if kind is Kind.CNP:
        header_bytes += CNP_RESERVED_BYTES
    if not data_kind:
        payload = PayloadRule.ZERO
    elif first or middle:
        payload = PayloadRule.PMTU
    else:
        payload = PayloadRule.ONE_TO_PMTU if last else PayloadRule.ZERO_TO_PMTU
    with_imm = has["imm"]
    return OpcodeInfo(
        opcode=opcode, transport=transport, kind=kind, first=first, middle=middle, last=last, only=only,
        header_bytes=header_bytes, payload=payload,
        is_request=kind not in _RESPONSES and kind is not Kind.CNP, is_response=kind in _RESPONSES,
        takes_rwqe=(kind is Kind.SEND and starts) or (kind is Kind.WRITE and with_imm),  # R-OPC-2
        makes_cqe=(kind is Kind.SEND and ends) or (kind is Kind.WRITE and with_imm),
        **{f"has_{name}": present for name, present in has.items()},
    )  # fmt: skip


OPCODES: dict[Opcode, OpcodeInfo] = {opcode: _row(opcode) for opcode in Opcode}
"""Every known opcode and its row."""

_BY_KEY = {
    (i.transport, i.kind, i.first, i.middle, i.last, i.has_imm, i.has_ieth): i.opcode for i in OPCODES.values()
}  # fmt: skip


def opcode_of(
    transport: Transport, kind: Kind, *, starts: bool = True, ends: bool = True, imm: bool = False, inv: bool = False
) -> Opcode:
    """Opcode of a packet by its role (ValueError when the transport has no such packet)."""
    key = (transport, kind, starts and not ends, not starts and not ends, ends and not starts, imm, inv)
    if key not in _BY_KEY:
        role = f"starts={starts}, ends={ends}, imm={imm}, inv={inv}"
        raise ValueError(f"{transport.name} has no {kind.name} packet with {role}")
    return _BY_KEY[key]


def flags_of(info: OpcodeInfo) -> dict:
    """The :class:`OpcodeFlags` of a row as a dict (an initializer)."""
    own = {name: getattr(info, name) for name, _ in OpcodeFlags if name not in ("known", "header_words")}
    own = {name: int(value) if isinstance(value, bool) else value for name, value in own.items()}
    return {"known": 1, **own, "header_words": info.header_bytes // 4}


def decode(m: Module, opcode, *, name: str = "opcode_flags") -> data.View:
    """Combinational decode of 8 opcode bits to a new :class:`OpcodeFlags` signal called ``name``.

    Every output bit is a function of the 8 opcode bits alone (one 256-entry table: two LUT6 or three LUT4 levels).
    """
    flags = Signal(OpcodeFlags, name=name)
    rows = {info.opcode.value: OpcodeFlags.const(flags_of(info)).as_bits() for info in OPCODES.values()}
    # One 256-bit truth table an output bit: synthesis makes shallower logic of it than of a Switch.
    for bit in range(OpcodeFlags.size):
        table = sum((row >> bit & 1) << value for value, row in rows.items())
        m.d.comb += flags.as_value()[bit].eq(Const(table, 256).bit_select(opcode, 1))
    return flags
