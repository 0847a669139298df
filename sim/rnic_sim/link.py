"""The wire between two NICs as Python sees it: settings, faults, frames."""

import ctypes
import enum
from collections.abc import Callable
from dataclasses import dataclass

from . import native

__all__ = ["Fault", "Frame", "Wire"]


class Fault(enum.IntEnum):
    """What can happen to a frame. ``FCS`` marks it as one whose frame check failed (tuser on its last beat)."""

    DROP = 0
    DUPLICATE = 1
    REORDER = 2
    CORRUPT = 3
    CE = 4
    FCS = 5


@dataclass(frozen=True)
class Frame:
    """One frame at one port: cycles of its first and last beat, its bytes without FCS, ``error`` = tuser at its end."""

    nic: int
    port: native.Port
    first: int
    last: int
    data: bytes
    error: bool = False


class Wire:
    """What NIC number ``nic`` sends on its way to the peer.

    A beat takes ``latency`` cycles (1 at least). While any fault is set for this direction frames are stored and go on
    ``latency`` cycles after their last beat. Frames are counted from 0 as they enter the wire.
    """

    def __init__(self, library: ctypes.CDLL, handle: Callable[[], int], nic: int, latency: int):
        self._library, self._handle, self._nic = library, handle, nic
        self._config = native.LinkConfig(latency=1, buffer=64, rate=65536, reorder_depth=1, reorder_timeout=2000)
        self.configure(latency=latency)

    def configure(self, *, latency: int | None = None, rate: float | None = None, buffer: int | None = None,
                  reorder_depth: int | None = None, reorder_timeout: int | None = None, corrupt_first: int | None = None,
                  duplicate_gap: int | None = None, tx_stall: float | None = None, rx_stall: float | None = None) -> None:
        """Changes the settings given, keeps the others.

        ``latency`` cycles; ``rate`` beats per cycle (0..1]; ``buffer`` beats held beyond the latency before the sender
        is stopped; ``reorder_depth`` frames that pass a reordered one, ``reorder_timeout`` cycles after which it goes on
        anyway; ``corrupt_first`` the first byte that corruption may hit; ``duplicate_gap`` frames between a frame and
        its copy; ``tx_stall``, ``rx_stall`` probability of a held cycle.
        """
        if latency is not None and latency < 1:
            raise ValueError(f"link latency is {latency}, must be at least 1 cycle")
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(f"link rate is {rate}, must be in (0, 1] beats per cycle")
        scaled = {"rate": None if rate is None else max(1, round(rate * 65536)),
                  "tx_stall": None if tx_stall is None else native.probability(tx_stall),
                  "rx_stall": None if rx_stall is None else native.probability(rx_stall),
                  "latency": latency, "buffer": buffer, "reorder_depth": reorder_depth,
                  "reorder_timeout": reorder_timeout, "corrupt_first": corrupt_first, "duplicate_gap": duplicate_gap}
        for name, value in scaled.items():
            if value is not None:
                setattr(self._config, name, value)
        self._push()

    def fault(self, action: Fault, chance: float) -> None:
        """Lets ``action`` strike each frame with probability ``chance``; 0 ends it."""
        self._config.probability[action] = native.probability(chance)
        self._push()

    def fault_nth(self, action: Fault, n: int, *, count: int = 1, opcode: int | None = None, bit: int | None = None) -> None:
        """Lets ``action`` strike ``count`` frames from the ``n``-th on, counted from 0 and from now.

        ``opcode`` counts only frames with this BTH opcode; ``bit`` is the bit that ``CORRUPT`` flips (else a random one).
        """
        if n < 0 or count < 1:
            raise ValueError(f"n is {n} and count {count}, must be at least 0 and 1")
        rule = native.FaultRule(action=action, opcode=-1 if opcode is None else opcode, skip=n, count=count,
                                bit=-1 if bit is None else bit)
        self._library.rnic_link_rule(self._handle(), self._nic, rule)

    def clear_faults(self) -> None:
        """Ends all probabilities and rules of this direction."""
        for action in Fault:
            self._config.probability[action] = 0
        self._push()
        self._library.rnic_link_rule(self._handle(), self._nic, None)

    @property
    def frames(self) -> int:
        """Frames that entered this direction so far."""
        return self._counters()[0]

    @property
    def hits(self) -> dict[Fault, int]:
        """How many frames each kind of fault struck."""
        counters = self._counters()
        return {action: counters[1 + action] for action in Fault}

    def _counters(self) -> list[int]:
        values = (ctypes.c_uint64 * (1 + len(Fault)))()
        self._library.rnic_link_counters(self._handle(), self._nic, values)
        return list(values)

    def _push(self) -> None:
        self._library.rnic_link_config(self._handle(), self._nic, self._config)
