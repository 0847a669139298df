"""Where host memory is: hands out pages scattered over the physical address space."""

import bisect
import random

__all__ = ["PageAllocator"]

_SPACE_BITS = 46  # physical addresses of a large server; well above 32 bits, so that cut addresses are noticed


class PageAllocator:
    """Gives physical pages of one host, none adjacent to another except by chance, in an order set by ``seed``.

    A driver that got neighbouring pages would never notice that its NIC walks past the end of one.
    """

    def __init__(self, seed: int):
        self._rng = random.Random(seed)
        self._bases: list[int] = []  # sorted
        self._lengths: dict[int, int] = {}

    def take(self, length: int, align: int) -> int:
        """A free range of ``length`` bytes at a multiple of ``align`` (a power of two). Never address 0."""
        if length <= 0 or align <= 0 or align & (align - 1):
            raise ValueError(f"cannot allocate {length} bytes aligned to {align}")
        while True:
            base = self._rng.randrange(1, 1 << _SPACE_BITS) // align * align
            if base and self._is_free(base, length):
                bisect.insort(self._bases, base)
                self._lengths[base] = length
                return base

    def release(self, base: int) -> int:
        """Gives a range back; returns its length. Raises KeyError for one that was not taken."""
        length = self._lengths.pop(base)
        self._bases.remove(base)
        return length

    def _is_free(self, base: int, length: int) -> bool:
        """Whether neither the range before ``base`` reaches into the new one nor the new one into the range after it."""
        at = bisect.bisect_right(self._bases, base)
        if at and self._bases[at - 1] + self._lengths[self._bases[at - 1]] > base:
            return False
        return at == len(self._bases) or base + length <= self._bases[at]
