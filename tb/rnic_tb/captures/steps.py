"""The steps of a capture's record: one line of text each, parsed to a typed object; unknown text is an error."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class CaptureError(ValueError):
    """A capture that cannot be understood."""


def pattern(seed: int, length: int) -> bytes:
    """The data generator of the captures."""
    return bytes((seed + i + 13 * (i >> 8)) & 255 for i in range(length))


@dataclass(frozen=True)
class Step:
    """One thing that was done or observed, at end "a" or "b"."""

    side: str


@dataclass(frozen=True)
class Post(Step):
    """A send work request; `sges` are (offset, length) in the end's region, `seed` fills the region before posting.

    `count` requests with consecutive wr_ids were posted at once.
    """

    op: str
    wr_id: int
    sges: tuple[tuple[int, int], ...]
    inline: bool
    fence: bool
    remote_addr: int
    rkey: int
    imm: int
    inv_rkey: int
    compare: int
    swap: int
    add: int
    remote_qpn: int
    remote_qkey: int
    seed: int | None
    count: int

    @property
    def fill(self) -> tuple[int, bytes] | None:
        """(offset, data) to store before posting."""
        if self.seed is None or not self.sges:
            return None
        start = self.sges[0][0]
        return start, pattern(self.seed, max(off + length for off, length in self.sges) - start)


@dataclass(frozen=True)
class Recv(Step):
    """A receive work request of one element."""

    wr_id: int
    offset: int
    length: int


@dataclass(frozen=True)
class ExpectedWc:
    """A completion as the peer reported it. `opcode`, `flags` and `imm` are None where the record has none."""

    wr_id: int
    status: int
    length: int
    opcode: int | None = None
    imm: int | None = None
    flags: int | None = None


@dataclass(frozen=True)
class Completions(Step):
    """The completions that had come by now, in order."""

    entries: tuple[ExpectedWc, ...]


@dataclass(frozen=True)
class NoCompletion(Step):
    """`wanted` completions were waited for in vain; `got` came."""

    got: int
    wanted: int


@dataclass(frozen=True)
class MemoryIs(Step):
    """Memory at `offset` holds `data`."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class MemorySet(Step):
    """Memory at `offset` was set to `data`."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class AtomicResult(Step):
    """The last atomic returned `returned` and left `memory` at the target, both in memory order."""

    returned: bytes
    memory: bytes


@dataclass(frozen=True)
class WindowBound(Step):
    """A type 2 memory window was bound under `rkey`."""

    index: int
    rkey: int


@dataclass(frozen=True)
class GrhArea(Step):
    """The first 40 bytes of the last UD receive buffer."""

    data: bytes


@dataclass(frozen=True)
class FrameStep(Step):
    """One frame of a hand-made exchange passed here; it is the next one of the capture from this side."""

    opcode: int
    psn: int
    syndrome: int | None


@dataclass(frozen=True)
class GuestSetup(Step):
    """Queue pair and region of the real end of a hand-made exchange."""

    transport: str
    qpn: int
    mtu: int
    rq_psn: int
    sq_psn: int
    addr: int
    rkey: int
    peer_qpn: int


@dataclass(frozen=True)
class ToolOutput(Step):
    """Exit status and output of a stock tool."""

    status: int
    text: str


def _number(text: str) -> int:
    return int(text, 0)


def _completions(side: str, text: str) -> Completions:
    entry = re.compile(r"wr=(\d+) status=(\d+) op=(\d+) len=(\d+) imm/inv=(0x[0-9a-f]+) flags=(0x[0-9a-f]+)")
    entries = []
    for part in filter(None, text.strip().split("; ")):
        found = entry.fullmatch(part)
        if not found:
            raise CaptureError(f"completion {part!r}")
        wr, status, op, length, imm, flags = (_number(g) for g in found.groups())
        entries.append(ExpectedWc(wr, status, length, op, imm, flags))
    return Completions(side, tuple(entries))


def _post(side: str, text: str) -> Post:
    """`post id=0 op=write mr=0 off=0 len=5 wr=0x5 raddr=.. rkey=.. (data: pattern seed 6)`."""
    body, _, tail = text.partition(" (data: pattern seed ")
    words = dict(word.split("=", 1) for word in body.split())
    seed = _number(tail[:-1]) if tail else None
    known = {
        "id", "op", "mr", "off", "len", "sg", "wr", "raddr", "rkey", "imm", "inv", "cmp", "swap", "add", "fl", "ah",
        "dqpn", "qkey", "n",
    }  # fmt: skip
    if words.keys() - known or words.get("fl", "") not in ("", "i", "f") or int(words.get("mr", "0")):
        raise CaptureError(f"post {text!r}")
    value = {name: _number(text) for name, text in words.items() if name not in ("op", "sg", "fl")}
    if "sg" in words:
        sges = tuple((int(off), int(length)) for _, off, length in (s.split(":") for s in words["sg"].split(",")))
    else:
        sges = ((value["off"], value["len"]),) if "off" in value else ()
    return Post(
        side=side,
        op=words["op"],
        wr_id=value.get("wr", 0),
        sges=sges,
        inline=words.get("fl") == "i",
        fence=words.get("fl") == "f",
        remote_addr=value.get("raddr", 0),
        rkey=value.get("rkey", 0),
        imm=value.get("imm", 0),
        inv_rkey=value.get("inv", 0),
        compare=value.get("cmp", 0),
        swap=value.get("swap", 0),
        add=value.get("add", 0),
        remote_qpn=value.get("dqpn", 0),
        remote_qkey=value.get("qkey", 0),
        seed=seed,
        count=value.get("n", 1),
    )


def _guest_completions(side: str, text: str) -> Completions:
    rows = ast.literal_eval(text)
    return Completions(side, tuple(ExpectedWc(int(wr), int(status), int(length)) for wr, status, length in rows))


def _frame_step(side: str, text: str) -> FrameStep:
    words = dict(re.findall(r"(op|psn|syn)=(\S+)", text))
    return FrameStep(side, int(words["op"]), _number(words["psn"]), int(words["syn"]) if "syn" in words else None)


#: Text of a step -> its object. `a: ` and `b: ` in front name the side; the crafted ones say guest (a) and python (b).
STEPS: tuple[tuple[str, Callable], ...] = (
    (r"([ab]): completions ?(.*)", lambda s, t: _completions(s, t)),
    (r"([ab]): post (.*)", lambda s, t: _post(s, t)),
    (r"([ab]): recv posted off=(\d+) len=(\d+) wr=(\d+)", lambda s, o, n, w: Recv(s, int(w), int(o), int(n))),
    (r"([ab]): only (\d+) of (\d+) completions came", lambda s, g, w: NoCompletion(s, int(g), int(w))),
    (
        r"([ab]): memory off=(\d+) len=(\d+) == pattern seed (\d+)",
        lambda s, o, n, p: MemoryIs(s, int(o), pattern(int(p), int(n))),
    ),
    (
        r"([ab]): memory off=(\d+) len=(\d+) filled with pattern seed (\d+)",
        lambda s, o, n, p: MemorySet(s, int(o), pattern(int(p), int(n))),
    ),
    (
        r"([ab]): u64 at off (\d+) = (0x[0-9a-f]+) \(little endian in memory\)",
        lambda s, o, v: MemorySet(s, int(o), int(v, 16).to_bytes(8, "little")),
    ),
    (r"([ab]): first \d+ bytes ([0-9a-f]+)", lambda s, d: MemoryIs(s, 0, bytes.fromhex(d))),
    (
        r"([ab]): returned (?:bytes )?([0-9a-f]{16}), b: memory (?:bytes )?([0-9a-f]{16})",
        lambda s, r, m: AtomicResult(s, bytes.fromhex(r), bytes.fromhex(m)),
    ),
    (r"([ab]): memory window (\d+) bound, rkey (0x[0-9a-f]+)", lambda s, i, k: WindowBound(s, int(i), int(k, 16))),
    (r"([ab]): GRH area ([0-9a-f]{80})", lambda s, d: GrhArea(s, bytes.fromhex(d))),
    (
        r"guest QP (\S+) \((rc|uc), MTU (\d+), expects PSN (\S+), sends from (\S+)\), MR (\S+) rkey (\S+); "
        r"python QP (\S+)",
        lambda q, t, m, r, s, a, k, p: GuestSetup("a", t, *(_number(n) for n in (q, m, r, s, a, k, p))),
    ),
    (r"guest posts: post (.*)", lambda t: _post("a", t)),
    (
        r"guest posts: recv id=0 mr=0 off=(\d+) len=(\d+) wr=(\d+)",
        lambda o, n, w: Recv("a", int(w), int(o), int(n)),
    ),
    (r"guest completions: (\[.*\])", lambda t: _guest_completions("a", t)),
    (r"guest memory off=(\d+): ([0-9a-f]+)", lambda o, d: MemoryIs("a", int(o), bytes.fromhex(d))),
    (r"guest: (op=\d+ psn=0x[0-9a-f]+ ackreq=[01] len=\d+.*)", lambda t: _frame_step("a", t)),
    (r"python: (op=\d+ psn=0x[0-9a-f]+ ackreq=[01] data=\d+.*)", lambda t: _frame_step("b", t)),
)


def parse_step(text: str) -> Step:
    """The step of one line of text. Raises CaptureError when no form fits."""
    if text.startswith("("):
        row = ast.literal_eval(text)
        return ToolOutput("a", row[-2], row[-1])
    for form, build in STEPS:
        found = re.fullmatch(form, text)
        if found:
            try:
                return build(*found.groups())
            except (ValueError, KeyError) as error:
                raise CaptureError(f"step {text!r}: {error}") from error
    raise CaptureError(f"unknown step {text!r}")
