"""The loop that replays a capture with one end replaced: by the software endpoint, or by the hardware.

The recorded frames of the other end are fed in recorded order, the end's own frames, completions, memory and state are
compared with the recorded ones. `Replay` walks the steps; what differs from end to end is behind `ReplayEnd`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rnic.wire.frame import FrameError, parse_frame
from rnic.wire.opcode import Opcode
from rnic.wire.psn import psn_add, psn_packets

from . import captures as cap

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READ_ATOMIC", "Replay", "ReplayEnd", "cut"]

READ_ATOMIC = ("read", "fadd", "cas")
_ATOMIC = READ_ATOMIC[1:]


class ReplayEnd(Protocol):
    """An end of a scenario. Offsets are into its one region of `captures.BUFFER_BYTES`."""

    eager: bool
    """It sends as soon as it can, so frames may be on their way when a NAK comes; a lazy end sends when asked."""

    def post(self, step: cap.Post) -> None: ...

    def recv(self, step: cap.Recv) -> None: ...

    def bind(self, step: cap.WindowBound) -> None: ...

    def write_memory(self, offset: int, data: bytes) -> None: ...

    def read_memory(self, offset: int, length: int) -> bytes:
        """Memory once everything received so far is in it."""
        ...

    def receive(self, raw: bytes) -> None: ...

    def next_frame(self, repeated: bool) -> bytes | None:
        """The next frame this end sends; with `repeated` it may take until a timer of the transport runs out."""
        ...

    def leftovers(self) -> list[bytes]:
        """Frames sent that nobody asked for."""
        ...

    def completions(self, wanted: int = 0, or_frame: bool = False) -> list[cap.ExpectedWc]:
        """All completions so far; while there are fewer than `wanted` work under way may end, no timer of the transport.

        With `or_frame` a frame to be taken ends the wait.
        """
        ...

    def run_timers(self, wanted: int) -> None:
        """Let the last timer run out unless `wanted` completions are there."""
        ...

    def final_problems(self, final: cap.FinalState) -> list[str]:
        """Differences of the queue pair's attributes."""
        ...


class _Silent(Exception):
    """An eager end did not send a recorded frame."""


