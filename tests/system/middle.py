"""A lab whose two RNICs are joined by Python: every frame can be changed, dropped or multiplied on its way."""

from collections.abc import Callable
from dataclasses import replace

from rnic.wire.frame import Frame, parse_frame
from rnic_sim.lab import Lab
from rnic_sim.verbs import CQ, WC

__all__ = ["MiddleLab", "packed"]

Change = Callable[[int, Frame], "list[Frame | bytes] | None"]

_STEP = 16  # cycles between two looks at the ports


def packed(frame: Frame, **changes) -> bytes:
    """The frame with changed fields, its lengths, checksums and ICRC right."""
    return replace(frame, **changes).pack()


class MiddleLab(Lab):
    """``change[i]``, when set, gets the number (from 0, since it was set) and the frame of each frame that machine i sends and
    returns what goes on instead (None: the frame as it is). ``seen`` lists (machine, frame as sent), ``passed`` what went on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.world.connect(0, None)
        self.world.connect(1, None)
        self.change: list[Change | None] = [None, None]
        self._count = [0, 0]
        self.seen: list[tuple[int, Frame]] = []
        self.passed: list[tuple[int, bytes]] = []

    def on(self, machine: int, change: Change | None) -> None:
        """Sets `change` and starts its count."""
        self.change[machine], self._count[machine] = change, 0

    def forget(self) -> None:
        """Starts the lists and both changes afresh."""
        self.on(0, None)
        self.on(1, None)
        self.seen.clear()
        self.passed.clear()

    def relax(self, cycles: int) -> None:
        """Simulate ``cycles`` and carry the frames."""
        while cycles > 0:
            self.world.step(min(_STEP, cycles))
            cycles -= _STEP
            for i in range(2):
                while (raw := self.world.nic[i].receive()) is not None:
                    self._carry(i, raw.data)

    def _carry(self, machine: int, raw: bytes) -> None:
        frame = parse_frame(raw)
        self.seen.append((machine, frame))
        change = self.change[machine]
        out = None if change is None else change(self._count[machine], frame)
        self._count[machine] += 1
        for item in [raw] if out is None else out:
            data = item if isinstance(item, bytes) else item.pack()
            self.passed.append((1 - machine, data))
            self.world.nic[1 - machine].inject(data)

    def answers(self, machine: int) -> list[Frame]:
        """Frames a machine sent that carry an AETH."""
        return [f for m, f in self.seen if m == machine and f.info is not None and f.info.has_aeth]

    def drain(self, cq: CQ, count: int = 0, cycles: int = 3000, settle: int = 150) -> list[WC]:
        """Completions: waits for ``count`` at most ``cycles``, and then ``settle`` for what should not come; all there are."""
        found: list[WC] = []
        end = self.world.cycle + cycles
        while len(found) < count and self.world.cycle < end:
            self.relax(2 * _STEP)
            found += cq.poll(cq.cqe)[1]
        self.relax(settle)
        return found + cq.poll(cq.cqe)[1]
