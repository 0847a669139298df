"""Verilog of the top: plain AXI names at the boundary, assertions in or out."""

import re

from amaranth.back import rtlil, verilog
from amaranth.hdl import Fragment
from amaranth.lib import wiring

from .clash import ClashPlatform
from .config import Params, RnicConfig

__all__ = ["TOP_NAME", "port_map", "to_verilog"]

TOP_NAME = "rnic"

# An Amaranth Assert or Print is one `$check` or `$print` cell of RTLIL; cells are flat blocks up to their `end`.
_CHECK_CELL = re.compile(r"^  cell \$(?:check|print) .*?^  end\n", re.MULTILINE | re.DOTALL)

# Yosys writes bits that are constant beside bits that are not as `always @* x[6:1] = 6'h10;`. A block without inputs never
# runs in simulation, so the bits would stay 0. A register that never changes makes it run once.
_CONSTANT_BLOCK = re.compile(r"^  always @\*\n    (\S.*? = [\d'bh{}, a-f]+;)\n", re.MULTILINE)
_MODULE_HEAD = re.compile(r"^module (?:.*?)\);\n", re.MULTILINE | re.DOTALL)
_ONCE = "rnic_once"


def _run_constant_blocks(text: str) -> str:
    """Make every constant block run at time zero."""
    parts = re.split(r"(?<=^endmodule\n)", text, flags=re.MULTILINE)
    for i, part in enumerate(parts):
        fixed, count = _CONSTANT_BLOCK.subn(
            lambda match: f"  always @* begin\n    if ({_ONCE}) begin end\n    {match[1]}\n  end\n", part
        )
        if count:
            parts[i] = _MODULE_HEAD.sub(lambda head: head[0] + f"  reg {_ONCE} = 0;\n", fixed, count=1)
    return "".join(parts)

# Yosys writes the initial value of a memory row by row: tens of thousands of lines for tables that begin as zeros.
_ZERO_ROWS = re.compile(
    r"^  initial begin\n    (?P<name>\S+ ?)\[0\] = (?P<zero>\d+'h0+);\n(?:    (?P=name)\[\d+\] = (?P=zero);\n)*  end\n",
    re.MULTILINE,
)


def _compact_zero_rows(text: str) -> str:
    """The same initial values as one loop a memory."""

    def loop(match: re.Match) -> str:
        name, zero, rows = match["name"], match["zero"], match[0].count("\n") - 2
        if rows < 4:
            return match[0]
        row = f"rnic_row_{match.start()}"
        return f"  integer {row};\n  initial for ({row} = 0; {row} < {rows}; {row} = {row} + 1) {name}[{row}] = {zero};\n"

    return _ZERO_ROWS.sub(loop, text)

# A signal of no bits (the index of one client, a tag nobody needs) would become `wire [-1:0]`, two bits wide and reversed.
_ZERO_WIRE = re.compile(r"^(?: *attribute .*\n)* *wire width 0 (?:(?:input|output|inout) \d+ )?(\S+)\n", re.MULTILINE)
_EMPTY_CONNECT = re.compile(r"^ *connect (\S+) \{  \}\n", re.MULTILINE)


def _without_zero_width(rtlil_text: str) -> str:
    """Leave out wires of no bits and what connects them (a check's own port without arguments stays)."""
    names = set(_ZERO_WIRE.findall(rtlil_text))
    text = _ZERO_WIRE.sub("", rtlil_text)
    return _EMPTY_CONNECT.sub(lambda match: "" if match[1] in names else match[0], text)


def port_map(component: wiring.Component) -> dict:
    """Ports of a component as `verilog.convert` takes them, members joined by one underscore.

    A stream's payload and handshake lose nothing: ``net_tx.tdata`` becomes ``net_tx_tdata``. ``ValueError`` when two ports
    would get one name.
    """
    ports: dict = {}
    for path, _member, value in component.signature.flatten(component):
        name = "_".join(str(part) for part in path)
        if name in ports:
            raise ValueError(f"two ports would be called {name}")
        signal = value.as_value() if hasattr(value, "as_value") else value
        ports[name] = (signal, None)
    return ports


def to_verilog(component: wiring.Component, *, name: str = TOP_NAME, assertions: bool = True,
               fragment: Fragment | None = None) -> str:  # fmt: skip
    """Verilog-2001 text of a component; reproducible (no source paths, same text for every hash seed).

    Without ``assertions`` every Assert and Print is left out, and the checks of `rnic.clash`; only they. ``fragment`` is the
    elaborated component where the caller has it.
    """
    fragment = fragment or Fragment.get(component, ClashPlatform() if assertions else None)
    # the two halves of amaranth.back.verilog.convert, so that the checks can be taken out of the text between them
    text, _names = rtlil.convert_fragment(fragment, port_map(component), name, emit_src=False)
    if not assertions:
        text = _CHECK_CELL.sub("", text)
    text = _without_zero_width(text)
    text = verilog._convert_rtlil_text(text, strip_internal_attrs=True)
    return _run_constant_blocks(_compact_zero_rows(text))


def nic_verilog(config: RnicConfig, *, assertions: bool = True) -> str:
    """Verilog of the whole RNIC."""
    from .nic import Nic

    return to_verilog(Nic(Params(config)), assertions=assertions)
