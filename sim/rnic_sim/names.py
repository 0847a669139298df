"""Names for numbers in waves: what a model's manifest says about enums, FSM states and probe records."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from amaranth.hdl import Fragment, Signal

from rnic import abi
from rnic.records import Probe, ProbeEvent, RxDrop
from rnic.wire.opcode import Opcode

__all__ = ["SLOT_NAMES", "fsm_states", "probe_taps", "values_of"]

# What field `opcode` of the probe records of a block means; in others it is a plain number.
SLOT_NAMES: dict[str, dict[str, type[enum.Enum]]] = {
    "segmenter_wqe": {"opcode": abi.WqeOpcode}, "segmenter": {"opcode": Opcode}, "builder": {"opcode": Opcode},
    "filter": {"opcode": Opcode, "drop": RxDrop}, "parser_drop": {"drop": RxDrop}, "responder_checked": {"opcode": Opcode},
    "completer_retired": {"status": abi.WcStatus}, "cqe_writer": {"opcode": abi.WcOpcode}, "command": {"opcode": abi.Command},
}  # fmt: skip


def values_of(names: type[enum.Enum]) -> dict[int, str]:
    """Value and name of every member."""
    return {int(member.value): member.name for member in names}


def fsm_states(fragment: Fragment, path: str) -> dict[str, dict[int, str]]:
    """States of every FSM at and below an elaborated module at ``path``, by the path of its state register.

    An FSM is a switch over a register that knows how its values are written, ``STATE/0``. The register is all that is left of
    it below a `ResetInserter`, which makes a new fragment of each.
    """
    found = {}
    for statements in fragment.statements.values():
        for statement in statements:
            register = getattr(statement, "test", None)
            if isinstance(register, Signal) and callable(register.decoder) and not isinstance(register.decoder, type):
                found[f"{path}.{register.name}"] = dict(_decoded(register))
    for child, name, *_ in fragment.subfragments:
        if name is not None:
            found |= fsm_states(child, f"{path}.{name}")
    return found


def _decoded(register: Signal) -> Iterator[tuple[int, str]]:
    for value in range(1 << len(register)):
        try:
            yield value, str(register.decoder(value)).rpartition("/")[0]
        except (KeyError, ValueError):
            continue  # no state has this value


def probe_taps(slots: list[str]) -> dict[str, Any]:
    """Layout of a probe record and the names in it, as stored in a manifest.

    ``fields``: first bit and bits; ``events``: names of field ``event``; ``opcodes``: for a slot the names of field
    ``opcode``, by the name it is shown under.
    """
    kinds = {slot: kinds for slot, kinds in SLOT_NAMES.items() if slot in slots}
    return {
        "fields": {name: [field.offset, field.width] for name, field in Probe()},
        "events": values_of(ProbeEvent),
        "opcodes": {
            slot: {field: {"name": kind.__name__, "values": values_of(kind)} for field, kind in names.items()}
            for slot, names in kinds.items()
        },
    }  # fmt: skip
