"""The numbered steps of an operation, found in a journal and printed with their cycles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .journal import Entry

__all__ = ["ATOMIC_STEPS", "READ_STEPS", "SEND_STEPS", "WRITE_STEPS", "Step", "StepDef", "find_steps", "print_steps"]


@dataclass(frozen=True)
class StepDef:
    """A step: who does it (0: the machine that posts the operation, 1: its peer), in words, and the events that are it."""

    side: int | None
    text: str
    events: tuple[tuple[int, str, str], ...]  # (side, event, part of the opcode name or '')
    also: tuple[tuple[int, str, str], ...] = ()  # shown when they happened


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


_POST = StepDef(0, "posts the work request: writes it as a WQE into the send queue in memory, then rings the doorbell",
                ((0, "post_send", ""), (0, "sq_doorbell", "")))  # fmt: skip
_FETCH = StepDef(0, "requester fetches the WQE from host memory and parses it",
                 ((0, "scheduled", ""), (0, "wqe_fetch", ""), (0, "wqe_parsed", "")))  # fmt: skip
_BUILD = StepDef(0, "translates the local virtual address, reads the payload from host memory, builds the packet",
                 ((0, "packet_made", ""), (0, "local_translated", ""), (0, "payload_read", ""),
                  (0, "payload_arrived", "")))  # fmt: skip
_ACK = StepDef(1, "responder returns the ACK", ((1, "ack_sent", ""), (1, "frame_out", "ACK")))
_POLL = StepDef(0, "polls the completion queue and finds the CQE: done", ((0, "poll", ""),))

WRITE_STEPS = [
    _POST, _FETCH, _BUILD,
    StepDef(None, "the packet travels", ((0, "frame_out", "WRITE"), (1, "frame_in", "WRITE"))),
    StepDef(1, "responder checks PSN and key, translates the remote virtual address, places the data in host memory",
            ((1, "request_checked", ""), (1, "remote_translated", ""), (1, "data_placed", ""))),
    _ACK,
    StepDef(0, "requester takes the ACK, retires the WQE, writes the CQE into the completion queue",
            ((0, "frame_in", "ACK"), (0, "response_in", ""), (0, "wqe_retired", ""), (0, "cqe_written", ""))),
    _POLL,
]  # fmt: skip

SEND_STEPS = [
    StepDef(1, "posts a receive WQE: where the next message may go", ((1, "post_recv", ""), (1, "rq_doorbell", ""))),
    _POST, _FETCH, _BUILD,
    StepDef(None, "the packet travels", ((0, "frame_out", "SEND"), (1, "frame_in", "SEND"))),
    StepDef(1, "responder checks the PSN, takes the receive WQE and places the data where that says",
            ((1, "request_checked", ""), (1, "recv_wqe_taken", ""), (1, "recv_wqe_fetched", ""),
             (1, "remote_translated", ""), (1, "data_placed", ""))),
    _ACK,
    StepDef(1, "writes the receiver's CQE", ((1, "cqe_written", "RECV"),)),
    StepDef(0, "requester takes the ACK, retires the WQE, writes the sender's CQE",
            ((0, "frame_in", "ACK"), (0, "response_in", ""), (0, "wqe_retired", ""), (0, "cqe_written", "SEND"))),
    StepDef(0, "polls its completion", ((0, "poll", ""),)),
    StepDef(1, "polls its completion: the message is in the buffer", ((1, "poll", ""),)),
]  # fmt: skip

READ_STEPS = [
    _POST, _FETCH,
    StepDef(None, "the READ request travels", ((0, "packet_made", "READ"), (0, "frame_out", "READ"), (1, "frame_in", "READ"))),
    StepDef(1, "responder checks PSN and key, translates the remote virtual address, reads its host memory",
            ((1, "request_checked", ""),), ((1, "remote_translated", ""),)),
    StepDef(None, "the responses travel with the data", ((1, "frame_out", "READ_RESP"), (0, "frame_in", "READ_RESP"))),
    StepDef(0, "requester places the data at the local virtual address",
            ((0, "response_in", ""),), ((0, "remote_translated", ""), (0, "data_placed", ""))),
    StepDef(0, "requester retires the WQE, writes the CQE into the completion queue",
            ((0, "wqe_retired", ""), (0, "cqe_written", "READ"))),
    _POLL,
]  # fmt: skip

ATOMIC_STEPS = [
    _POST, _FETCH,
    StepDef(None, "the request travels with the operands",
            ((0, "packet_made", ""), (0, "frame_out", "FETCH_ADD"), (1, "frame_in", "FETCH_ADD"))),
    StepDef(1, "responder checks PSN, key and alignment, reads the word, changes it, writes it back",
            ((1, "request_checked", ""),), ((1, "remote_translated", ""),)),
    StepDef(None, "the answer travels with the old value", ((1, "frame_out", "ATOMIC_ACK"), (0, "frame_in", "ATOMIC_ACK"))),
    StepDef(0, "requester places the old value at the local virtual address",
            ((0, "response_in", ""),), ((0, "remote_translated", ""), (0, "data_placed", ""))),
    StepDef(0, "requester retires the WQE, writes the CQE into the completion queue",
            ((0, "wqe_retired", ""), (0, "cqe_written", "FETCH_ADD"))),
    _POLL,
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
        for side, event, opcode in (*definition.events, *definition.also):
            nic = poster if side == 0 else 1 - poster
            hits = [e for e in pool if e.nic == nic and e.event == event and opcode in e.opcode]
            if not hits and (side, event, opcode) in definition.events:
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
    note = f"cycle 0 here is cycle {start} of the simulation"
    table = Table(title=title, title_justify="left", title_style="bold", caption=note, caption_justify="left", box=SIMPLE_HEAD)
    for name, style in (("step", "bold"), ("cycle", ""), ("who", "cyan"), ("what happens", "")):
        justify = "right" if name in ("step", "cycle") else "left"
        table.add_column(name, style=style, justify=justify, no_wrap=name != "what happens")
    for step in steps:
        side = step.definition.side
        where = "link"
        if side is not None:
            where = f"{'AB'[poster if side == 0 else 1 - poster]} {'software' if step.entries[0].who == 'software' else 'RNIC'}"
        first, last = step.first - start, step.last - start
        cycles = f"{first}" if first == last else f"{first}..{last}"
        text = step.definition.text
        if verbose:
            for e in step.entries:
                text += f"\n  +{e.cycle - start} {escape(f'[{e.who}]')} {_detail(e)}"
        table.add_row(str(step.number), cycles, where, text)
    console.print(table)
