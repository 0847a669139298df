"""Gives signals their enum types back, so that waves show names: opcodes, events, statuses, FSM states.

Yosys writes the names of an enum's values as attributes beside a plain vector. Here the vector becomes a variable of a
SystemVerilog enum type, for the simulation only; Verilator then writes the names into the FST file, and a viewer shows them
without a filter file. No value changes: the types are as wide as the vectors.
"""

import re
from collections.abc import Mapping

__all__ = ["EnumTypes", "name_enums"]

_MODULE = re.compile(r"^module (\S+) ?\(.*?^endmodule\n", re.M | re.S)
_PORT = re.compile(r"^  (?:input|output|inout) (?:\[\d+:0\] )?(\S+) ?;", re.M)
_DECLARED = re.compile(
    r'(?P<attributes>(?:^  \(\* (?:enum_base_type|enum_value_\w+) = "[^"]*" \*\)\n)+)(?P<others>(?:^  \(\* .*\*\)\n)*)'
    r"^  (?P<kind>wire|reg) (?P<range>\[(?P<high>\d+):0\] )?(?P<name>\S+)(?P<rest> ?(?:=[^;]*)?;\n)", re.M,
)  # fmt: skip
_VALUE = re.compile(r'enum_value_([01]+) = "([^"]*)"')
_WORD = re.compile(r"[A-Za-z_]\w*")


class EnumTypes:
    """SystemVerilog types: one package for each set of values, as enumerators of a package share one scope."""

    def __init__(self, prefix: str = "rnic") -> None:
        self.prefix = prefix
        self.known: dict[tuple, str] = {}

    def of(self, name: str, bits: int, values: Mapping[int, str]) -> str:
        """The type for these values."""
        key = (name, bits, tuple(sorted(values.items())))
        if key not in self.known:
            self.known[key] = f"{self.prefix}_{name}_{len(self.known)}"
        return f"{self.known[key]}::{name}"

    def packages(self) -> str:
        """Verilog of all packages."""
        text = []
        for (name, bits, values), package in self.known.items():
            members = ", ".join(f"{word} = {bits}'d{value}" for value, word in values)
            text.append(f"package {package}; typedef enum logic [{bits - 1}:0] {{{members}}} {name}; endpackage\n")
        return "".join(text)


def _legal(values: Mapping[int, str], bits: int) -> bool:
    return (bool(values) and max(values) < 1 << bits and len(set(values.values())) == len(values)
            and all(_WORD.fullmatch(text) for text in values.values()))


def name_enums(verilog: str, states: Mapping[str, Mapping]) -> str:
    """The same modules with enum types, SystemVerilog.

    ``states`` holds the FSMs by the path of their state register (``rnic.segmenter.segment_state``): names by value. Ports
    and registers that were renamed stay as they are.
    """
    types = EnumTypes()

    def module(match: re.Match) -> str:
        path, text = match[1].removeprefix("\\"), match[0]
        ports = set(_PORT.findall(text))

        def declared(found: re.Match) -> str:
            values = {int(value, 2): name for value, name in _VALUE.findall(found["attributes"])}
            bits = int(found["high"] or 0) + 1
            if found["name"] in ports or not _legal(values, bits):
                return found[0]
            base = re.search(r'enum_base_type = "(\w+)"', found["attributes"])
            kind = types.of(base[1] if base else "values", bits, values)
            return f"{found['others']}  {'wire ' if found['kind'] == 'wire' else ''}{kind} {found['name']}{found['rest']}"

        text = _DECLARED.sub(declared, text)
        for name in (name for name in states if name.rpartition(".")[0] == path):
            register = name.rpartition(".")[2]
            found = re.search(rf"^  reg (?:\[(\d+):0\] )?{re.escape(register)}( = [^;]*)?;\n", text, re.M)
            if found is not None and register not in ports and _legal(states[name], bits := int(found[1] or 0) + 1):
                kind = types.of(register, bits, states[name])
                text = text[: found.start()] + f"  {kind} {register}{found[2] or ''};\n" + text[found.end() :]
        return text

    states = {path: {int(value): name for value, name in names.items()} for path, names in states.items()}
    body = _MODULE.sub(module, verilog)
    return types.packages() + body