class Replay:
    """Walks a scenario with one end under test. `problems` collects every difference.

    `progress`, needed for side b, gives for each number of completions of a the number of the frame that brought it.
    """

    def __init__(
        self, scenario: cap.Scenario, side: str, end: ReplayEnd,
        progress: Callable[[cap.Scenario], dict[int, int]] | None = None,
    ):  # fmt: skip
        self.scenario, self.side, self.end = scenario, side, end
        self.me = scenario.end(side)
        self.problems: list[str] = []
        self.frames = list(scenario.frames)
        self.waiting_completions = 0
        self.next_psn: int | None = None
        self.last_atomic: cap.Post | None = None
        self.posted = False
        self.passed = 0
        self.nak_fed = False
        self._progress = progress
        self._reached: dict[int, int] | None = None

    def run(self) -> list[str]:
        try:
            for step in self.scenario.steps:
                self._step(step)
            while self.frames:
                self.one_frame()
            self._leftovers()
        except _Silent:
            pass
        return self.problems

    def _step(self, step: cap.Step) -> None:
        mine = step.side == self.side
        self.posted = self.posted or isinstance(step, cap.Post)
        match step:
            case cap.Completions():
                self._wait_for(step, mine)
            case cap.FrameStep():
                self._crafted_frame(step)
            case cap.AtomicResult():
                self._atomic_result(step)
            case cap.Post():
                if step.side == "a" and step.op in _ATOMIC:
                    self.last_atomic = step
                if mine:
                    self.end.post(step)
            case cap.Recv() if mine:
                self._until_last_rnr()
                self.end.recv(step)
            case cap.MemorySet() if mine:
                self.end.write_memory(step.offset, step.data)
            case cap.MemoryIs() if mine:
                self._memory(step.offset, step.data, "memory")
            case cap.WindowBound() if mine:
                self.end.bind(step)
            case cap.GrhArea() if mine:
                self._memory(0, step.data, "GRH area")

    def _until_last_rnr(self) -> None:
        """A receive posted after messages were: it came after the last RNR NAK."""
        rnr = [f.number for f in self.frames if f.sender == self.side and _is_nak(f.data, (1,))]
        while self.posted and rnr and self.frames[0].number <= rnr[-1]:
            self.one_frame()

    def _memory(self, offset: int, data: bytes, what: str) -> None:
        have = self.end.read_memory(offset, len(data))
        if have != data:
            first = next(i for i, (x, y) in enumerate(zip(have, data, strict=True)) if x != y)
            self.problems.append(
                f"{what} at {offset} + {first}: {have[first : first + 32].hex()}, recorded {data[first : first + 32].hex()}"
            )

    def _atomic_result(self, step: cap.AtomicResult) -> None:
        post = self.last_atomic
        assert post is not None
        if self.side == "a":
            self._memory(post.sges[0][0], step.returned, "returned value")
        else:
            self._memory(post.remote_addr - self.me.addr, step.memory, "atomic target")

    # ---- completions --------------------------------------------------------------------------------------------

    def _wait_for(self, step: cap.Completions, mine: bool) -> None:
        """Let frames pass until the end under test has what came, or, watching from b, until a's messages are through."""
        if not mine:
            self._pass_other(step)
            return
        done = self.waiting_completions
        wanted = done + len(step.entries)
        while self.frames:
            own_next = self.frames[0].sender == self.side
            if len(self.end.completions(wanted, own_next)) >= wanted:
                break
            self.one_frame()
        self.end.run_timers(wanted)
        have = self.end.completions()[done:wanted]
        self.waiting_completions = wanted
        if len(have) < len(step.entries):
            self.problems.append(f"{len(have)} completions, recorded {len(step.entries)}: {step.entries}")
        for want, had in zip(step.entries, have, strict=False):
            self.problems += cap.compare_completion(want, had, self.scenario.name)

    def _pass_other(self, step: cap.Completions) -> None:
        """The other end reported completions: everything up to the frame that caused them has passed."""
        if self.side == "a" or self.scenario.crafted or self._progress is None:
            return
        if self._reached is None:
            self._reached = self._progress(self.scenario)
        self.passed += len(step.entries)
        target = self._reached.get(self.passed, 0)
        while self.frames and self.frames[0].number <= target:
            self.one_frame()

    # ---- frames -------------------------------------------------------------------------------------------------

    def _crafted_frame(self, step: cap.FrameStep) -> None:
        assert self.frames[0].sender == step.side
        self.one_frame()

    def one_frame(self) -> None:
        """The next recorded frame: expected from the end under test, or fed to it."""
        frame = self.frames.pop(0)
        if frame.sender == self.side:
            self._expect(frame)
            return
        if self.side == "a" and not self.scenario.crafted:
            self._crossing(frame)
        self.nak_fed = self.nak_fed or _is_nak(frame.data)
        late = self.frames.pop(0) if frame.late and self.frames and self.frames[0].sender == frame.sender else None
        for raw in (late.delivered() if late else []) + frame.delivered():
            self.end.receive(raw)

    def _crossing(self, frame: cap.CapturedFrame) -> None:
        """Frames recorded behind a NAK that go on where the sender was had left before the NAK arrived."""
        if not _is_nak(frame.data):
            return
        while self.frames and self.frames[0].sender == "a" and parse_frame(self.frames[0].data).psn == self.next_psn:
            self._expect(self.frames.pop(0))

    def _expect(self, frame: cap.CapturedFrame) -> None:
        want = parse_frame(frame.data)
        repeated = self.next_psn is not None and (want.psn - self.next_psn & 0xFFFFFF) >= 1 << 23
        have = self.end.next_frame(repeated)
        while have is not None and want.psn != self.next_psn and self._in_flight(have):
            have = self.end.next_frame(repeated)
        if have is None:
            self.problems.append(f"frame {frame.number}: nothing sent, recorded {want.opcode}")
            if self.end.eager:
                raise _Silent  # each frame after it would cost another long wait
            return
        self.nak_fed = self.nak_fed and not repeated
        self.problems += map(str, cap.compare_frame(frame.data, have, self.scenario.name, frame.number))
        read = want.opcode is Opcode.RC_READ_REQUEST
        self.next_psn = psn_add(want.psn, psn_packets(want.dma_length, self.scenario.mtu) if read else 1)

    def _in_flight(self, raw: bytes) -> bool:
        """A request of an eager end that goes on where it was and may have left before it saw the NAK."""
        if not (self.end.eager and self.nak_fed and self.side == "a" and self.next_psn is not None):
            return False
        frame = parse_frame(raw)
        if frame.opcode is Opcode.RC_ACK or frame.psn != self.next_psn:
            return False
        self.next_psn = psn_add(self.next_psn, 1)
        return True

    def _leftovers(self) -> None:
        left = [raw for raw in self.end.leftovers() if not self._in_flight(raw)]
        self.problems += [f"sent though not recorded: {parse_frame(raw)}" for raw in left]
        final = self.scenario.final.get(self.side)
        if final is not None:
            self.problems += self.end.final_problems(final)
        extra = self.end.completions()[self.waiting_completions :]
        if extra and not self.scenario.crafted:
            self.problems.append(f"completions not recorded: {extra}")


def _is_nak(raw: bytes, kinds: tuple[int, ...] = (1, 2, 3)) -> bool:
    """An AETH whose syndrome is of one of the kinds: 1 RNR NAK, 3 NAK. Hand-made frames may be unreadable."""
    try:
        frame = parse_frame(raw)
    except FrameError:
        return False
    return frame.opcode is Opcode.RC_ACK and frame.syndrome >> 5 in kinds


def cut(scenario: cap.Scenario, stop: Callable[[cap.Post], bool]) -> cap.Scenario:
    """The scenario up to the first work request of a that `stop` holds for, with the frames before its first packet.

    Only for scenarios that wait for each message's completion. Without such a request: the scenario itself.
    """
    psn = scenario.end("a").psn
    for place, step in enumerate(scenario.steps):
        if not isinstance(step, cap.Post) or step.side != "a":
            continue
        if stop(step):
            end = next(i for i, f in enumerate(scenario.frames) if f.sender == "a" and parse_frame(f.data).psn == psn)
            return replace(scenario, steps=scenario.steps[:place], frames=scenario.frames[:end], final={})
        length = sum(length for _, length in step.sges)
        psn = psn_add(psn, step.count * (1 if step.op in _ATOMIC else psn_packets(length, scenario.mtu)))
    return scenario
