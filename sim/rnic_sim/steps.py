"""The numbered steps of an operation, found in a journal and printed with their cycles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .journal import Entry

__all__ = ["SEND_STEPS", "WRITE_STEPS", "Step", "StepDef", "find_steps", "print_steps"]


@dataclass(frozen=True)
class StepDef:
    """A step: who does it (0: the machine that posts the operation, 1: its peer), in words, and the events that are it."""

    side: int | None
    text: str
    events: tuple[tuple[int, str, str], ...]  # (side, event, part of the opcode name or '')


@dataclass(frozen=True)
class Step:
    """A step as it happened."""

    number: int
    definition: StepDef
    entries: list[Entry]

    @property
    def first(self) -> int:
        return self.entries[0].cycle

    @property
    def last(self) -> int:
        return self.entries[-1].cycle


WRITE_STEPS = [
    StepDef(0, "software posts the WR: the WQE is in the SQ ring, then the doorbell",
            ((0, "post_send", ""), (0, "sq_doorbell", ""))),
    StepDef(0, "requester fetches the WQE from host memory and parses it",
            ((0, "scheduled", ""), (0, "wqe_fetch", ""), (0, "wqe_parsed", ""))),
    StepDef(0, "requester translates the local virtual address, reads the payload, builds the packet",
            ((0, "packet_made", ""), (0, "local_translated", ""), (0, "payload_read", ""), (0, "payload_arrived", ""))),
    StepDef(None, "the packet goes out on the link", ((0, "frame_out", "WRITE"),)),
    StepDef(1, "responder parses it, checks PSN and key, translates the remote virtual address, places the data",
            ((1, "frame_in", "WRITE"), (1, "request_checked", ""), (1, "remote_translated", ""), (1, "data_placed", ""))),
    StepDef(1, "responder returns the ACK", ((1, "ack_sent", ""), (1, "frame_out", "ACK"))),
    StepDef(0, "requester takes the ACK, retires the WQE, writes the CQE into the CQ",
            ((0, "frame_in", "ACK"), (0, "response_in", ""), (0, "wqe_retired", ""), (0, "cqe_written", ""))),
    StepDef(0, "software polls the completion", ((0, "poll", ""),)),
]  # fmt: skip

SEND_STEPS = [
    StepDef(1, "receiver's software posts a receive WQE", ((1, "post_recv", ""), (1, "rq_doorbell", ""))),
    StepDef(0, "sender's software posts the SEND, then the doorbell", ((0, "post_send", ""), (0, "sq_doorbell", ""))),
    StepDef(0, "requester fetches the WQE and parses it",
            ((0, "scheduled", ""), (0, "wqe_fetch", ""), (0, "wqe_parsed", ""))),
    StepDef(0, "requester translates the local virtual address, reads the payload, builds the packet",
            ((0, "packet_made", ""), (0, "local_translated", ""), (0, "payload_read", ""), (0, "payload_arrived", ""))),
    StepDef(None, "the packet goes out on the link", ((0, "frame_out", "SEND"),)),
    StepDef(1, "responder parses it, takes a receive WQE and places the data where that says",
            ((1, "frame_in", "SEND"), (1, "request_checked", ""), (1, "recv_wqe_taken", ""), (1, "recv_wqe_fetched", ""),
             (1, "remote_translated", ""), (1, "data_placed", ""))),
    StepDef(1, "responder returns the ACK", ((1, "ack_sent", ""), (1, "frame_out", "ACK"))),
    StepDef(1, "receiver's CQE is written", ((1, "cqe_written", "RECV"),)),
    StepDef(0, "requester takes the ACK, retires the WQE, writes the sender's CQE",
            ((0, "frame_in", "ACK"), (0, "response_in", ""), (0, "wqe_retired", ""), (0, "cqe_written", "SEND"))),
    StepDef(None, "both poll their completion", ((0, "poll", ""), (1, "poll", ""))),
]  # fmt: skip


def find_steps(definitions: list[StepDef], entries: Iterable[Entry], poster: int) -> list[Step]:
    """Assign the entries of one operation to its steps; ``poster`` is the machine that posted it.

    ``LookupError`` naming the step and the event when one of them did not happen: a step is never printed without its
    cause seen in the RNIC or in software.
    """
    pool = list(entries)
    steps = []
    for number, definition in enumerate(definitions, 1):
        found: list[Entry] = []
        for side, event, opcode in definition.events:
            nic = poster if side == 0 else 1 - poster
            hits = [e for e in pool if e.nic == nic and e.event == event and opcode in e.opcode]
            if not hits:
                raise LookupError(f"step {number} ({definition.text}): no {event} on machine {'ab'[nic]}")
            found += hits
        steps.append(Step(number, definition, sorted(found, key=lambda e: e.cycle)))
    return steps


def _detail(entry: Entry) -> str:
    words = [entry.event.replace("_", " ")]
    if entry.who == "software":
        shown = {k: v for k, v in entry.details.items() if k in ("wr_id", "length", "producer", "status")}
        words += [f"{k} {v}" for k, v in shown.items()]
    else:
        if entry.opcode and not entry.opcode.startswith("0x"):
            words.append(entry.opcode)
        if entry.event in ("packet_made", "frame_out", "frame_in", "request_checked", "response_in", "ack_sent"):
            words.append(f"PSN {entry.psn:#x}")
        if entry.length and entry.event not in ("cqe_written", "wqe_retired", "scheduled"):
            words.append(f"{entry.length} B")
    return " ".join(words)


def print_steps(console: Console, title: str, steps: list[Step], poster: int, *, verbose: bool = False) -> None:
    """A table: number, cycles from the first step on, who, what; with ``verbose`` every event under its step."""
    start = min(s.first for s in steps)
    table = Table(title=f"{title}  (cycle 0 = cycle {start} of the simulation)", title_justify="left", show_lines=False)
    for name, style in (("step", "bold"), ("cycle", ""), ("where", "cyan"), ("what happens", "")):
        justify = "right" if name in ("step", "cycle") else "left"
        table.add_column(name, style=style, justify=justify, no_wrap=name != "what happens")
    for step in steps:
        side = step.definition.side
        where = "link" if side is None else f"host {'AB'[poster if side == 0 else 1 - poster]}"
        first, last = step.first - start, step.last - start
        cycles = f"{first}" if first == last else f"{first}..{last}"
        text = step.definition.text
        if verbose:
            for e in step.entries:
                text += f"\n  +{e.cycle - start} {escape(f'[{e.who}]')} {_detail(e)}"
        table.add_row(str(step.number), cycles, where, text)
    console.print(table)
