"""The demo of `make sim`: host B tells host A address and key of a region by SEND, A does an RDMA WRITE there.

Memory is compared by software, outside the RTL's path, guard bytes included.
"""

from __future__ import annotations

import json
import struct
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich.console import Console

from .enums import AccessFlags, SendFlags, WCOpcode, WCStatus, WROpcode
from .files import Files, write_text
from .journal import Journal
from .lab import Lab
from .qp import QP
from .steps import ATOMIC_STEPS, READ_STEPS, SEND_STEPS, WRITE_STEPS, StepDef, find_steps, print_steps
from .verbs import MR, SGE, RecvWR, SendWR
from .waves import recording

__all__ = ["DemoError", "DemoResult", "GUARD", "run_demo"]

GUARD = 64  # bytes before and after a buffer that nobody may touch
_GUARD_BYTE = 0xA5
_WRITE_READ = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ
_INVITATION = struct.Struct("<QII")  # address, rkey, length: what B tells A


class DemoError(AssertionError):
    """Data, guards or completions were wrong."""


@dataclass
class DemoResult:
    """What the demo saw; ``to_json`` is what `--json` writes."""

    config: str
    op: str
    bytes: int
    mtu: int
    seed: int
    cycles: int = 0
    frames: int = 0
    operations: list[dict] = field(default_factory=list)
    completions: dict[str, int] = field(default_factory=dict)
    counters: list[dict[str, int]] = field(default_factory=list)
    data_ok: bool = False
    files: dict[str, str] = field(default_factory=dict)
    sim: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=2, sort_keys=True) + "\n"


class _Buffer:
    """A region with guard bytes on both sides, filled with a pattern."""

    def __init__(self, pd, length: int, access: AccessFlags, offset: int):
        self.length = length
        self.mr = MR(pd, length + 2 * GUARD, access, offset=offset)
        self.mr.write(bytes([_GUARD_BYTE]) * (length + 2 * GUARD))
        self.addr = self.mr.buf + GUARD

    def fill(self, data: bytes) -> None:
        self.mr.write(data, GUARD)

    def sge(self, length: int | None = None) -> SGE:
        return SGE(self.addr, self.length if length is None else length, self.mr.lkey)

    def check(self, expected: bytes, what: str) -> None:
        """Compare data and guards; everything behind ``expected`` must still be guard."""
        whole = self.mr.read(self.length + 2 * GUARD)
        guard = bytes([_GUARD_BYTE])
        wanted = guard * GUARD + expected + guard * (self.length - len(expected) + GUARD)
        for i, (got, want) in enumerate(zip(whole, wanted, strict=True)):
            if got != want:
                raise DemoError(f"{what}: byte {i - GUARD} is {got:#04x}, must be {want:#04x}")


def _expect(lab: Lab, qp, opcode: WCOpcode, wr_id: int, result: DemoResult) -> None:
    (wc,) = lab.wait_wc(qp.scq)
    result.completions[wc.status.name] = result.completions.get(wc.status.name, 0) + 1
    if (wc.status, wc.opcode, wc.wr_id, wc.qp_num) != (WCStatus.SUCCESS, opcode, wr_id, qp.qp_num):
        raise DemoError(f"completion is {wc}, must be a successful {opcode.name} of wr_id {wr_id}")


def run_demo(config: str = "tiny", *, payload: int = 1000, mtu: int = 1024, ipv6: bool = False, seed: int = 1,
             host_latency: int = 64, link_latency: int = 8, files: Files | None = None, verbose: bool = False,
             console: Console | None = None) -> DemoResult:  # fmt: skip
    """Run it; raises `DemoError` when anything was wrong. Files are written when their path is given."""
    console, files = console or Console(), files or Files()
    result = DemoResult(config, "demo", payload, mtu, seed, files=files.listing())
    started = time.perf_counter()
    lab = Lab(config, seed=seed, host_latency=host_latency, link_latency=link_latency)
    with lab:
        built = time.perf_counter()
        journal = Journal(lab)
        with recording(lab.world, files.waves) if files.waves is not None else nullcontext():
            pair = lab.rc_pair(mtu=mtu, gid=int(ipv6))
            _script(lab, journal, pair, result, console, verbose)
        result.cycles = lab.world.cycle
        result.frames = len(lab.world.frames)
        result.counters = [c.driver.counters() for c in lab.contexts]
        run = time.perf_counter() - built
        result.sim = {
            "build_seconds": round(built - started, 3), "run_seconds": round(run, 3),
            "cycles_per_second": round(result.cycles / run),
        }  # fmt: skip
        result.data_ok = True
        files.write(lab, lab.world.frames, journal, [(pair[0].qp_num, pair[1].qp_num)])
    if files.json is not None:
        write_text(files.json, result.to_json())
    return result


_INTRO = """\
Two hosts, A and B. Each has a processor, memory and an RNIC (an RDMA network card); a link joins the RNICs. Software puts \
work requests as WQEs into a send or receive queue in memory and rings the RNIC's doorbell; the RNIC does the work and writes \
a CQE into a completion queue. A send and a receive queue are a queue pair (QP); one of A is connected with one of B. Packets \
between them carry sequence numbers (PSN) and are acknowledged (ACK). Remote memory is named by a virtual address and a key \
(rkey), both checked by the RNIC that owns the memory.
"""


