"""The driver seam: the little a driver needs from the machine it runs on.

The same driver and verbs API run on the simulated world and, over a UART, on a board: both implement `Host`.
"""

from typing import Protocol, runtime_checkable

__all__ = ["Host"]


@runtime_checkable
class Host(Protocol):
    """One machine with one RNIC.

    Addresses of ``mem_*`` are physical and may be used for DMA when they lie in pages from ``alloc_pages``.
    """

    def csr_read(self, addr: int) -> int:
        """A 32-bit register of the RNIC at byte address ``addr``."""
        ...

    def csr_write(self, addr: int, value: int) -> None:
        """Write a 32-bit register; returns when the RNIC has taken it."""
        ...

    def mem_read(self, addr: int, length: int) -> bytes:
        """``length`` bytes of host memory."""
        ...

    def mem_write(self, addr: int, data: bytes) -> None:
        """Write host memory."""
        ...

    def alloc_pages(self, count: int, page_size: int = 4096) -> list[int]:
        """Physical addresses of ``count`` zeroed pages, each aligned to ``page_size``, in no particular order."""
        ...

    def free_pages(self, pages: list[int]) -> None:
        """Give pages back."""
        ...

    def relax(self, cycles: int) -> None:
        """Let about ``cycles`` clock cycles of the RNIC pass: what a polling loop does between two looks."""
        ...

    def now(self) -> int:
        """Cycles since the start (0 where nobody counts)."""
        ...
