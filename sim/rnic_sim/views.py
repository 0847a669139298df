"""The saved views of a run: for each operation the street from doorbell to CQE, numbers by name."""

from __future__ import annotations

from pathlib import Path

from rnic.records import ProbeEvent

from .lab import Lab
from .names import SLOT_NAMES
from .shell import SHELL
from .waves import Trace, signal_path, write_gtkw, write_surfer

__all__ = ["OPERATIONS", "life_of", "write_view"]

# Blocks in the order of an operation's life: machine (0 posts, 1 its peer) and slot of the probe port. Slots that a model
# does not have are left out.
_OUT = [(0, slot) for slot in ("scheduler_doorbell", "scheduler", "wqe_fetch", "segmenter_wqe", "segmenter")]
_PAYLOAD = ["gather_translated", "gather_read", "gather_arrived"]
_DONE = [(0, slot) for slot in ("filter", "completer", "completer_retired", "cqe_writer")]
_CHECK = [(1, "filter"), (1, "responder_checked")]
_PLACE = [(1, "responder_translated"), (1, "responder_placed"), (1, "responder_ack")]
_ANSWER = [(1, slot) for slot in ("responder_resources", "responder_source", "responder_read", "responder_atomic", "builder")]
OPERATIONS: dict[str, list[tuple[int, str]]] = {
    "WRITE": [*_OUT, *((0, s) for s in _PAYLOAD), (0, "builder"), *_CHECK, *_PLACE, (1, "builder"), *_DONE],
    "SEND": [(1, "responder_doorbell"), *_OUT, *((0, s) for s in _PAYLOAD), (0, "builder"), *_CHECK, (1, "responder_taken"),
             (1, "responder_fetched"), *_PLACE, (1, "cqe_writer"), (1, "builder"), *_DONE],
    "READ, ATOMIC": [*_OUT, (0, "builder"), *_CHECK, *_ANSWER, *_DONE],
}  # fmt: skip


def life_of(operation: str, slots: list[str], poster: int = 0) -> list[tuple[int, str]]:
    """(machine, slot) of an operation in the order of its life, for a model with these probe slots."""
    return [(poster if side == 0 else 1 - poster, slot) for side, slot in OPERATIONS[operation] if slot in slots]


def _record(nic: int, slot: str, taps: dict, group: str) -> list[Trace]:
    """Event, QPN, PSN and what the opcode means, of one slot."""
    where = f"{chr(ord('a') + nic)}.{SHELL}.probes.{slot}"
    title = f"{chr(ord('A') + nic)} {slot.replace('_', ' ')}"
    bits = {name: width for name, (_, width) in taps["fields"].items()}
    traces = [Trace(f"{where}.probe_event", bits["event"], ProbeEvent, group, title)]
    for field, names in SLOT_NAMES.get(slot, {}).items():
        traces.append(Trace(f"{where}.{field}", bits["opcode"], names, group, f"  {field}"))
    traces += [Trace(f"{where}.{field}", bits[field], None, group, f"  {field}") for field in ("qpn", "index", "psn")]
    return [*traces, Trace(f"{where}.length", bits["length"], None, group, "  length", "dec")]


def write_view(lab: Lab, wave_file: Path) -> Path:
    """Write ``<wave file>.gtkw``: a group for each operation, then the state machines of each RNIC; and for Surfer a command
    file ``<wave file>.<operation>.sucl`` for each."""
    manifest = lab.world.manifest
    slots, taps = manifest["probe_names"], manifest.get("probe_taps")
    traces = [Trace(signal_path(0, "clk"))]
    if taps is not None:
        for operation in OPERATIONS:
            life: list[Trace] = []
            for nic, slot in life_of(operation, slots):
                life += _record(nic, slot, taps, f"{operation} by host A")
            name = "_".join(operation.lower().replace(",", "").split())
            write_surfer(wave_file.with_suffix(f".{name}.sucl"), [traces[0], *life])
            traces += life
    for nic, _ in enumerate(lab.machines):
        for path, names in manifest.get("states", {}).items():
            states = {int(value): name for value, name in names.items()}
            if len(states) > 1:
                inside = path.partition(".")[2]
                bits = max(1, (len(states) - 1).bit_length())
                traces.append(Trace(signal_path(nic, inside), bits, states, f"state machines of host {'AB'[nic]}", inside))
    return write_gtkw(wave_file.with_suffix(".gtkw"), wave_file, traces)
