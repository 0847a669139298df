"""Writes captured frames as a classic pcap file with nanosecond time stamps (Wireshark and tcpdump read it)."""

import struct
from collections.abc import Iterable
from pathlib import Path

from .link import Frame
from .native import Port

__all__ = ["write_pcap"]

_MAGIC_NANOSECONDS = 0xA1B23C4D
_LINKTYPE_ETHERNET = 1
_SNAP_LENGTH = 262144


def write_pcap(path: str | Path, frames: Iterable[Frame], clock_hz: int, *, ports: Iterable[Port] = (Port.NET_TX,)) -> int:
    """Writes the frames of ``ports`` in the order of their first beats and returns how many there are.

    The time stamp is the cycle of the first beat times the clock period. With the default ports a frame stands once in
    the file, as it was sent, both directions merged.
    """
    wanted = set(ports)
    chosen = sorted((f for f in frames if f.port in wanted), key=lambda frame: (frame.first, frame.nic, frame.port))
    with Path(path).open("wb") as out:
        out.write(struct.pack("<IHHiIII", _MAGIC_NANOSECONDS, 2, 4, 0, 0, _SNAP_LENGTH, _LINKTYPE_ETHERNET))
        for frame in chosen:
            seconds, nanoseconds = divmod(frame.first * 1_000_000_000 // clock_hz, 1_000_000_000)
            out.write(struct.pack("<IIII", seconds, nanoseconds, len(frame.data), len(frame.data)) + frame.data)
    return len(chosen)
