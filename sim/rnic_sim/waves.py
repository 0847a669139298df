"""Waves: switches the FST file of a world, and writes the views of GTKWave and Surfer."""

import enum
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vcd.gtkw import GTKWSave

from .shell import SHELL
from .world import World

__all__ = ["Trace", "recording", "signal_path", "write_filter", "write_gtkw", "write_surfer"]


@contextmanager
def recording(world: World, path: str | Path) -> Iterator[Path]:
    """Waves of all NICs from here to the end of the block go to the FST file ``path``."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    world.waves_on(target)
    try:
        yield target
    finally:
        world.waves_off()


def signal_path(nic: int, inside: str) -> str:
    """Where signal ``inside`` (dotted, from the NIC's top on) of NIC number ``nic`` stands in the wave file."""
    return f"{chr(ord('a') + nic)}.{SHELL}.nic.{inside}"


@dataclass(frozen=True)
class Trace:
    """A signal to show: its dotted ``path`` as in the wave file, its width, and the names of its values.

    ``names`` is an enum class or a mapping value -> name (for an FSM: its ``decoding``). ``group`` is the GTKWave group,
    ``alias`` the name shown, ``format`` hex, dec or bin.
    """

    path: str
    bits: int = 1
    names: type[enum.Enum] | Mapping[int, str] | None = None
    group: str = ""
    alias: str | None = None
    format: str = "hex"


def write_filter(path: str | Path, names: type[enum.Enum] | Mapping[int, str], bits: int) -> Path:
    """A GTKWave translate filter: one line a value, hexadecimal as GTKWave shows ``bits`` bits, then its name."""
    pairs = names.items() if isinstance(names, Mapping) else [(member.value, member.name) for member in names]
    digits = (bits + 3) // 4
    target = Path(path)
    target.write_text("".join(f"{value:0{digits}x} {name}\n" for value, name in sorted(pairs)))
    return target


def _path_in_file(trace: Trace) -> str:
    return trace.path if trace.bits == 1 else f"{trace.path}[{trace.bits - 1}:0]"


def write_gtkw(path: str | Path, wave_file: str | Path, traces: Iterable[Trace]) -> Path:
    """Writes the GTKWave save file ``path`` and, beside it, the filter files of the traces with names.

    All paths in it are relative: open it from its directory, wherever that was moved (``rnic waves`` does). Traces stand in
    the order given, those of one group together.
    """
    target = Path(path)
    chosen = list(traces)
    with target.open("w") as out:
        save = GTKWSave(out)
        save.dumpfile(os.path.relpath(Path(wave_file).resolve(), target.parent.resolve()), abspath=False)
        for group in dict.fromkeys(trace.group for trace in chosen):
            members = [trace for trace in chosen if trace.group == group]
            if group:
                save.begin_group(group)
            for trace in members:
                filter_file = None
                if trace.names is not None:
                    stem = trace.path if isinstance(trace.names, Mapping) else f"{trace.names.__name__}.{trace.bits}"
                    stem = re.sub(r"\W+", "_", stem)
                    filter_file = write_filter(target.with_name(f"{target.stem}.{stem}.flt"), trace.names, trace.bits).name
                save.trace(_path_in_file(trace), alias=trace.alias, datafmt=trace.format, translate_filter_file=filter_file)
            if group:
                save.end_group(group)
    return target


def write_surfer(path: str | Path, traces: Iterable[Trace]) -> Path:
    """Writes a Surfer command file (``surfer --command-file PATH WAVES``): the traces in the order given, a divider a group.

    Surfer takes the names of values from the FST itself, where the signal has an enum type there.
    """
    target, lines, group = Path(path), [], ""
    for trace in traces:
        if trace.group != group:
            group = trace.group
            lines.append(f"divider_add {re.sub(r'[^A-Za-z0-9]+', '_', group)}")
        lines.append(f"variable_add {trace.path}")
    target.write_text("\n".join([*lines, "zoom_fit", ""]))
    return target
