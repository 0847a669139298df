"""pytest plugin of `tools/mutants.py`: leaves the first failure, and whether the design had been elaborated, in a file."""

import json
import os
from pathlib import Path

VERDICT = "RNIC_MUTANT_VERDICT"  # environment: the file


def pytest_exception_interact(node, call, report) -> None:
    path = Path(os.environ[VERDICT])
    if path.exists():
        return
    made = True
    for entry in call.excinfo.traceback:
        constructor = entry.name == "__init__" and "mutants" in Path(entry.path).parts
        made &= not (entry.name == "elaborate" or str(entry.path).endswith("hdl/_ir.py") or constructor)
    path.write_text(json.dumps({"test": node.nodeid, "elaborates": made and report.when == "call"}))
