"""A capture as a scenario: frames with their fate, both ends' numbers, steps, what only the description says.

NAME.pcap is a classic little-endian microsecond pcap of Ethernet frames without FCS; NAME.json the record.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rnic.wire.frame import Frame, FrameError, parse_frame
from rnic.wire.opcode import OPCODES, Kind, Opcode
from rnic.wire.psn import PSN_MASK, psn_packets

from .steps import AtomicResult, CaptureError, GuestSetup, MemorySet, Post, Step, parse_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BUFFER_BYTES = 65536
"""Size of the one zeroed region at each end."""


@dataclass(frozen=True)
class CapturedFrame:
    """One frame as its sender made it. `number` counts from 1; `sender` is None for neither end's MAC.

    `copies` arrived at the other end (0: lost), `late`: behind the next frame, `ce`: with ECN set to CE on the way.
    """

    number: int
    time_us: int
    sender: str | None
    data: bytes
    copies: int = 1
    late: bool = False
    ce: bool = False

    def delivered(self) -> list[bytes]:
        """What reached the other end."""
        return [mark_ce(self.data) if self.ce else self.data] * self.copies


@dataclass(frozen=True)
class End:
    """Addresses, numbers and memory of one end; header fields as it sent them (None when it sent nothing)."""

    ip: bytes
    mac: bytes
    qpn: int
    psn: int
    addr: int
    rkey: int
    lkey: int
    traffic_class: int = 0
    hop_limit: int = 64
    udp_sport: int | None = None


@dataclass(frozen=True)
class FinalState:
    """Queue pair attributes after the exchange (state numbers as in verbs)."""

    state: int
    sq_psn: int
    rq_psn: int


@dataclass(frozen=True)
class Setup:
    """What only the capture's description says: rights an end lacks, state of b, receives posted before the first step.

    Rights are names of `rnic_tb.endpoint.Access` members taken away.
    """

    b_mr_lacks: tuple[str, ...] = ()
    b_qp_lacks: tuple[str, ...] = ()
    b_state: str = "RTS"
    b_recv: tuple[int, int] | None = None  # (wr_id, length)
    b_recv_bad_lkey: bool = False
    b_srq: bool = False
    a_recv: tuple[int, int] | None = None
    a_max_dest_rd_atomic: int | None = None


SETUPS: dict[str, Setup] = {
    "rc_err_perm_read": Setup(b_mr_lacks=("REMOTE_READ",)),
    "rc_err_perm_write": Setup(b_mr_lacks=("REMOTE_WRITE",)),
    "rc_err_perm_atomic": Setup(b_mr_lacks=("REMOTE_ATOMIC",)),
    "rc_err_qpperm_read": Setup(b_qp_lacks=("REMOTE_READ",)),
    "rc_err_recv_lkey": Setup(b_recv=(9, 4096), b_recv_bad_lkey=True),
    "rc_err_peer_in_reset": Setup(b_state="RESET"),
    "rc_err_peer_in_error": Setup(b_state="ERR"),
    "rc_srq": Setup(b_recv=(5, 4096), b_srq=True),
    "crafted_first_send_middle": Setup(a_recv=(0, 4096)),
    "crafted_atomic_dup_evicted": Setup(a_max_dest_rd_atomic=2),
}


@dataclass(frozen=True)
class Scenario:
    """One capture. `transport` is rc, uc, ud or None (tool output); `crafted`: b is hand-made frames, a the real end.

    Timer fields are codes; `a.psn` and `b.psn` are the first PSNs each end sends.
    """

    name: str
    what: str
    transport: str | None
    crafted: bool
    mtu: int
    a: End | None
    b: End | None
    timeout: int
    retry_cnt: int
    rnr_retry: int
    min_rnr_timer: int
    rd_atomic: int
    steps: tuple[Step, ...]
    frames: tuple[CapturedFrame, ...]
    final: dict[str, FinalState]
    setup: Setup

    def end(self, side: str) -> End:
        """End "a" or "b". Raises CaptureError for a capture without ends."""
        end = self.a if side == "a" else self.b
        if end is None:
            raise CaptureError(f"{self.name} has no queue pairs")
        return end

    def initial_memory(self, side: str) -> list[tuple[int, bytes]]:
        """(offset, data) an end's memory must hold before the first step, where the record does not say it.

        Found from results: data the READ responses carried, and the value the first atomic on a place returned.
        """
        if side != "b" or self.b is None:
            return []
        told = [(s.offset, len(s.data)) for s in self.steps if isinstance(s, MemorySet) and s.side == "b"]
        out: list[tuple[int, bytes]] = []
        for post in (s for s in self.steps if isinstance(s, Post) and s.side == "a"):
            place, size = post.remote_addr - self.b.addr, sum(length for _, length in post.sges)
            fresh = not any(place < at + n and at < place + size for at, n in told)
            data = self._read_result(post) if post.op == "read" else self._atomic_result(post)
            if data and fresh:
                out.append((place, data))
            if post.op not in ("send", "send_imm", "send_inv"):
                told.append((place, size))
        return out

    def _read_result(self, post: Post) -> bytes | None:
        """What the responses of the READ for this place carried; None when it was not answered in full."""
        size = sum(length for _, length in post.sges)
        frames = [parse_frame(f.data) for f in self.frames if f.sender is not None]
        request = next(
            (f for f in frames if f.opcode is Opcode.RC_READ_REQUEST and (f.va, f.dma_length) == (post.remote_addr, size)),
            None,
        )
        if request is None:
            return None
        parts = {
            (f.psn - request.psn) & PSN_MASK: f.payload
            for f in frames
            if OPCODES[f.opcode].kind is Kind.READ_RESP
        }
        data = b"".join(parts.get(k, b"") for k in range(psn_packets(size, self.mtu)))
        return data if len(data) == size else None

    def _atomic_result(self, post: Post) -> bytes | None:
        if post.op not in ("fadd", "cas"):
            return None
        for step in self.steps[self.steps.index(post) :]:
            if isinstance(step, AtomicResult):
                return step.returned
        return None


def load_all(folder: Path) -> list[Scenario]:
    """Every capture of a folder, by name."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def load(path: Path) -> Scenario:
    """The scenario of NAME.json with NAME.pcap beside it. Raises CaptureError."""
    record = json.loads(path.read_text())
    frames = _frames(path.with_suffix(".pcap"), record)
    steps = tuple(parse_step(text) for text in record["steps"])
    setup = next((s for s in steps if isinstance(s, GuestSetup)), None)
    final = {side: _final(record[f"final_{side}"]) for side in "ab" if f"final_{side}" in record}
    common = {
        "name": record["name"],
        "what": record["what"],
        "steps": steps,
        "frames": frames,
        "final": final,
        "setup": SETUPS.get(record["name"], Setup()),
    }
    if setup is not None:
        return _crafted(common, setup, record["final_a"])
    if "type" not in record:
        return Scenario(transport=None, crafted=False, mtu=0, a=None, b=None, timeout=0, retry_cnt=0, rnr_retry=0,
                        min_rnr_timer=0, rd_atomic=0, **common)  # fmt: skip
    return Scenario(
        transport=record["type"],
        crafted=False,
        mtu=record["mtu"],
        a=_end(record["a"], "a", frames),
        b=_end(record["b"], "b", frames),
        timeout=record["timeout"],
        retry_cnt=record["retry"],
        rnr_retry=record["rnr_retry"],
        min_rnr_timer=record["rnr_timer"],
        rd_atomic=record["rd_atomic"],
        **common,
    )


