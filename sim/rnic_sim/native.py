"""ctypes binding of the C++ harness (``harness/capi.cpp``): structures, numbers and the errors it ends in."""

import ctypes as c
import enum
from functools import cache
from pathlib import Path

__all__ = [
    "AssertionFailed", "AxiConfig", "AxiCounters", "CsrError", "CsrResult", "ErrorRange", "EventKind", "FaultRule",
    "LinkConfig", "MemoryFault", "Port", "ProtocolViolation", "SimError", "Stop", "Timeout", "load", "probability",
]


class SimError(RuntimeError):
    """Something ended the simulation, or an operation on it failed."""


class ProtocolViolation(SimError):
    """A port of the NIC broke a rule of its bus. The message names NIC, port and cycle. The world is dead."""


class AssertionFailed(SimError):
    """An assertion in the hardware failed. The message carries its text and cycle. The world is dead."""


class Timeout(SimError):
    """What was waited for did not happen. ``cycle`` is when waiting ended."""

    def __init__(self, what: str, cycle: int):
        super().__init__(f"{what} (gave up in cycle {cycle})")
        self.cycle = cycle


class CsrError(SimError):
    """A register access was answered with an AXI error."""


class MemoryFault(SimError):
    """Software touched host memory that is not allocated."""


class EventKind(enum.IntEnum):
    """What a port event tells. See ``harness/monitor.h``."""

    AR = 1
    R_FIRST = 2
    R_LAST = 3
    AW = 4
    W_FIRST = 5
    W_LAST = 6
    B = 7
    NET_TX_FIRST = 8
    NET_TX_LAST = 9
    NET_RX_FIRST = 10
    NET_RX_LAST = 11
    CSR_WRITE = 12
    CSR_READ = 13
    IRQ_RISE = 14
    IRQ_FALL = 15
    ETH_TX_FIRST = 16
    ETH_TX_LAST = 17
    ETH_RX_FIRST = 18
    ETH_RX_LAST = 19
    DMA_FAULT = 20


class Port(enum.IntEnum):
    """Which stream port a frame passed."""

    NET_TX = 0
    NET_RX = 1
    ETH_TX = 2
    ETH_RX = 3


class Stop(enum.IntFlag):
    """Why a step ended before its count."""

    FAILURE = 1
    IRQ = 2
    CSR = 4
    FRAME = 8
    WATCH = 16


class AxiConfig(c.Structure):
    """Mirror of ``AxiConfig`` in ``harness/axi_host.h``."""

    _fields_ = [("read_latency", c.c_uint32), ("read_jitter", c.c_uint32), ("write_latency", c.c_uint32),
                ("write_jitter", c.c_uint32), ("stall", c.c_uint64 * 5), ("reorder", c.c_uint32),
                ("interleave", c.c_uint32), ("max_reads", c.c_uint32), ("max_writes", c.c_uint32),
                ("read_rate", c.c_uint32), ("write_rate", c.c_uint32)]


class AxiCounters(c.Structure):
    """Bursts, beats and errors of one NIC's host bus since the world was made."""

    _fields_ = [(name, c.c_uint64) for name in ("reads", "writes", "read_beats", "write_beats", "read_errors",
                                                "write_errors", "unmapped")]


class ErrorRange(c.Structure):
    """Mirror of ``ErrorRange`` in ``harness/axi_host.h``."""

    _fields_ = [("first", c.c_uint64), ("end", c.c_uint64), ("read_response", c.c_uint32),
                ("write_response", c.c_uint32), ("remaining", c.c_int64)]


class LinkConfig(c.Structure):
    """Mirror of ``LinkConfig`` in ``harness/link.h``."""

    _fields_ = [("latency", c.c_uint32), ("buffer", c.c_uint32), ("rate", c.c_uint32), ("reorder_depth", c.c_uint32),
                ("reorder_timeout", c.c_uint32), ("corrupt_first", c.c_uint32), ("duplicate_gap", c.c_uint32),
                ("tx_stall", c.c_uint64), ("rx_stall", c.c_uint64), ("probability", c.c_uint64 * 6)]


