"""A wire between two endpoints with repeatable faults: loss, duplication, reordering, corruption."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .device import Device


@dataclass(frozen=True)
class Faults:
    """Probability of each fault per frame."""

    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0


class Link:
    """Carries frames between `a` and `b`; `log` holds (sender, bytes, delivered) of every frame offered.

    `drop` may name single frames to lose: it gets sender ("a" or "b") and the frame's number from that sender.
    """

    def __init__(
        self,
        a: Device,
        b: Device,
        faults: Faults = Faults(),
        seed: int = 0,
        delay_ns: int = 500,
        drop: Callable[[str, int], bool] | None = None,
    ):
        self.ends = {"a": a, "b": b}
        self.faults = faults
        self.random = random.Random(seed)
        self.delay_ns = delay_ns
        self.drop = drop
        self.now = 0
        self.log: list[tuple[str, bytes, bool]] = []
        self._flying: deque[tuple[int, str, bytes]] = deque()
        self._count = {"a": 0, "b": 0}

    def step(self, frames: int | None = 1) -> bool:
        """Offer up to `frames` frames of each end and deliver what has arrived; False when all is quiet."""
        moved = False
        for name, device in self.ends.items():
            for raw in device.poll_tx(frames):
                self._offer(name, raw)
                moved = True
        if self._flying:
            self._deliver()
            return True
        return moved

    def run(self, done: Callable[[], bool] | None = None, max_steps: int = 100_000) -> None:
        """Run until `done` or until nothing can happen any more. Raises RuntimeError after `max_steps`."""
        for _ in range(max_steps):
            if done is not None and done():
                return
            if not self.step() and not self._wait():
                return
        raise RuntimeError("the link did not come to rest")

    def _wait(self) -> bool:
        """Sleep until the next timer; False when there is none."""
        deadlines = [t for d in self.ends.values() if (t := d.next_deadline()) is not None]
        if not deadlines:
            return False
        self._pass(max(min(deadlines) - self.now, 1))
        return True

    def _pass(self, ns: int) -> None:
        self.now += ns
        for device in self.ends.values():
            device.advance(self.now - device.now)

    def _offer(self, sender: str, raw: bytes) -> None:
        self._count[sender] += 1
        lost = self.drop(sender, self._count[sender]) if self.drop is not None else False
        lost = self._chance(self.faults.loss) or lost
        self.log.append((sender, raw, not lost))
        if lost:
            return
        if self._chance(self.faults.corrupt):
            raw = self._flip(raw)
        copies = 2 if self._chance(self.faults.duplicate) else 1
        for _ in range(copies):
            entry = (self.now + self.delay_ns, sender, raw)
            if self._flying and self._chance(self.faults.reorder):
                self._flying.insert(len(self._flying) - 1, entry)
            else:
                self._flying.append(entry)

    def _deliver(self) -> None:
        when, sender, raw = self._flying.popleft()
        if when > self.now:
            self._pass(when - self.now)
        self.ends["b" if sender == "a" else "a"].receive(raw)

    def _flip(self, raw: bytes) -> bytes:
        """One flipped bit behind the Ethernet header."""
        position = self.random.randrange(14, len(raw))
        changed = bytearray(raw)
        changed[position] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability
