"""Logic depth of an ECP5 netlist: LUT4 levels between registers, the worst of every block.

A LUT4 is one level; the wide-function muxes (PFUMX, L6MUX21) belong to their slice and count nothing; a carry chain counts
one level where a signal enters it, none from carry to carry.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Depth", "block_depths"]

_FREE = {"PFUMX", "L6MUX21"}
_STARTS = {"TRELLIS_FF", "DP16KD", "TRELLIS_DPR16X4", "TRELLIS_RAMW", "MULT18X18D", "ALU54B"}


@dataclass(frozen=True)
class Depth:
    """The deepest path that ends in a register of ``block``."""

    block: str
    levels: int
    path: list[str]  # nets or cells from the start to the end


def _block(name: str, depth: int) -> str:
    parts = name.lstrip("\\").split(".")
    return ".".join(parts[:depth]) if len(parts) > 1 else "top"


def block_depths(netlist: Path, top: str, *, hierarchy: int = 2) -> list[Depth]:
    """Deepest path per block, worst first. ``netlist`` is `yosys write_json` after flattening; ``ValueError`` for a loop."""
    module = json.loads(netlist.read_text())["modules"][top]
    names: dict[int, str] = {}
    for name, net in module["netnames"].items():
        for bit in net["bits"]:
            if isinstance(bit, int) and (bit not in names or len(name) < len(names[bit])):
                names[bit] = name
    driver: dict[int, tuple[str, str]] = {}
    cells = module["cells"]
    for cname, cell in cells.items():
        for port, bits in cell["connections"].items():
            if cell["port_directions"].get(port) == "output":
                for bit in bits:
                    if isinstance(bit, int):
                        driver[bit] = (cname, port)

    level: dict[int, tuple[int, int | None]] = {}  # bit: (levels, previous bit)
    active: set[int] = set()

    def inputs_of(cname: str, port: str) -> list[tuple[int, int]]:
        """(bit, cost) of what an output depends on through combinational logic."""
        cell = cells[cname]
        kind = cell["type"]
        if kind in _STARTS or kind not in {"LUT4", "CCU2C", *_FREE}:
            return []
        found = []
        for name, bits in cell["connections"].items():
            if cell["port_directions"].get(name) != "input":
                continue
            cost = 1 if kind == "LUT4" else 0 if kind in _FREE or name == "CIN" else 1
            found += [(bit, cost) for bit in bits if isinstance(bit, int)]
        return found

    def resolve(start: int) -> tuple[int, int | None]:
        stack = [start]
        while stack:
            bit = stack[-1]
            if bit in level:
                stack.pop()
                continue
            deps = inputs_of(*driver[bit]) if bit in driver else []
            missing = [d for d, _ in deps if d not in level]
            if missing:
                if bit in active:
                    raise ValueError(f"combinational loop through {names.get(bit, bit)}")
                active.add(bit)
                stack += missing
                continue
            active.discard(bit)
            best: tuple[int, int | None] = (0, None)
            for dep, cost in deps:
                if level[dep][0] + cost > best[0]:
                    best = (level[dep][0] + cost, dep)
            level[bit] = best
            stack.pop()
        return level[start]

    worst: dict[str, tuple[int, int, str]] = defaultdict(lambda: (-1, 0, ""))
    for cname, cell in cells.items():
        if cell["type"] not in _STARTS:
            continue
        ends = [bit for port, bits in cell["connections"].items() if cell["port_directions"].get(port) == "input"
                and port not in ("CLK", "CLKA", "CLKB", "WCK") for bit in bits if isinstance(bit, int)]  # fmt: skip
        outs = [bit for port, bits in cell["connections"].items() if cell["port_directions"].get(port) == "output"
                for bit in bits if isinstance(bit, int)]  # fmt: skip
        label = names.get(outs[0], cname) if outs else cname
        for bit in ends:
            levels, _ = resolve(bit)
            block = _block(label, hierarchy)
            if levels > worst[block][0]:
                worst[block] = (levels, bit, label)
    result = []
    for block, (levels, bit, label) in worst.items():
        path = [label]
        at: int | None = bit
        while at is not None:
            path.append(names.get(at, str(at)))
            at = level[at][1]
        result.append(Depth(block, levels, path[::-1]))
    return sorted(result, key=lambda d: -d.levels)
