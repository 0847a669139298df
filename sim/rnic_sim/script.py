"""Scripts of posts for `rnic sim ... --script FILE`: one line an action (docs/script.md).

    write qp=0 bytes=4096 count=3 sge=2
    send  qp=1 bytes=64 inline
    read  qp=0 bytes=1000 fence host=b
    wait            # for all completions
    pause 200       # cycles
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ATOMICS", "OPS", "Action", "Pause", "Post", "ScriptError", "Wait", "parse_script", "read_script"]

OPS = ("send", "send_imm", "write", "write_imm", "read", "fetch_add", "cmp_swap")
ATOMICS = ("fetch_add", "cmp_swap")
_FLAGS = ("inline", "fence", "solicited")


class ScriptError(ValueError):
    """A script that cannot be run; the message names file and line."""


@dataclass(frozen=True)
class Post:
    """One message: ``host`` 0 or 1 posts it on its QP number ``qp`` (counted from 0)."""

    op: str
    bytes: int
    qp: int = 0
    host: int = 0
    sge: int = 1
    inline: bool = False
    fence: bool = False
    solicited: bool = False
    imm: int = 0


@dataclass(frozen=True)
class Wait:
    """Go on when every message posted so far has completed."""


@dataclass(frozen=True)
class Pause:
    """Let ``cycles`` pass before the next post."""

    cycles: int


Action = Post | Wait | Pause


def parse_script(text: str, *, name: str = "script", default_bytes: int = 64, default_sge: int = 1) -> list[Action]:
    """The actions of a script. Raises `ScriptError`."""
    actions: list[Action] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        try:
            actions += _line(words, default_bytes, default_sge)
        except ValueError as error:
            raise ScriptError(f"{name}, line {number}: {error}") from None
    if not any(isinstance(action, Post) for action in actions):
        raise ScriptError(f"{name}: nothing is posted")
    return actions


def read_script(path: Path, *, default_bytes: int = 64, default_sge: int = 1) -> list[Action]:
    """`parse_script` of a file."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ScriptError(f"{path}: {error.strerror}") from None
    return parse_script(text, name=str(path), default_bytes=default_bytes, default_sge=default_sge)


def _number(key: str, text: str, low: int = 0, high: int = 1 << 31) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        raise ValueError(f"{key} is {text!r}, must be a number") from None
    if not low <= value <= high:
        raise ValueError(f"{key} is {value}, must be {low}..{high}")
    return value


def _line(words: list[str], default_bytes: int, default_sge: int) -> list[Action]:
    op, rest = words[0], words[1:]
    if op == "wait":
        if rest:
            raise ValueError("wait takes nothing")
        return [Wait()]
    if op == "pause":
        if len(rest) != 1:
            raise ValueError("pause takes a number of cycles")
        return [Pause(_number("pause", rest[0], 1))]
    if op not in OPS:
        raise ValueError(f"{op!r} is none of {', '.join(OPS)}, wait, pause")
    values: dict[str, int] = {"qp": 0, "bytes": 8 if op in ATOMICS else default_bytes, "count": 1, "sge": default_sge, "host": 0,
                              "imm": 0}  # fmt: skip
    flags = dict.fromkeys(_FLAGS, False)
    for word in rest:
        key, equals, text = word.partition("=")
        if not equals and key in flags:
            flags[key] = True
        elif equals and key == "host":
            if text not in ("a", "b"):
                raise ValueError(f"host is {text!r}, must be a or b")
            values["host"] = "ab".index(text)
        elif equals and key in values:
            low, high = {"count": (1, 1 << 20), "sge": (1, 16), "imm": (0, 0xFFFF_FFFF)}.get(key, (0, 1 << 31))
            values[key] = _number(key, text, low, high)
        else:
            raise ValueError(f"{word!r} is none of {', '.join(f'{k}=' for k in values)}, {', '.join(flags)}")
    count = values.pop("count")
    if op in ATOMICS and values["bytes"] != 8:
        raise ValueError("an atomic has 8 bytes")
    if flags["inline"] and op in (*ATOMICS, "read"):
        raise ValueError(f"{op} cannot be inline")
    return [Post(op, **values, **flags)] * count
