"""`@rule("R-DUP-3")` names the transport rules a test proves; `pytest --rule R-DUP-3` runs the tests of a rule.

The ids are those of `tests/data/rules.txt`. A test of the software endpoint (a module ``test_endpoint_*``) says nothing about
the RTL; every other test with a rule does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).parent / "data" / "rules.txt"


def read_titles(path: Path = LIST) -> dict[str, str]:
    """Rule id to its title, in the order of the file."""
    lines = (line for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split(maxsplit=1) for line in lines)


TITLES = read_titles()


def check_ids(ids: tuple[str, ...]) -> None:
    """Raises ValueError for an empty list, for an id that is no rule, and for one named twice."""
    if unknown := [name for name in ids if name not in TITLES]:
        raise ValueError(f"no such rule: {', '.join(unknown)}")
    if not ids or len(set(ids)) < len(ids):
        raise ValueError("name each rule once, at least one")


def rule(*ids: str) -> pytest.MarkDecorator:
    """Decorator, or ``marks`` of a `pytest.param`: the test proves the rules ``ids``. Raises as `check_ids`."""
    check_ids(ids)
    return pytest.mark.rule(*ids)


def rules_of(item: pytest.Item) -> set[str]:
    """The rules a collected test names. Raises ValueError for an id that is no rule."""
    found: set[str] = set()
    for mark in item.iter_markers("rule"):
        check_ids(mark.args)
        found.update(mark.args)
    return found


def proves_rtl(item: pytest.Item) -> bool:
    """Whether the test runs hardware."""
    return not item.path.name.startswith("test_endpoint_")
