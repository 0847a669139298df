"""The files a run leaves: waves with their view, pcap, trace, JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .journal import Journal
from .lab import Lab
from .link import Frame
from .pcap import write_pcap
from .trace import write_trace
from .views import write_view

__all__ = ["Files", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Write a file, its directory too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@dataclass(frozen=True)
class Files:
    """Which files are wanted, and where."""

    waves: Path | None = None
    pcap: Path | None = None
    trace: Path | None = None
    json: Path | None = None

    def write(self, lab: Lab, frames: list[Frame], journal: Journal | None, pairs: list[tuple[int, int]]) -> None:
        """The view beside the waves (recorded by then), pcap and trace. ``pairs``: QPNs that talk to each other."""
        if self.waves is not None:
            write_view(lab, self.waves)
        if self.pcap is not None:
            self.pcap.parent.mkdir(parents=True, exist_ok=True)
            write_pcap(self.pcap, frames, lab.config.clock_hz)
        if self.trace is not None and journal is not None:
            write_trace(self.trace, journal.entries, pairs, lab.config.clock_hz)

    def listing(self) -> dict[str, str]:
        """What is there, by kind."""
        found = {kind: str(path) for kind, path in vars(self).items() if path is not None}
        if self.waves is not None:
            found["view"] = str(self.waves.with_suffix(".gtkw"))
        return found