def _crafted(common: dict, guest: GuestSetup, final: str) -> Scenario:
    words = _words(final)
    a = {"ip": "192.0.2.1", "mac": "02:00:00:00:00:01", "qpn": guest.qpn, "psn": guest.sq_psn, "addr": guest.addr,
         "rkey": guest.rkey, "lkey": guest.rkey}  # fmt: skip
    b = {"ip": "192.0.2.2", "mac": "02:00:00:00:00:02", "qpn": guest.peer_qpn, "psn": guest.rq_psn, "addr": 0,
         "rkey": 0, "lkey": 0}  # fmt: skip
    return Scenario(
        transport=guest.transport,
        crafted=True,
        mtu=guest.mtu,
        a=_end(a, "a", common["frames"]),
        b=_end(b, "b", common["frames"]),
        timeout=words["timeout"],
        retry_cnt=words["retry"],
        rnr_retry=words["rnr_retry"],
        min_rnr_timer=words["rnr_timer"],
        rd_atomic=4,
        **common,
    )


def _words(text: str) -> dict[str, int]:
    return {name: int(value, 0) for name, value in (word.split("=") for word in text.split())}


def _final(text: str) -> FinalState:
    words = _words(text)
    return FinalState(words["state"], words["sq_psn"], words["rq_psn"])


