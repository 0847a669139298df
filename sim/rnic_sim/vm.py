"""A process's memory: virtual addresses over scattered physical pages, and the page tables the RNIC walks."""

import bisect
from dataclasses import dataclass

from rnic.abi import TPT_ENTRY

from .seam import Host

__all__ = ["AddressSpace", "Mapping", "PAGE"]

PAGE = 4096
_PTES = PAGE // 8


@dataclass
class Mapping:
    """``len(pages)`` pages of ``page_size`` bytes at ``va``."""

    va: int
    page_size: int
    pages: list[int]

    @property
    def end(self) -> int:
        return self.va + self.page_size * len(self.pages)


class AddressSpace:
    """Virtual memory of one process on a `Host`. Software reads and writes it by virtual address, outside the RNIC's path."""

    def __init__(self, host: Host, first_va: int = 0x10_0000_0000):
        self.host = host
        self._next_va = first_va
        self._maps: list[Mapping] = []  # sorted by va

    def map(self, length: int, *, va: int | None = None, page_size: int = PAGE) -> Mapping:
        """Back ``length`` bytes (rounded up to pages) with scattered physical pages; at ``va`` when given (page aligned).

        ``ValueError`` for a misaligned or overlapping address.
        """
        count = max(1, -(-length // page_size))
        if va is None:
            va = -(-self._next_va // page_size) * page_size
            self._next_va = va + (count + 1) * page_size  # a hole after each mapping: overruns do not land in a neighbour
        if va % page_size:
            raise ValueError(f"address {va:#x} is not a multiple of the page size {page_size}")
        new = Mapping(va, page_size, [])
        new_end = va + count * page_size
        for other in self._maps:
            if va < other.end and other.va < new_end:
                raise ValueError(f"address {va:#x} overlaps a mapping at {other.va:#x}")
        new.pages = self.host.alloc_pages(count, page_size)
        bisect.insort(self._maps, new, key=lambda m: m.va)
        return new

    def unmap(self, mapping: Mapping) -> None:
        """Give the pages back."""
        self._maps.remove(mapping)
        self.host.free_pages(mapping.pages)

    def find(self, va: int, length: int) -> Mapping:
        """The mapping that holds the range; ``ValueError`` when none does."""
        i = bisect.bisect_right(self._maps, va, key=lambda m: m.va) - 1
        if i < 0 or va + length > self._maps[i].end:
            raise ValueError(f"[{va:#x}, {va + length:#x}) is not mapped")
        return self._maps[i]

    def _pieces(self, va: int, length: int):
        mapping = self.find(va, length)
        done = 0
        while done < length:
            page, offset = divmod(va + done - mapping.va, mapping.page_size)
            n = min(length - done, mapping.page_size - offset)
            yield mapping.pages[page] + offset, done, n
            done += n

    def read(self, va: int, length: int) -> bytes:
        """Bytes at a virtual address."""
        return b"".join(self.host.mem_read(pa, n) for pa, _, n in self._pieces(va, length))

    def write(self, va: int, data: bytes) -> None:
        """Write at a virtual address."""
        for pa, at, n in self._pieces(va, len(data)):
            self.host.mem_write(pa, data[at : at + n])

    def describe(self, va: int, length: int, *, variant: int = 0, rights: int = 0, pd: int = 0,
                 base: int | None = None) -> tuple[list[int], list[int]]:  # fmt: skip
        """The translation entry (`abi.TPT_ENTRY` words) of a range, and the pages its page tables take.

        ``base`` is the first address the RNIC sees (default ``va``); it must be equal to ``va`` modulo the page size. One
        page: contiguous. Up to 512 pages: one table. More: tables of tables (up to 512 * 512 pages in one directory page,
        beyond that a contiguous directory).
        """
        mapping = self.find(va, length)
        base = va if base is None else base
        size = mapping.page_size
        if (base - va) % size:
            raise ValueError(f"base {base:#x} and address {va:#x} differ within the page")
        first, offset = divmod(va - mapping.va, size)
        last = (va + max(length, 1) - 1 - mapping.va) // size
        pages = mapping.pages[first : last + 1]
        tables: list[int] = []
        if len(pages) == 1:
            levels, table = 0, pages[0] + offset
        elif len(pages) <= _PTES:
            levels, table = 1, self._table(pages, tables)
        else:
            levels = 2
            lower = [self._table(pages[i : i + _PTES], tables) for i in range(0, len(pages), _PTES)]
            table = self._table(lower, tables)
        words = TPT_ENTRY.words(
            valid=1, levels=levels, variant=variant, rights=rights, log_page=size.bit_length() - 1, pd=pd, base=base,
            length=length, table_addr=table,
        )  # fmt: skip
        return words, tables

    def _table(self, entries: list[int], tables: list[int]) -> int:
        size = PAGE
        while size < 8 * len(entries):
            size *= 2
        (at,) = self.host.alloc_pages(1, size)
        tables.append(at)
        self.host.mem_write(at, b"".join(e.to_bytes(8, "little") for e in entries))
        return at
