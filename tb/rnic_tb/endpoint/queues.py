"""Work requests, completions and the queues that hold them.

Queues are plain FIFOs with a capacity that is usable in full (R-WQ-3). Posting to a full queue raises
`QueueFull` and changes nothing. All byte counts are plain ints (no 32-bit sums).
Source: rules.md sections 11, 13, 15.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .constants import Access, Event, WcFlag, WcOp, WcStatus, WrOp
from .memory import KeyTable, ProtectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class QueueFull(Exception):
    """A post to a queue without a free place (ENOMEM, R-WQ-2)."""


class PostError(ValueError):
    """A work request the QP does not take (EINVAL, R-WQ-1, R-WQ-2, R-WQ-7)."""


@dataclass(frozen=True)
class Sge:
    """A scatter/gather element: `length` bytes at `addr` under local key `lkey`."""

    addr: int
    length: int
    lkey: int


@dataclass(frozen=True)
class AddressVector:
    """Where packets go and what their IP header says (R-ADR-3, R-ADR-4)."""

    dst_mac: bytes
    dst_ip: bytes  # 4 or 16 bytes
    src_ip: bytes
    traffic_class: int = 0
    hop_limit: int = 64
    flow_label: int = 0
    udp_sport: int | None = None  # None: by R-ADR-4
    vlan: tuple[int, int] | None = None  # (PCP, VID)


@dataclass(frozen=True)
class SendWr:
    """A send work request. `add` and `compare`/`swap` are the atomic operands, `bind` the window to bind."""

    wr_id: int
    op: WrOp
    sges: tuple[Sge, ...] = ()
    signaled: bool = True
    fence: bool = False
    solicited: bool = False
    inline: bytes | None = None  # data copied at post time (R-WQ-5)
    remote_addr: int = 0
    rkey: int = 0
    imm: int = 0
    inv_rkey: int = 0
    compare: int = 0
    swap: int = 0
    add: int = 0
    ah: AddressVector | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    bind: MwBind | None = None

    @property
    def length(self) -> int:
        """Bytes of the message (R-WQ-4: any number of elements, any of them empty)."""
        return len(self.inline) if self.inline is not None else sum(sge.length for sge in self.sges)


@dataclass(frozen=True)
class MwBind:
    """What BIND_MW binds: a new key over [base, base + length) of the region with `lkey`."""

    key: int
    lkey: int
    access: Access
    base: int
    length: int


@dataclass(frozen=True)
class RecvWr:
    """A receive work request."""

    wr_id: int
    sges: tuple[Sge, ...] = ()

    @property
    def length(self) -> int:
        return sum(sge.length for sge in self.sges)


@dataclass(frozen=True)
class WorkCompletion:
    """A completion. In an error only wr_id, status, qpn are meaningful (R-ERR-2)."""

    wr_id: int
    status: WcStatus
    opcode: WcOp
    qpn: int
    byte_len: int = 0
    imm: int = 0
    inv_rkey: int = 0
    flags: WcFlag = WcFlag.NONE
    src_qpn: int = 0
    solicited: bool = False


@dataclass
class CompletionQueue:
    """A completion queue of `depth` entries with one-shot arming.

    A push to a full queue puts the queue in error (R-CQ-6): the entry is lost, `Event.CQ_ERR` is reported and the
    queue pair that pushed goes to ERR.
    """

    depth: int
    events: list[Event] = field(default_factory=list)
    failed: bool = False
    notifications: int = 0
    _entries: deque[WorkCompletion] = field(default_factory=deque)
    _armed: str | None = None

    def push(self, wc: WorkCompletion) -> bool:
        """Add a completion; False when the queue has no place for it or is in error."""
        if self.failed or len(self._entries) >= self.depth:
            if not self.failed:
                self.failed = True
                self.events.append(Event.CQ_ERR)  # R-CQ-6
            return False
        self._entries.append(wc)
        self._notify(wc)
        return True

    def poll(self, limit: int | None = None) -> list[WorkCompletion]:
        """Take up to `limit` completions, oldest first."""
        count = len(self._entries) if limit is None else min(limit, len(self._entries))
        return [self._entries.popleft() for _ in range(count)]

    def arm(self, solicited_only: bool = False) -> None:
        """Ask for one notification of the next completion (R-CQ-5)."""
        self._armed = "solicited" if solicited_only and self._armed != "any" else "any"

    def _notify(self, wc: WorkCompletion) -> None:
        if self._armed is None:
            return
        if self._armed == "any" or wc.solicited or wc.status is not WcStatus.SUCCESS:  # R-CQ-5
            self._armed = None
            self.notifications += 1


class ReceiveQueue:
    """The receive queue of one QP."""

    def __init__(self, depth: int, max_sge: int):
        self.depth = depth
        self.max_sge = max_sge
        self._entries: deque[RecvWr] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def post(self, wr: RecvWr) -> None:
        """Append. Raises QueueFull, PostError (R-WQ-2)."""
        if len(wr.sges) > self.max_sge:
            raise PostError(f"{len(wr.sges)} elements, at most {self.max_sge}")
        if len(self._entries) >= self.depth:
            raise QueueFull
        self._entries.append(wr)

    def take(self) -> RecvWr | None:
        """The oldest receive, or None."""
        return self._entries.popleft() if self._entries else None

    def give_back(self, wr: RecvWr) -> None:
        """Put a taken receive back in front (UC: an abandoned message, R-UC-1)."""
        self._entries.appendleft(wr)

    def drain(self) -> list[RecvWr]:
        """Take everything (flush)."""
        taken = list(self._entries)
        self._entries.clear()
        return taken


class SharedReceiveQueue(ReceiveQueue):
    """A receive queue of several QPs, first in first out, with a low-water limit (R-SRQ-1, R-SRQ-2)."""

    def __init__(self, depth: int, max_sge: int, report: Callable[[Event], None] | None = None):
        super().__init__(depth, max_sge)
        self.limit = 0
        self.events: list[Event] = []
        self._report = report

    def arm_limit(self, limit: int) -> None:
        """Ask for one SRQ_LIMIT_REACHED; at once when fewer entries are already there (R-SRQ-2)."""
        self.limit = limit
        self._check_limit()

    def take(self) -> RecvWr | None:
        wr = super().take()
        if wr is not None:
            self._check_limit()
        return wr

    def resize(self, depth: int) -> None:
        """Change the capacity. Raises ValueError when more entries are posted than would fit."""
        if depth < len(self):
            raise ValueError("more receives posted than the new size")
        self.depth = depth

    def _check_limit(self) -> None:
        if self.limit and len(self) < self.limit:
            self.limit = 0  # R-SRQ-2: once
            self.events.append(Event.SRQ_LIMIT_REACHED)
            if self._report is not None:
                self._report(Event.SRQ_LIMIT_REACHED)


def check_sges(keys: KeyTable, pd: int, sges: Sequence[Sge], need: Access) -> None:
    """Raise ProtectionError for the first bad element; empty elements touch nothing (R-WQ-4)."""
    for sge in sges:
        if sge.length:
            keys.local(sge.lkey, pd, sge.addr, sge.length, need)


def gather(keys: KeyTable, pd: int, sges: Sequence[Sge], offset: int, length: int) -> bytes:
    """`length` bytes from byte `offset` of the concatenated elements. Raises ProtectionError."""
    out = bytearray()
    for start, sge in _spans(sges, offset, length):
        region = keys.local(sge.lkey, pd, start, sge.length, Access.NONE)
        out += region.read(start, sge.length)
    return bytes(out)


def scatter(keys: KeyTable, pd: int, sges: Sequence[Sge], offset: int, data: bytes) -> None:
    """Store `data` at byte `offset` of the concatenated elements. Raises ProtectionError."""
    position = 0
    for start, sge in _spans(sges, offset, len(data)):
        region = keys.local(sge.lkey, pd, start, sge.length, Access.LOCAL_WRITE)
        region.write(start, data[position : position + sge.length])
        position += sge.length
    if position != len(data):
        raise ProtectionError("sge-length", f"{len(data) - position} bytes do not fit")


def _spans(sges: Sequence[Sge], offset: int, length: int) -> list[tuple[int, Sge]]:
    """The parts of the elements that hold [offset, offset + length) of the list."""
    spans = []
    for sge in sges:
        if length == 0:
            break
        if offset >= sge.length:
            offset -= sge.length
            continue
        take = min(sge.length - offset, length)
        spans.append((sge.addr + offset, Sge(sge.addr + offset, take, sge.lkey)))
        length -= take
        offset = 0
    return spans
