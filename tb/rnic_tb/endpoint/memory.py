"""Memory regions and windows with their keys: who may touch which bytes.

A region owns (or shares) a `bytearray`; addresses are virtual, one flat space per region. A key is
index << 8 | variant, and a stale variant does not match (R-MR-1). Every look-up checks key, protection domain,
rights and range, in that order, and raises `ProtectionError`.
Source: rules.md section 19.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import Access


class ProtectionError(Exception):
    """An access that key, protection domain, rights or range forbid; `cause` is a short word for counters."""

    def __init__(self, cause: str, detail: str = ""):
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


@dataclass
class MemoryRegion:
    """Registered memory: `length` bytes at virtual address `base`, backed by `buffer` from `offset` on."""

    key: int
    pd: int
    access: Access
    base: int
    length: int
    buffer: bytearray = field(repr=False)
    offset: int = 0
    valid: bool = True
    remote_invalidate: bool = False  # may a peer's SEND_INV retire it
    windows: int = 0  # bound windows: keeps the region registered

    def read(self, va: int, length: int) -> bytes:
        """`length` bytes at `va`; the range must have been checked."""
        start = self.offset + va - self.base
        return bytes(self.buffer[start : start + length])

    def write(self, va: int, data: bytes) -> None:
        """Store `data` at `va`; the range must have been checked."""
        start = self.offset + va - self.base
        self.buffer[start : start + len(data)] = data

    def covers(self, va: int, length: int) -> bool:
        """Is [va, va + length) inside? Written so that nothing can wrap (R-MR-2)."""
        return va >= self.base and length <= self.length and va - self.base <= self.length - length


@dataclass
class MemoryWindow:
    """A type 2 window: a second key over a part of a region, usable on one QP only (rules.md 19.2)."""

    key: int
    pd: int
    qpn: int
    access: Access
    base: int
    length: int
    region: MemoryRegion
    valid: bool = True

    def covers(self, va: int, length: int) -> bool:
        """Is [va, va + length) inside the window (not merely inside its region)?"""
        return va >= self.base and length <= self.length and va - self.base <= self.length - length


class KeyTable:
    """All regions and windows of a device, found by key index."""

    def __init__(self) -> None:
        self._entries: dict[int, MemoryRegion | MemoryWindow] = {}

    def register(
        self,
        key: int,
        pd: int,
        access: Access,
        base: int,
        length: int,
        buffer: bytearray | None = None,
        offset: int = 0,
        remote_invalidate: bool = False,
    ) -> MemoryRegion:
        """Register `length` bytes at `base` under `key`; zeroed memory of its own unless a buffer is given.

        Raises ValueError for remote write or atomic rights without local write (R-MR-3), for a key index in
        use and for a buffer that is too short.
        """
        if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not access & Access.LOCAL_WRITE:
            raise ValueError("remote write and remote atomic need local write")  # R-MR-3
        if key >> 8 in self._entries:
            raise ValueError(f"key index {key >> 8:#x} is in use")
        memory = bytearray(length) if buffer is None else buffer
        if offset + length > len(memory):
            raise ValueError("buffer shorter than the region")
        region = MemoryRegion(key, pd, access, base, length, memory, offset, remote_invalidate=remote_invalidate)
        self._entries[key >> 8] = region
        return region

    def bind_window(
        self, key: int, region: MemoryRegion, qpn: int, access: Access, base: int, length: int
    ) -> MemoryWindow:
        """Bind a type 2 window under `key`.

        Raises ProtectionError when the region does not allow it (rules.md 19.2: o10-37.2.30, C10-73..75).
        """
        old = self._entries.get(key >> 8)
        if isinstance(old, MemoryRegion) or (old is not None and old.valid):
            raise ProtectionError("window-in-use")
        if not region.valid or not region.access & Access.MW_BIND:
            raise ProtectionError("no-bind-right")
        if access & (Access.REMOTE_WRITE | Access.REMOTE_ATOMIC) and not region.access & Access.LOCAL_WRITE:
            raise ProtectionError("no-local-write")
        if length == 0 or not region.covers(base, length):
            raise ProtectionError("bounds")
        window = MemoryWindow(key, region.pd, qpn, access, base, length, region)
        region.windows += 1
        self._entries[key >> 8] = window
        return window

    def deregister(self, key: int) -> None:
        """Forget a region. Raises ProtectionError while a window is bound on it."""
        entry = self._find(key)
        if isinstance(entry, MemoryWindow):
            raise ProtectionError("not-a-region")
        if entry.windows:
            raise ProtectionError("window-bound")
        del self._entries[key >> 8]

    def invalidate_window(self, key: int) -> None:
        """Unbind a window or retire a region by its owner. Raises ProtectionError for an unknown key."""
        entry = self._find(key)
        if isinstance(entry, MemoryRegion) and entry.windows:
            raise ProtectionError("window-bound")
        self._retire(entry)

    def invalidate_by_peer(self, key: int, qpn: int, pd: int) -> None:
        """What a SEND with invalidate may do: a window of this QP, or a region made for it.

        Raises ProtectionError otherwise (rules.md 8.1 check 12, 19.2).
        """
        entry = self._find(key)
        if isinstance(entry, MemoryWindow):
            if entry.qpn != qpn:
                raise ProtectionError("window-of-other-qp")
        elif not entry.remote_invalidate or entry.pd != pd or entry.windows:
            raise ProtectionError("not-invalidatable")
        self._retire(entry)

    def remote(self, key: int, pd: int, qpn: int, va: int, length: int, need: Access) -> MemoryRegion:
        """The region a remote access of `length` > 0 bytes goes to (rules.md 8.1 check 7).

        Raises ProtectionError with cause key, pd, access or bounds.
        """
        entry = self._find(key)
        if entry.pd != pd or (isinstance(entry, MemoryWindow) and entry.qpn != qpn):
            raise ProtectionError("pd", f"key {key:#x}")  # R-MR-4
        if need & ~entry.access:
            raise ProtectionError("access", f"key {key:#x} needs {need!r}")
        if not entry.covers(va, length):
            raise ProtectionError("bounds", f"{va:#x}+{length:#x}")
        return entry.region if isinstance(entry, MemoryWindow) else entry

    def local(self, key: int, pd: int, va: int, length: int, need: Access) -> MemoryRegion:
        """The region of a scatter/gather element of `length` > 0 bytes (R-MR-4).

        Raises ProtectionError; a window's key is not a local key.
        """
        entry = self._find(key)
        if isinstance(entry, MemoryWindow):
            raise ProtectionError("key", f"{key:#x} is a window")
        if entry.pd != pd:
            raise ProtectionError("pd", f"key {key:#x}")
        if need & ~entry.access:
            raise ProtectionError("access", f"key {key:#x} needs {need!r}")
        if not entry.covers(va, length):
            raise ProtectionError("bounds", f"{va:#x}+{length:#x}")
        return entry

    def _find(self, key: int) -> MemoryRegion | MemoryWindow:
        entry = self._entries.get(key >> 8)
        if entry is None or entry.key != key or not entry.valid:
            raise ProtectionError("key", f"{key:#x}")  # R-MR-1: index and variant
        return entry

    @staticmethod
    def _retire(entry: MemoryRegion | MemoryWindow) -> None:
        entry.valid = False
        if isinstance(entry, MemoryWindow):
            entry.region.windows -= 1
