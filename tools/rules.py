"""Where the transport rules stand: RTL lines and tests by rule id.

`tools/rules.py` prints the table; `tests/unit/test_rules.py` asserts it; `tools/mutants.py` takes its lines from here.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("rtl", "sim", "tb"))]

from tests.rules import TITLES, proves_rtl, rules_of  # noqa: E402

RTL = ROOT / "rtl" / "rnic"
#: Layouts and numbers that both sides of an interface read, where a rule says what a field is for; frames in plain Python.
NO_HARDWARE = ("abi/", "records.py", "responder/records.py", "wire/frame.py", "wire/icrc.py", "wire/headers.py")

_ID = r"R-[A-Z]+-\d+"
_RANGE = re.compile(rf"({_ID})(?:(?:\.\.| to )(?:R-[A-Z]+-)?(\d+))?")
_CHECK = re.compile(r"\bchecks? (\d+(?:(?:, | and )\d+)*)")
_SECTION = re.compile(r"(?<![\w.])(?:8\.1#\d+|8\.2|7\.4)(?![\w.]*\d)")


@dataclass(frozen=True, order=True)
class Place:
    """A rule in an RTL file; ``comment``: beside code, not in a docstring or another string."""

    path: str  # below rtl/rnic
    line: int
    rule: str
    comment: bool


@dataclass
class Coverage:
    """What is known of one rule."""

    places: list[Place] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)  # node ids that run hardware
    models: list[str] = field(default_factory=list)  # node ids of the software endpoint


def ids_in(text: str) -> Iterator[str]:
    """Rule ids of a comment, ``R-ICRC-1..5`` and ``R-DUP-3 to R-DUP-6`` in full, ``check 9`` as the row of section 8.1."""
    for match in _RANGE.finditer(text):
        stem, first = match[1].rsplit("-", 1)
        for number in range(int(first), int(match[2] or first) + 1):
            yield f"{stem}-{number}"
    for match in _CHECK.finditer(text):
        for number in re.findall(r"\d+", match[1]):
            yield f"8.1#{number}"
    yield from _SECTION.findall(text)


def implements(place: Place) -> bool:
    """Whether the place is at hardware, not in a text and not at a layout."""
    return place.comment and not place.path.startswith(NO_HARDWARE)


def places(root: Path = RTL) -> list[Place]:
    """Every rule id in the RTL, in order of path and line."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type not in (tokenize.COMMENT, tokenize.STRING):
                continue
            for i, line in enumerate(token.string.splitlines()):
                for rule in ids_in(line):
                    found.add(Place(name, token.start[0] + i, rule, token.type == tokenize.COMMENT))
    return sorted(found)


def code_of(tree: ast.Module, text: str, line: int) -> list[ast.AST]:
    """The code a comment at ``line`` speaks of: what begins on that line, or on the next line with code behind a whole-line
    comment. Outermost nodes; of a compound statement its head, and the body when the head has no choice in it."""
    lines = text.splitlines()
    if lines[line - 1].lstrip().startswith("#"):
        while line < len(lines) and (not lines[line - 1].strip() or lines[line - 1].lstrip().startswith("#")):
            line += 1
    chosen: list[ast.AST] = []
    inner: set[int] = set()
    for node in ast.walk(tree):  # outer nodes come first
        if isinstance(node, (ast.stmt, ast.expr)) and node.lineno == line and id(node) not in inner:
            chosen.append(node)
            inner.update(map(id, ast.walk(node)))
    if not chosen:  # a line that only goes on with something: the smallest statement or expression around it
        around = [node for node in ast.walk(tree) if isinstance(node, (ast.stmt, ast.expr))
                  and node.lineno <= line <= (node.end_lineno or 0)]  # fmt: skip
        chosen = around[-1:]
    result: list[ast.AST] = []
    for node in chosen:
        if isinstance(node, ast.With):
            heads = [item.context_expr for item in node.items]
            plain = any(isinstance(head, ast.Call) and isinstance(head.func, ast.Attribute)
                        and head.func.attr in ("State", "Else", "Default") for head in heads)  # fmt: skip
            result += node.body if plain else heads
        else:
            result.append(node)
    return result


class _Collector:
    """pytest plugin: the collected tests by rule."""

    def __init__(self) -> None:
        self.items: list[tuple[str, set[str], bool]] = []

    def pytest_collection_finish(self, session) -> None:
        self.items = [(item.nodeid, rules_of(item), proves_rtl(item)) for item in session.items]


def collect_tests() -> list[tuple[str, set[str], bool]]:
    """Node id, rules, whether it runs hardware, of every test. Raises RuntimeError when the collection fails."""
    import pytest

    collector = _Collector()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(ROOT / "tests")], [collector])
    if code:
        raise RuntimeError(output.getvalue()[-2000:])
    return collector.items


def coverage() -> dict[str, Coverage]:
    """By rule id, in the order of `tests/data/rules.txt`; an id in the RTL that is no rule comes last."""
    table: defaultdict[str, Coverage] = defaultdict(Coverage, {rule: Coverage() for rule in TITLES})
    for place in places():
        table[place.rule].places.append(place)
    for name, rules, hardware in collect_tests():
        for rule in rules:
            (table[rule].tests if hardware else table[rule].models).append(name)
    return dict(table)


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("rule", "title", "RTL lines", "texts", "tests", "model tests")
    for rule, known in coverage().items():
        lines = [place for place in known.places if implements(place)]
        table.add_row(rule, TITLES.get(rule, "?"), str(len(lines)), str(len(known.places) - len(lines)), str(len(known.tests)),
                      str(len(known.models)))  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
