"""24-bit PSN (and MSN) arithmetic modulo 2^24, for Python ints and for hardware values. Source: R-PSN-1, R-PSN-2.

Python functions are called ``psn_*``; their hardware twins ``psn_*_value`` return combinational expressions (one 24-bit
subtraction each: give it a name and, where time is short, a register).
"""

from amaranth import *

__all__ = [
    "PSN_BITS", "PSN_MASK", "psn_add", "psn_add_value", "psn_after", "psn_after_value", "psn_before", "psn_delta",
    "psn_delta_value", "psn_in_window", "psn_in_window_value", "psn_packets",
]  # fmt: skip

PSN_BITS = 24
PSN_MASK = (1 << PSN_BITS) - 1
_HALF = 1 << PSN_BITS - 1


def psn_add(psn: int, count: int) -> int:
    """``psn`` moved by ``count`` (may be negative), modulo 2^24."""
    return psn + count & PSN_MASK


def psn_delta(a: int, b: int) -> int:
    """``a - b`` as a signed 24-bit number, -2^23..2^23-1."""
    difference = a - b & PSN_MASK
    return difference - (1 << PSN_BITS) if difference & _HALF else difference


def psn_after(a: int, b: int) -> bool:
    """Whether ``a`` is after ``b``: 0 < (a-b) mod 2^24 < 2^23 (R-PSN-1)."""
    return 0 < (a - b & PSN_MASK) < _HALF


def psn_before(a: int, b: int) -> bool:
    """Whether ``a`` is before ``b``: a negative signed difference, so a distance of exactly 2^23 is before."""
    return psn_delta(a, b) < 0


def psn_in_window(psn: int, oldest: int, after_newest: int) -> bool:
    """Whether ``psn`` is in the half-open window [oldest, after_newest), empty when both are equal (R-RSP-1)."""
    return (psn - oldest & PSN_MASK) < (after_newest - oldest & PSN_MASK)


def psn_packets(length: int, pmtu: int) -> int:
    """PSNs a message of ``length`` bytes takes at a path MTU of ``pmtu`` bytes: at least one (R-PSN-3)."""
    return max(1, -(-length // pmtu))


def psn_add_value(psn, count) -> Value:
    """24-bit hardware ``psn + count`` modulo 2^24."""
    return (Value.cast(psn) + count)[:PSN_BITS]


def psn_delta_value(a, b) -> Value:
    """Signed 24-bit hardware ``a - b``; negative means a is before b."""
    return (Value.cast(a) - Value.cast(b))[:PSN_BITS].as_signed()


def psn_after_value(a, b) -> Value:
    """Hardware twin of :func:`psn_after`."""
    difference = (Value.cast(a) - Value.cast(b))[:PSN_BITS]
    return difference.any() & ~difference[-1]


def psn_in_window_value(psn, oldest, after_newest) -> Value:
    """Hardware twin of :func:`psn_in_window` (two subtractions and a compare: pipeline it where time is short)."""
    offset = (Value.cast(psn) - Value.cast(oldest))[:PSN_BITS]
    size = (Value.cast(after_newest) - Value.cast(oldest))[:PSN_BITS]
    return offset < size
