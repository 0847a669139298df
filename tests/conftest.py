"""`--rule ID`: only the tests of a transport rule (`tests/rules.py`); may be given more than once."""

from __future__ import annotations

import pytest

from tests.rules import TITLES, rules_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rule", action="append", default=[], metavar="ID", help="only tests of this transport rule")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Looks at the ids of every test, then leaves those of the rules asked for."""
    asked = set(config.getoption("--rule"))
    if unknown := asked - set(TITLES):
        raise pytest.UsageError(f"no such rule: {', '.join(sorted(unknown))}")
    try:
        chosen = [bool(rules_of(item) & asked) for item in items]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if asked:
        config.hook.pytest_deselected(items=[item for item, keep in zip(items, chosen, strict=True) if not keep])
        items[:] = [item for item, keep in zip(items, chosen, strict=True) if keep]
