"""The saved GTKWave view of a run: the street from doorbell to CQE, numbers by name."""

from __future__ import annotations

from pathlib import Path

from rnic.records import ProbeEvent
from rnic.wire.opcode import Opcode

from .lab import Lab
from .waves import Trace, signal_path, write_gtkw

__all__ = ["write_view"]


def write_view(lab: Lab, wave_file: Path) -> Path:
    """Write ``<wave file>.gtkw``: per RNIC the probe records of every block, in the order of a message's life."""
    traces = []
    for nic, _ in enumerate(lab.machines):
        group = f"host {'ab'[nic]}"
        traces.append(Trace(signal_path(nic, "clk"), group=group))
        for name in lab.world.manifest["probe_names"]:
            traces.append(Trace(signal_path(nic, f"{name}.probe"), group=group, names=ProbeEvent))
    return write_gtkw(wave_file.with_suffix(".gtkw"), wave_file, traces)


_ = Opcode
