"""The life of a message, step by step: software's own notes and the RNICs' probe records, in one list by cycle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rnic import abi
from rnic.records import Probe, ProbeEvent, RxDrop
from rnic.wire.opcode import Opcode

from .lab import Lab

__all__ = ["Entry", "Journal"]

_LAYOUT = Probe()

_WHO = {  # block of the RNIC that reports an event
    ProbeEvent.SQ_DOORBELL: "scheduler", ProbeEvent.RQ_DOORBELL: "receive queue", ProbeEvent.CQ_DOORBELL: "CQE writer",
    ProbeEvent.SCHEDULED: "scheduler", ProbeEvent.WQE_FETCH: "WQE fetch", ProbeEvent.WQE_PARSED: "segmenter",
    ProbeEvent.PACKET_MADE: "segmenter", ProbeEvent.LOCAL_TRANSLATED: "payload fetch",
    ProbeEvent.PAYLOAD_READ: "payload fetch", ProbeEvent.PAYLOAD_ARRIVED: "payload fetch", ProbeEvent.FRAME_OUT: "builder",
    ProbeEvent.FRAME_IN: "receive filter", ProbeEvent.FRAME_DROPPED: "receive filter",
    ProbeEvent.REQUEST_CHECKED: "responder", ProbeEvent.RECV_WQE_TAKEN: "responder",
    ProbeEvent.RECV_WQE_FETCHED: "receive queue", ProbeEvent.REMOTE_TRANSLATED: "placer",
    ProbeEvent.DATA_PLACED: "placer", ProbeEvent.ACK_SENT: "responder", ProbeEvent.RESPONSE_IN: "completer",
    ProbeEvent.WQE_RETIRED: "completer", ProbeEvent.CQE_WRITTEN: "CQE writer", ProbeEvent.QP_ERROR: "command engine",
    ProbeEvent.COMMAND: "command engine", ProbeEvent.LOCAL_FAILED: "payload fetch",
}  # fmt: skip

_OPCODE_NAMES = {
    ProbeEvent.WQE_PARSED: abi.WqeOpcode, ProbeEvent.PACKET_MADE: Opcode, ProbeEvent.FRAME_OUT: Opcode,
    ProbeEvent.FRAME_IN: Opcode, ProbeEvent.FRAME_DROPPED: RxDrop, ProbeEvent.REQUEST_CHECKED: Opcode,
    ProbeEvent.CQE_WRITTEN: abi.WcOpcode, ProbeEvent.WQE_RETIRED: abi.WcStatus, ProbeEvent.COMMAND: abi.Command,
    ProbeEvent.LOCAL_FAILED: abi.WcStatus,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One thing that happened. ``event`` is a `ProbeEvent` name in lower case, or the name of a software note."""

    cycle: int
    nic: int
    who: str
    event: str
    qpn: int = 0
    index: int = 0
    psn: int = 0
    opcode: str = ""
    length: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Collects entries of all machines of a lab from its creation on. `entries` are sorted by cycle."""

    def __init__(self, lab: Lab):
        self.lab = lab
        self._entries: list[Entry] = []
        lab.world.probe_events()  # what happened before is not ours
        for nic, context in enumerate(lab.contexts):
            context.on_event = self._software(nic)

    def _software(self, nic: int):
        def note(name: str, cycle: int, details: dict[str, Any]) -> None:
            self._entries.append(
                Entry(cycle, nic, "software", name, qpn=details.get("qpn", 0), index=details.get("index", 0),
                      opcode=str(details.get("opcode", "")), length=details.get("length", 0), details=details)
            )  # fmt: skip

        return note

    def _collect(self) -> None:
        for record in self.lab.world.probe_events():
            fields = _LAYOUT.from_bits(record.bits)
            event = ProbeEvent(fields.event)
            opcode = int(fields.opcode)
            names = _OPCODE_NAMES.get(event)
            try:
                name = names(opcode).name if names is not None else f"{opcode:#04x}"
            except ValueError:
                name = f"{opcode:#04x}"
            self._entries.append(
                Entry(record.cycle, record.nic, _WHO.get(event, "?"), event.name.lower(), int(fields.qpn), int(fields.index),
                      int(fields.psn), name, int(fields.length))
            )  # fmt: skip

    @property
    def entries(self) -> list[Entry]:
        """Everything so far, by cycle; software before hardware in one cycle."""
        self._collect()
        self._entries.sort(key=lambda e: (e.cycle, e.nic, e.who != "software"))
        return self._entries

    def since(self, cycle: int) -> list[Entry]:
        """Entries from ``cycle`` on."""
        return [e for e in self.entries if e.cycle >= cycle]