def _end(record: dict, side: str, frames: Sequence[CapturedFrame]) -> End:
    numbers = {
        name: value if isinstance(value := record[name], int) else int(value, 0)
        for name in ("qpn", "psn", "addr", "rkey", "lkey")
    }
    first = next((f for f in frames if f.sender == side), None)
    header = {}
    if first is not None:
        frame = _parse_quietly(first.data)
        if frame is not None:
            header = {
                "traffic_class": frame.traffic_class,
                "hop_limit": frame.hop_limit,
                "udp_sport": frame.sport,
            }
            ip = frame.src_ip
            return End(ip=ip, mac=bytes.fromhex(record["mac"].replace(":", "")), **numbers, **header)
    return End(
        ip=ipaddress.ip_address(record["ip"]).packed,
        mac=bytes.fromhex(record["mac"].replace(":", "")),
        **numbers,
    )


def _parse_quietly(raw: bytes) -> Frame | None:
    try:
        return parse_frame(raw)
    except FrameError:
        return None


def _frames(path: Path, record: dict) -> tuple[CapturedFrame, ...]:
    changes: dict[int, dict] = {number: {"copies": 0} for number in record["dropped_frames"]}
    for change in record["altered"]:
        effect = {
            "delivered twice": {"copies": 2},
            "delivered after its successor": {"late": True},
            "delivered with IP ECN=CE": {"ce": True},
        }.get(change["how"])
        if effect is None:
            raise CaptureError(f"{record['name']}: frame {change['how']!r}")
        changes[change["frame"]] = effect
    out = tuple(
        CapturedFrame(number, time_us, _sender(data), data, **changes.get(number, {}))
        for number, (time_us, data) in enumerate(read_pcap(path), 1)
    )
    if len(out) != record["frames"]:
        raise CaptureError(f"{record['name']}: {len(out)} frames, the record says {record['frames']}")
    return out


def _sender(data: bytes) -> str | None:
    return {b"\x02\0\0\0\0\x01": "a", b"\x02\0\0\0\0\x02": "b"}.get(data[6:12])


def read_pcap(path: Path) -> Iterator[tuple[int, bytes]]:
    """(microseconds, bytes) of every frame of a classic little-endian microsecond pcap. Raises CaptureError."""
    raw = path.read_bytes()
    if len(raw) < 24 or struct.unpack_from("<I", raw)[0] != 0xA1B2C3D4:
        raise CaptureError(f"{path.name} is no classic pcap")
    at = 24
    while at < len(raw):
        seconds, micros, size, original = struct.unpack_from("<IIII", raw, at)
        if size != original or at + 16 + size > len(raw):
            raise CaptureError(f"{path.name}: cut frame")
        yield seconds * 1_000_000 + micros, raw[at + 16 : at + 16 + size]
        at += 16 + size


def mark_ce(raw: bytes) -> bytes:
    """An IPv4 frame with ECN = CE, as a switch makes it: checksum repaired, ICRC untouched (R-CC-1)."""
    frame = parse_frame(raw)
    marked = dataclasses.replace(frame, traffic_class=frame.traffic_class | 3, raw_icrc=raw[-4:])
    return marked.pack()
