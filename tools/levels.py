"""Logic depth of an ECP5 netlist: LUT4 levels between registers, the worst of every block.

A LUT4 is one level; the wide-function muxes (PFUMX, L6MUX21) belong to their slice and count nothing; a carry chain counts
one level where a signal enters it, none from carry to carry.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Depth", "block_depths", "end_depths"]

_FREE = {"PFUMX", "L6MUX21"}
_STARTS = {"TRELLIS_FF", "DP16KD", "TRELLIS_DPR16X4", "TRELLIS_RAMW", "MULT18X18D", "ALU54B"}
_CLOCKS = {"CLK", "CLKA", "CLKB", "WCK"}


@dataclass(frozen=True)
class Depth:
    """The deepest path that ends in ``block`` (a register, a port, or any register of a block)."""

    block: str
    levels: int
    path: list[str]  # nets or cells from the start to the end


def _block(name: str, depth: int) -> str:
    parts = name.lstrip("\\").split(".")
    return ".".join(parts[:depth]) if len(parts) > 1 else "top"


class _Netlist:
    """A flat netlist of `yosys write_json` with the level of every bit."""

    def __init__(self, netlist: Path, top: str):
        module = json.loads(netlist.read_text())["modules"][top]
        self.cells = module["cells"]
        self.ports = module["ports"]
        self.names: dict[int, str] = {}
        for name, net in module["netnames"].items():
            for bit in net["bits"]:
                if isinstance(bit, int) and (bit not in self.names or len(name) < len(self.names[bit])):
                    self.names[bit] = name
        self.driver: dict[int, tuple[str, str]] = {}
        for cname, cell in self.cells.items():
            for port, bits in cell["connections"].items():
                if cell["port_directions"].get(port) == "output":
                    for bit in bits:
                        if isinstance(bit, int):
                            self.driver[bit] = (cname, port)
        self.level: dict[int, tuple[int, int | None]] = {}  # bit: (levels, previous bit)

    def _inputs_of(self, cname: str) -> list[tuple[int, int]]:
        """(bit, cost) of what an output depends on through combinational logic."""
        cell = self.cells[cname]
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

    def levels(self, start: int) -> int:
        """LUT4 levels from registers and input ports to a bit; ``ValueError`` for a loop."""
        stack, active, level = [start], set(), self.level
        while stack:
            bit = stack[-1]
            if bit in level:
                stack.pop()
                continue
            deps = self._inputs_of(self.driver[bit][0]) if bit in self.driver else []
            missing = [d for d, _ in deps if d not in level]
            if missing:
                if bit in active:
                    raise ValueError(f"combinational loop through {self.names.get(bit, bit)}")
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
        return level[start][0]

    def path(self, label: str, bit: int | None) -> list[str]:
        path = [label]
        while bit is not None:
            path.append(self.names.get(bit, str(bit)))
            bit = self.level[bit][1]
        return path[::-1]

    def ends(self):
        """(name, bit) of every register input; a register is named by its output."""
        for cname, cell in self.cells.items():
            if cell["type"] not in _STARTS:
                continue
            directions = cell["port_directions"]
            outs = [bit for port, bits in cell["connections"].items() if directions.get(port) == "output"
                    for bit in bits if isinstance(bit, int)]  # fmt: skip
            label = self.names.get(outs[0], cname) if outs else cname
            for port, bits in cell["connections"].items():
                if directions.get(port) == "input" and port not in _CLOCKS:
                    yield from ((label, bit) for bit in bits if isinstance(bit, int))


def _worst(netlist: _Netlist, ends) -> list[Depth]:
    """The deepest path of each group of ends, worst first. ``ends``: (group, name, bit)."""
    worst: dict[str, tuple[int, int, str]] = {}
    for group, label, bit in ends:
        levels = netlist.levels(bit)
        if group not in worst or levels > worst[group][0]:
            worst[group] = (levels, bit, label)
    found = [Depth(group, levels, netlist.path(label, bit)) for group, (levels, bit, label) in worst.items()]
    return sorted(found, key=lambda depth: -depth.levels)


def block_depths(netlist: Path, top: str, *, hierarchy: int = 2) -> list[Depth]:
    """Deepest path per block, worst first. ``netlist`` is `yosys write_json` after flattening; ``ValueError`` for a loop."""
    flat = _Netlist(netlist, top)
    return _worst(flat, ((_block(label, hierarchy), label, bit) for label, bit in flat.ends()))


def end_depths(netlist: Path, top: str) -> tuple[list[Depth], list[Depth]]:
    """Deepest path per register and per output port, worst first each; ``ValueError`` for a loop."""
    flat = _Netlist(netlist, top)

    def base(name: str) -> str:
        return re.sub(r"(_(TRELLIS_FF|LUT4|PFUMX|L6MUX21|CCU2C)_\w+)+$|\[[\d:]+\]", "", name)

    registers = _worst(flat, ((base(label), label, bit) for label, bit in flat.ends()))
    ports = _worst(flat, (
        (name, name, bit) for name, port in flat.ports.items() if port["direction"] == "output"
        for bit in port["bits"] if isinstance(bit, int)
    ))  # fmt: skip
    return registers, ports
