"""Life of every work request as a Chrome trace (open it in ui.perfetto.dev): one row a WR, its steps one after the other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .journal import Entry

__all__ = ["WrTrace", "trace_events", "work_requests", "write_trace"]

# Steps in the order of a message's life: name, machine (0 posts, 1 its peer), event, and whether the last one counts.
_STEPS = (
    ("posted", 0, "post_send", False), ("doorbell", 0, "sq_doorbell", False), ("WQE fetch", 0, "wqe_fetch", False),
    ("WQE parsed", 0, "wqe_parsed", False), ("packets made", 0, "packet_made", False),
    ("payload read", 0, "payload_read", False), ("on the wire", 0, "frame_out", False),
    ("arrived", 1, "frame_in", False), ("checked", 1, "request_checked", False), ("data placed", 1, "data_placed", True),
    ("answered", 1, "answer_out", False), ("answer arrived", 0, "response_in", True), ("retired", 0, "wqe_retired", False),
    ("CQE written", 0, "cqe_written", False), ("polled", 0, "poll", False),
)  # fmt: skip
_HALF = 1 << 23


@dataclass
class WrTrace:
    """One send work request: who posted it, and the cycle of each of its steps."""

    nic: int
    qpn: int
    index: int
    wr_id: int
    opcode: str
    length: int
    steps: dict[str, int] = field(default_factory=dict)
    packets: list[Entry] = field(default_factory=list)


def work_requests(entries: list[Entry], pairs: list[tuple[int, int]]) -> list[WrTrace]:
    """Every WR that was posted, with its steps; ``pairs`` are the QPNs (machine 0, machine 1) that talk to each other.

    Events of the requester carry the WQE's index, events of packets their PSN: a packet belongs to the WR parsed before it
    was made. Events of one QP come in its order, so a counter that wraps is no riddle.
    """
    peer = {(0, a): (1, b) for a, b in pairs} | {(1, b): (0, a) for a, b in pairs}
    found: list[WrTrace] = []
    live: dict[tuple[int, int, int], WrTrace] = {}  # (machine, QPN, index)
    by_id: dict[tuple[int, int, int], WrTrace] = {}  # (machine, QPN, wr_id)
    parsed: dict[tuple[int, int], WrTrace] = {}
    by_psn: dict[tuple[int, int], list[tuple[int, WrTrace]]] = {}  # first PSN of each packet made, in order
    rang: dict[tuple[int, int], list[WrTrace]] = {}  # posted, doorbell to come
    batch: dict[tuple[int, int, int], int] = {}  # WQEs of the scheduler's turn that begins with this one

    def owner(nic: int, qpn: int, psn: int) -> WrTrace | None:
        for first, wr in reversed(by_psn.get((nic, qpn), [])):
            if psn - first & 2 * _HALF - 1 < _HALF:
                return wr
        return None

    def step(wr: WrTrace | None, entry: Entry, event: str, side: int) -> None:
        if wr is None:
            return
        for name, who, wanted, last in _STEPS:
            if wanted == event and who == side and (last or name not in wr.steps):
                wr.steps[name] = entry.cycle
        wr.packets.append(entry)

    for e in entries:
        here = (e.nic, e.qpn)
        if e.event == "post_send":
            wr = WrTrace(e.nic, e.qpn, e.index, e.details.get("wr_id", 0), e.opcode, e.length)
            found.append(wr)
            live[e.nic, e.qpn, e.index] = by_id[e.nic, e.qpn, wr.wr_id] = wr
            rang.setdefault(here, []).append(wr)
            step(wr, e, e.event, 0)
        elif e.event == "sq_doorbell" and e.who == "software":
            for wr in rang.pop(here, []):
                step(wr, e, e.event, 0)
        elif e.event in ("wqe_parsed", "wqe_retired"):
            wr = live.get((e.nic, e.qpn, e.index))
            if e.event == "wqe_parsed" and wr is not None:
                parsed[here] = wr
            step(wr, e, e.event, 0)
        elif e.event == "scheduled":
            batch[e.nic, e.qpn, e.index] = e.length
        elif e.event == "wqe_fetch":
            for n in range(batch.get((e.nic, e.qpn, e.index), 1)):
                step(live.get((e.nic, e.qpn, e.index + n & 0xFFFF)), e, e.event, 0)
        elif e.event == "cqe_written" and not e.opcode.startswith("RECV"):
            step(live.get((e.nic, e.qpn, e.index)), e, e.event, 0)
        elif e.event == "poll":
            if not e.details.get("opcode", "").startswith("RECV"):
                step(by_id.get((e.nic, e.qpn, e.details.get("wr_id", 0))), e, e.event, 0)
        elif e.event == "packet_made":
            wr = parsed.get(here)
            if wr is not None:
                by_psn.setdefault(here, []).append((e.psn, wr))
            step(wr, e, e.event, 0)
        elif e.event in ("payload_read", "payload_arrived", "local_translated", "response_in"):
            step(owner(*here, e.psn), e, e.event, 0)
        elif e.event in ("frame_out", "frame_in", "request_checked", "data_placed", "ack_sent", "remote_translated"):
            answer = any(part in e.opcode for part in ("ACK", "READ_RESP"))
            mine = e.event.startswith("frame") and (e.event == "frame_out") != answer
            requester = here if mine else peer.get(here)
            if requester is None:
                continue
            event = "answer_out" if answer and e.event == "frame_out" else e.event
            step(owner(*requester, e.psn), e, event, 0 if mine else 1)
    return found


def trace_events(entries: list[Entry], pairs: list[tuple[int, int]], clock_hz: int) -> list[dict[str, Any]]:
    """Events of the Chrome trace format, time in microseconds of ``clock_hz``."""
    scale = 1e6 / clock_hz
    events: list[dict[str, Any]] = []
    requests = work_requests(entries, pairs)
    for nic in sorted({wr.nic for wr in requests}):
        events.append({"ph": "M", "pid": nic, "name": "process_name", "args": {"name": f"host {'AB'[nic]}"}})
    for row, wr in enumerate(requests, 1):
        title = f"QP {wr.qpn:#x} WR {wr.wr_id}: {wr.opcode}, {wr.length} B"
        at = {"pid": wr.nic, "tid": row}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": title}, **at})
        steps = [(name, wr.steps[name]) for name, *_ in _STEPS if name in wr.steps]
        steps.sort(key=lambda item: item[1])
        begin, end = steps[0][1], steps[-1][1]
        events.append({"ph": "X", "name": title, "ts": begin * scale, "dur": (end - begin) * scale,
                       "args": {"cycle": begin, "cycles": end - begin, "wqe": wr.index}, **at})  # fmt: skip
        for (name, cycle), (_, until) in zip(steps, steps[1:], strict=False):
            events.append({"ph": "X", "name": name, "ts": cycle * scale, "dur": (until - cycle) * scale,
                           "args": {"cycle": cycle, "cycles": until - cycle}, **at})  # fmt: skip
        for entry in wr.packets:
            name = f"{entry.who}: {entry.event.replace('_', ' ')}"
            details = {"cycle": entry.cycle, "host": "AB"[entry.nic], "psn": f"{entry.psn:#x}", "bytes": entry.length,
                       "opcode": entry.opcode}  # fmt: skip
            events.append({"ph": "i", "s": "t", "name": name, "ts": entry.cycle * scale, "args": details, **at})
    return events


def write_trace(path: Path, entries: list[Entry], pairs: list[tuple[int, int]], clock_hz: int) -> None:
    """Write the trace file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"displayTimeUnit": "ns", "traceEvents": trace_events(entries, pairs, clock_hz)}
    path.write_text(json.dumps(document) + "\n")