class FaultRule(c.Structure):
    """Mirror of ``FaultRule`` in ``harness/link.h``."""

    _fields_ = [("action", c.c_uint32), ("opcode", c.c_int32), ("skip", c.c_uint64), ("count", c.c_uint64),
                ("bit", c.c_int64)]


class CsrResult(c.Structure):
    """Datum and AXI response of a finished register access."""

    _fields_ = [("data", c.c_uint32), ("response", c.c_uint32)]


def probability(value: float) -> int:
    """A probability as the harness counts it, in 1/2^32. Raises ValueError outside 0..1."""
    if not 0 <= value <= 1:
        raise ValueError(f"probability {value} is not in 0..1")
    return round(value * (1 << 32))


_U32, _U64, _P = c.c_uint32, c.c_uint64, c.c_void_p
_TEXT, _DATA = c.POINTER(c.c_char_p), c.POINTER(c.c_void_p)
_FUNCTIONS: dict[str, tuple[type | None, list]] = {
    "rnic_last_error": (c.c_char_p, []),
    "rnic_create": (_P, [_U32, _U64]),
    "rnic_destroy": (None, [_P]),
    "rnic_step": (_U64, [_P, _U64, _U32, c.POINTER(_U32)]),
    "rnic_cycle": (_U64, [_P]),
    "rnic_reset": (None, [_P, _U32]),
    "rnic_failure": (_U32, [_P, _TEXT]),
    "rnic_log": (c.c_char_p, [_P]),
    "rnic_map": (None, [_P, _U32, _U64, _U64]),
    "rnic_unmap": (None, [_P, _U32, _U64]),
    "rnic_peek": (c.c_int, [_P, _U32, _U64, _P, _U64]),
    "rnic_poke": (c.c_int, [_P, _U32, _U64, c.c_char_p, _U64]),
    "rnic_watch": (None, [_P, _U32, _U64, _U64]),
    "rnic_axi_config": (None, [_P, _U32, c.POINTER(AxiConfig)]),
    "rnic_axi_counters": (None, [_P, _U32, c.POINTER(AxiCounters)]),
    "rnic_axi_error": (None, [_P, _U32, c.POINTER(ErrorRange)]),
    "rnic_csr": (_U64, [_P, _U32, c.c_int, _U32, _U32, c.c_int]),
    "rnic_csr_take": (c.c_int, [_P, _U32, _U64, c.POINTER(CsrResult)]),
    "rnic_csr_posted_errors": (_U64, [_P, _U32]),
    "rnic_idle": (_U32, [_P, _U32]),
    "rnic_irq_count": (_U32, [_P]),
    "rnic_irq": (c.c_int, [_P, _U32, _U32]),
    "rnic_inject": (None, [_P, _U32, _U32, c.c_char_p, _U64, c.c_int]),
    "rnic_peer": (None, [_P, _U32, c.c_int32]),
    "rnic_link_config": (None, [_P, _U32, c.POINTER(LinkConfig)]),
    "rnic_link_rule": (None, [_P, _U32, c.POINTER(FaultRule)]),
    "rnic_link_counters": (None, [_P, _U32, c.POINTER(_U64)]),
    "rnic_monitor": (None, [_P, c.c_int, c.c_int, _U32]),
    "rnic_events": (_U64, [_P, _DATA]),
    "rnic_probes": (_U64, [_P, _DATA]),
    "rnic_frames": (_U64, [_P, _DATA]),
    "rnic_trace_open": (c.c_int, [_P, c.c_char_p]),
    "rnic_trace_close": (None, [_P]),
}


@cache
def load(library: Path) -> c.CDLL:
    """The harness of one model with all its functions typed."""
    loaded = c.CDLL(str(library))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded
