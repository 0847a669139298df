"""AETH syndrome: ACK with credits, RNR NAK with a timer, NAK with a code. Source: rules.md section 9."""

from bisect import bisect_right
from typing import NamedTuple

from amaranth.lib import data, enum

__all__ = [
    "CREDITS", "CREDIT_UNLIMITED", "RNR_TIMER_NS", "SYNDROME", "AethType", "NakCode", "Syndrome",
    "ack_syndrome", "credit_code", "decode_syndrome", "nak_syndrome", "rnr_syndrome",
]  # fmt: skip


class AethType(enum.Enum, shape=2):
    """Syndrome bits 6:5."""

    ACK = 0
    RNR_NAK = 1
    RESERVED = 2
    NAK = 3


class NakCode(enum.Enum, shape=5):
    """Syndrome bits 4:0 of a NAK; 5..31 are reserved and ignored (rules.md 7.4)."""

    PSN_SEQUENCE = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS = 2
    REMOTE_OPERATIONAL = 3
    INVALID_RD_REQUEST = 4


SYNDROME = data.StructLayout({"value": 5, "type": AethType, "reserved": 1})
"""The syndrome byte as a hardware layout (``reserved`` is bit 7, must be 0)."""

RNR_TIMER_NS: tuple[int, ...] = tuple(
    ten_us * 10_000
    for ten_us in (
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192,
        256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    )
)  # fmt: skip
"""RNR timer code to its minimum wait in nanoseconds; code 0 is the longest, 655.36 ms (R-RNR-3)."""

CREDITS: tuple[int, ...] = (
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
)  # fmt: skip
"""Credit code 0..30 to receive WQEs the requester may use beyond the MSN."""
CREDIT_UNLIMITED = 31


class Syndrome(NamedTuple):
    """A decoded syndrome; ``value`` is the credit code, the RNR timer code or the NAK code."""

    type: AethType
    value: int

    @property
    def nak(self) -> NakCode | None:
        """The NAK code; None when this is no NAK or the code is reserved."""
        known = {code.value for code in NakCode}
        return NakCode(self.value) if self.type is AethType.NAK and self.value in known else None


def _value(value: int, what: str) -> int:
    if not 0 <= value < 32:
        raise ValueError(f"{what} is {value}, must be 0..31")
    return value


def ack_syndrome(credit: int = CREDIT_UNLIMITED) -> int:
    """Syndrome byte of an ACK with a credit code."""
    return _value(credit, "credit code")


def rnr_syndrome(timer: int) -> int:
    """Syndrome byte of an RNR NAK with a timer code (R-RNR-4: the responder's min_rnr_timer)."""
    return 0x20 | _value(timer, "RNR timer code")


def nak_syndrome(code: NakCode) -> int:
    """Syndrome byte of a NAK."""
    return 0x60 | code.value


def decode_syndrome(syndrome: int) -> Syndrome:
    """Type and value of a syndrome byte (bit 7 is ignored; ValueError if it is no byte)."""
    if not 0 <= syndrome < 256:
        raise ValueError(f"syndrome is {syndrome}, must be 0..255")
    return Syndrome(AethType(syndrome >> 5 & 3), syndrome & 31)


def credit_code(wqes: int) -> int:
    """Largest credit code that promises no more than ``wqes`` receive WQEs (ValueError if negative)."""
    if wqes < 0:
        raise ValueError(f"number of WQEs is {wqes}, must not be negative")
    return bisect_right(CREDITS, wqes) - 1
