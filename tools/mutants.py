"""Faults planted at rule-tagged RTL lines, each to be caught by a test of that rule (`make mutants SEED=1`).

A mutant is one small change (compare flipped, constant off by one, condition inverted or dropped, enum swapped, assignment
dropped ...) of the code a rule id stands at, made in a copy of the RTL under ``build/mutants``. Only the unit tests that name the
rule run against it, those of the same block first, up to the first that fails. A mutant that does not elaborate does not count:
another is drawn. Which mutants are drawn depends on the seed and the sources alone. Exit code 1 when one survives.
"""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("rtl", "sim", "tb"))]

from tools.mutant_verdict import VERDICT  # noqa: E402
from tools.rules import RTL, Place, code_of, collect_tests, implements, places  # noqa: E402

TIME_LIMIT = 400  # seconds of processor time of all tests of one mutant
DRAWS = 6  # mutants of one rule tried for one that elaborates

_FLIPPED = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
            ast.GtE: (">=", ">")}  # fmt: skip
_SHAPES = ("Signal", "Const", "replicate", "word_select", "bit_select", "range")  # calls whose numbers are widths

#: Changes that make no difference: file, what is changed, what stands in the line; and the reason.
EQUIVALENT = {
    ("responder/sequence.py", "without ~stage.has_data", "replay.eq("): "with payload no length of theirs is legal",
    ("requester/complete.py", "without exists", "covered.eq("): "an answer in the window ends at a WQE that exists",
    ("memory/translate_pipe.py", "64 becomes 63", "inside.eq("): "tables reach no further than 2^48",
    ("memory/translate_pipe.py", "64 becomes 65", "inside.eq("): "the sum is cut to 64 bits",
    ("responder/resource_turns.py", "1 becomes 2", "known.eq("): "a second round over the same entries finds what the first did",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file: ``new`` instead of bytes ``start`` to ``end``."""

    place: Place
    start: int
    end: int
    new: str
    what: str

    def __str__(self) -> str:
        return f"{self.place.rule:9} {self.place.path}:{self.place.line} {self.what}"

    def apply(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.end :]


@dataclass
class Result:
    """What came of a mutant; ``caught``: the test, or None (also when the time was up)."""

    mutant: Mutant
    caught: str | None
    elaborates: bool
    seconds: float


# ------------------------------------------------------------------------------------------------------ changes
class _Source:
    """A parsed file with byte offsets of its nodes."""

    def __init__(self, path: str):
        self.bytes = (RTL / path).read_bytes()
        self.text = self.bytes.decode()
        self.tree = ast.parse(self.bytes)
        self._starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.names = vars(importlib.import_module("rnic." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def between(self, left: ast.AST, right: ast.AST, old: str) -> tuple[int, int] | None:
        """Where operator ``old`` stands between two nodes."""
        start, end = self.span(left)[1], self.span(right)[0]
        at = self.bytes[start:end].find(old.encode())
        return None if at < 0 else (start + at, start + at + len(old))


def _changes(source: _Source, root: ast.AST) -> Iterator[tuple[int, int, str, str]]:
    """Start, end, new text, description of every change inside ``root``."""
    if isinstance(root, ast.AugAssign) or (isinstance(root, ast.Expr) and isinstance(root.value, ast.Call)):
        yield *source.span(root), "pass", "dropped"
    shapes: set[int] = set()
    for node in ast.walk(root):
        if id(node) in shapes:
            continue
        span = source.span(node) if isinstance(node, (ast.expr, ast.stmt)) else (0, 0)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _FLIPPED:
            old, new = _FLIPPED[type(node.ops[0])]
            if at := source.between(node.left, node.comparators[0], old):
                yield *at, new, f"{old} becomes {new}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            for kept, lost in ((node.left, node.right), (node.right, node.left)):
                yield *span, f"({source.of(kept)})", f"without {source.of(lost)}"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            old, new = "+-" if isinstance(node.op, ast.Add) else "-+"
            if at := source.between(node.left, node.right, old):
                yield *at, new, f"{old} becomes {new}"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            yield *span, f"({source.of(node.operand)})", f"{source.of(node)} not inverted"
        elif isinstance(node, ast.Call):
            yield from _call_changes(source, node, span)
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SHAPES:
                shapes.update(id(inner) for argument in node.args for inner in ast.walk(argument))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for value in {node.value + 1, max(0, node.value - 1)} - {node.value}:
                yield *span, str(value), f"{source.of(node)} becomes {value}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind = source.names.get(node.value.id)
            if isinstance(kind, type) and issubclass(kind, enum.Enum) and node.attr in kind.__members__:
                members = list(kind.__members__)
                other = members[(members.index(node.attr) + 1) % len(members)]
                if other != node.attr:
                    yield *span, f"{node.value.id}.{other}", f"{source.of(node)} becomes {other}"


def _call_changes(source: _Source, node: ast.Call, span: tuple[int, int]) -> Iterator[tuple[int, int, str, str]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name == "Mux" and len(node.args) == 3:
        condition, first, second = map(source.of, node.args)
        yield *span, f"Mux({condition}, {second}, {first})", "arms of Mux swapped"
    elif name in ("If", "Elif"):
        condition = source.of(node.args[0])
        yield *source.span(node.args[0]), f"({condition}) == 0", f"condition {condition} inverted"
        yield *source.span(node.args[0]), "1", f"condition {condition} dropped"
    elif name in ("any", "all") and not node.args and isinstance(node.func, ast.Attribute):
        other = "all" if name == "any" else "any"
        yield *span, f"{source.of(node.func.value)}.{other}()", f"{name} becomes {other}"
    elif name == "eq" and len(node.args) == 1 and not isinstance(node.args[0], ast.Constant):
        yield *source.span(node.args[0]), "0", f"{source.of(node)} is always 0"


def mutants_of(place: Place, source: _Source) -> list[Mutant]:
    """Every change at a place that is still Python."""
    found = {}
    line = source.text.splitlines()[place.line - 1]
    for root in code_of(source.tree, source.text, place.line):
        for start, end, new, what in _changes(source, root):
            what = re.sub(r"\s+", " ", what)
            mutant = Mutant(place, start, end, new, what if len(what) <= 90 else what[:87] + "...")
            if any((path, change) == (place.path, mutant.what) and where in line for path, change, where in EQUIVALENT):
                continue
            try:
                compile(mutant.apply(source.bytes), place.path, "exec")
            except SyntaxError:
                continue
            found.setdefault((start, end, new), mutant)
    return list(found.values())


# --------------------------------------------------------------------------------------------------------- runs
def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TIME_LIMIT, TIME_LIMIT))


def run_mutant(mutant: Mutant, tests: list[str], home: Path) -> Result:
    """Runs ``tests`` against the mutant in a copy of the RTL at ``home``."""
    begin = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(ROOT / "rtl", home / "rtl")
    target = home / "rtl" / "rnic" / mutant.place.path
    target.write_bytes(mutant.apply(target.read_bytes()))
    verdict = home / "verdict.json"
    paths = [str(home / "rtl"), *(str(ROOT / name) for name in ("sim", "tb")), str(ROOT)]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "tools.mutant_verdict", "--tb=no",
               "-o", f"pythonpath={' '.join(paths)}", *tests]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), VERDICT: str(verdict)}
    with (home / "log").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, preexec_fn=_limit).returncode
    seconds = time.monotonic() - begin
    if code == 0 or code < 0:
        return Result(mutant, None, True, seconds)
    found = json.loads(verdict.read_text()) if verdict.exists() else {"test": "", "elaborates": False}
    if code != 1:
        found["elaborates"] = False
    return Result(mutant, found["test"], found["elaborates"], seconds)


class Plan:
    """Rules, their mutants and tests."""

    def __init__(self, only: list[str]):
        self.tests: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)  # rule: node id, rules the test names
        for name, rules, hardware in collect_tests():
            if hardware and name.startswith("tests/unit/"):
                for rule in rules:
                    self.tests[rule].append((name, len(rules)))
        sources: dict[str, _Source] = {}
        self.mutants: defaultdict[str, list[Mutant]] = defaultdict(list)
        for place in places():
            if implements(place) and place.rule in self.tests and (not only or place.rule in only):
                source = sources.setdefault(place.path, _Source(place.path))
                self.mutants[place.rule] += mutants_of(place, source)
        self.mutants = defaultdict(list, {rule: sorted(found) for rule, found in sorted(self.mutants.items()) if found})

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The unit tests of the rule: those of the same block first, then those that name few rules."""
        folder, _, name = mutant.place.path.removesuffix(".py").partition("/")

        def order(test: tuple[str, int]):
            module = Path(test[0].split("::")[0]).stem
            return (f"_{folder}_" not in module, name not in module, test[1])

        return [name for name, _ in sorted(self.tests[mutant.place.rule], key=order)]


def judge(plan: Plan, seed: int, slot: int, count: int, home: Path) -> Result | None:
    """The first mutant of a slot that elaborates. A slot has the rules at its number, number + count, ... in the drawn order."""
    rules = sorted(plan.mutants)
    random.Random(f"{seed}").shuffle(rules)
    rng = random.Random(f"{seed}:{slot}")
    for rule in (rules[slot % len(rules) :: count] if slot < len(rules) else [rules[slot % len(rules)]]):
        for mutant in rng.sample(plan.mutants[rule], min(DRAWS, len(plan.mutants[rule]))):
            result = run_mutant(mutant, plan.tests_for(mutant), home)
            if result.elaborates:
                return result
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=30, help="mutants that elaborate (30)")
    parser.add_argument("-j", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--rule", action="append", default=[], help="only mutants of this rule")
    parser.add_argument("--slot", action="append", type=int, default=[], help="only this number of the list")
    parser.add_argument("--list", action="store_true", help="print all mutants there are and end")
    options = parser.parse_args()
    plan = Plan(options.rule)
    if not plan.mutants:
        parser.error("no line to change")
    if options.list:
        for found in plan.mutants.values():
            for mutant in found:
                print(mutant)
        return 0
    begin = time.monotonic()
    print(f"seed {options.seed}: {options.count} of {sum(map(len, plan.mutants.values()))} mutants, {len(plan.mutants)} rules")

    def work(slot: int) -> Result | None:
        result = judge(plan, options.seed, slot, options.count, ROOT / "build" / "mutants" / str(slot))
        if result is None:
            print(f"{slot:3} no mutant elaborates", flush=True)
        else:
            caught = (result.caught or "SURVIVES").removeprefix("tests/unit/")
            print(f"{slot:3} {result.mutant}\n      {caught} ({result.seconds:.0f} s)", flush=True)
        return result

    with ThreadPoolExecutor(options.j) as pool:
        results = list(pool.map(work, options.slot or range(options.count)))
    survivors = [result for result in results if result is not None and result.caught is None]
    missing = results.count(None)
    print(f"{len(results) - len(survivors) - missing} of {len(results)} caught in {time.monotonic() - begin:.0f} s")
    for result in survivors:
        print(f"survives: {result.mutant}")
    return 1 if survivors or missing else 0


if __name__ == "__main__":
    sys.exit(main())