def _script(lab: Lab, journal: Journal, pair: tuple[QP, QP], result: DemoResult, console: Console, verbose: bool) -> None:
    a, b = pair
    data = bytes((result.seed + 7 * i + (i >> 8)) & 0xFF for i in range(result.bytes))
    console.print(_INTRO, highlight=False)

    source = _Buffer(a.pd, result.bytes, AccessFlags.LOCAL_WRITE, offset=5)
    source.fill(data)
    inbox = _Buffer(a.pd, 64, AccessFlags.LOCAL_WRITE, offset=123)
    target = _Buffer(b.pd, result.bytes, _WRITE_READ, offset=4000)
    letter = _Buffer(b.pd, _INVITATION.size, AccessFlags.LOCAL_WRITE, offset=33)

    def show(op: str, title: str, definitions: list[StepDef], begin: int, length: int, poster: int, outcome: str) -> None:
        steps = find_steps(definitions, journal.since(begin), poster)
        print_steps(console, title, steps, poster, verbose=verbose)
        console.print(f"  => {outcome}\n", highlight=False)
        result.operations.append(_record(op, length, steps))

    # B registers memory and tells A its address and rkey: SEND/RECV
    begin = lab.world.cycle
    a.post_recv(RecvWR(100, [inbox.sge()]))
    invitation = _INVITATION.pack(target.addr, target.mr.rkey, target.length)
    letter.fill(invitation)
    b.post_send(SendWR(200, WROpcode.SEND, [letter.sge()], SendFlags.SIGNALED))
    _expect(lab, a, WCOpcode.RECV, 100, result)
    _expect(lab, b, WCOpcode.SEND, 200, result)
    inbox.check(invitation, "SEND, receiver's buffer")
    letter.check(invitation, "SEND, sender's buffer")
    show("send", "SEND/RECV: B sends a message, A receives it", SEND_STEPS, begin, len(invitation), 1,
         f"A holds B's {len(invitation)} bytes: address, rkey and length of a buffer of B. A's software had to offer a "
         "receive buffer first.")  # fmt: skip

    # A writes into B's memory; B's software is not involved
    address, rkey, length = _INVITATION.unpack(inbox.mr.read(_INVITATION.size, GUARD))
    begin = lab.world.cycle
    wr = SendWR(101, WROpcode.RDMA_WRITE, [source.sge(length)], SendFlags.SIGNALED)
    wr.set_wr_rdma(rkey, address)
    a.post_send(wr)
    _expect(lab, a, WCOpcode.RDMA_WRITE, 101, result)
    target.check(data, "WRITE, target buffer")
    source.check(data, "WRITE, source buffer")
    show("write", f"RDMA WRITE: A writes {length} bytes to {address:#x} of B, rkey {rkey:#x}", WRITE_STEPS, begin, length, 0,
         f"B's buffer holds A's {length} bytes. B's software did nothing and got no completion.")  # fmt: skip
    lab.relax(64)
    if b.scq.poll()[0]:
        raise DemoError("WRITE made a completion at the responder, whose CPU must not know")

    # A reads the same buffer of B
    back = _Buffer(a.pd, result.bytes, AccessFlags.LOCAL_WRITE, offset=77)
    fresh = bytes(b ^ 0x5A for b in data)
    target.fill(fresh)
    begin = lab.world.cycle
    wr = SendWR(102, WROpcode.RDMA_READ, [back.sge(length)], SendFlags.SIGNALED)
    wr.set_wr_rdma(rkey, address)
    a.post_send(wr)
    _expect(lab, a, WCOpcode.RDMA_READ, 102, result)
    back.check(fresh, "READ, local buffer")
    target.check(fresh, "READ, remote buffer")
    show("read", f"RDMA READ: A reads {length} bytes from {address:#x} of B, rkey {rkey:#x}", READ_STEPS, begin, length, 0,
         f"A holds {length} bytes of B's memory. B's software did nothing.")  # fmt: skip

    # A adds to a counter of B
    word, old = _Buffer(b.pd, 8, AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_ATOMIC, offset=128), 0x0123_4567_89AB_CDEF
    was = _Buffer(a.pd, 8, AccessFlags.LOCAL_WRITE, offset=40)
    word.fill(old.to_bytes(8, "little"))
    begin = lab.world.cycle
    wr = SendWR(103, WROpcode.ATOMIC_FETCH_AND_ADD, [was.sge()], SendFlags.SIGNALED)
    wr.set_wr_atomic(word.mr.rkey, word.addr, 1000, 0)
    a.post_send(wr)
    _expect(lab, a, WCOpcode.FETCH_ADD, 103, result)
    word.check((old + 1000).to_bytes(8, "little"), "ATOMIC, remote word")
    was.check(old.to_bytes(8, "little"), "ATOMIC, local buffer")
    show("atomic", f"ATOMIC: A adds 1000 to the word at {word.addr:#x} of B, rkey {word.mr.rkey:#x}", ATOMIC_STEPS, begin, 8, 0,
         "B's word is 1000 larger, A holds its old value; no other access came between.")  # fmt: skip
    lab.relax(64)
    if b.scq.poll()[0]:
        raise DemoError("READ or ATOMIC made a completion at the responder, whose CPU must not know")


def _record(op: str, length: int, steps) -> dict:
    start = steps[0].first
    return {
        "op": op, "bytes": length,
        "steps": [
            {"step": s.number, "what": s.definition.text, "first": s.first - start, "last": s.last - start,
             "events": [{"cycle": e.cycle - start, "host": "ab"[e.nic], "who": e.who, "event": e.event} for e in s.entries]}
            for s in steps
        ],
    }  # fmt: skip
