"""Workloads of `rnic sim`: messages on many QPs between two RNICs, every byte compared by software, outside the RTL's path.

Each QP has slots of its own in a region of either machine, with guard bytes around; a message uses a slot until its data was
compared. Latencies and cycle counts are those of the ports (doorbell write to write response of the CQE).
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

from rnic import abi
from rnic.config import named_config

from .enums import MTU, AccessFlags, SendFlags, WCOpcode, WCStatus, WROpcode
from .files import Files, write_text
from .journal import Journal
from .lab import Lab
from .native import EventKind, Port, SimError
from .qp import QP, QPCap, QPInitAttr
from .script import ATOMICS, Action, Pause, Post, Wait
from .verbs import CQ, MR, PD, SGE, WC, RDMAError, RecvWR, SendWR
from .vm import PAGE
from .waves import recording

__all__ = ["KINDS", "Options", "Report", "Workload", "WorkloadError", "plan_for", "run_workload"]

KINDS = ("send", "write", "read", "atomic", "mix")
GUARD = 64  # bytes around every slot that nobody may touch
_FILL = 0xA5
_LOOK = 16  # cycles between two looks at the completion queues
_SETTLE = 64  # cycles from a completion to the look at memory: a WRITE may complete before its last write response
_QUIET = 200_000  # cycles without a completion that end the run
_MOST_MEMORY = 256 << 20
_ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_OPCODES = {
    "send": WROpcode.SEND, "send_imm": WROpcode.SEND_WITH_IMM, "write": WROpcode.RDMA_WRITE,
    "write_imm": WROpcode.RDMA_WRITE_WITH_IMM, "read": WROpcode.RDMA_READ, "fetch_add": WROpcode.ATOMIC_FETCH_AND_ADD,
    "cmp_swap": WROpcode.ATOMIC_CMP_AND_SWP,
}  # fmt: skip
_COMPLETIONS = {
    "send": WCOpcode.SEND, "send_imm": WCOpcode.SEND, "write": WCOpcode.RDMA_WRITE, "write_imm": WCOpcode.RDMA_WRITE,
    "read": WCOpcode.RDMA_READ, "fetch_add": WCOpcode.FETCH_ADD, "cmp_swap": WCOpcode.COMP_SWAP,
}  # fmt: skip
_RECEIVES = {"send": WCOpcode.RECV, "send_imm": WCOpcode.RECV, "write_imm": WCOpcode.RECV_RDMA_WITH_IMM}


class WorkloadError(AssertionError):
    """Data, guard bytes or completions were wrong."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says. ``bytes`` per message, ``count`` messages over all ``qps``; ``outstanding`` messages of one
    QP posted and not completed. Raises ``ValueError`` naming the option and its limits."""

    config: str = "tiny"
    bytes: int = 64
    count: int = 16
    qps: int = 1
    mtu: int = 1024
    outstanding: int = 16
    inline: bool = False
    sge: int = 1
    ipv6: bool = False
    host_latency: int = 64
    link_latency: int = 8
    seed: int = 1

    def __post_init__(self) -> None:
        config = named_config(self.config)
        MTU.of(self.mtu)
        limits = {"bytes": (0, 1 << 24), "count": (1, 1 << 20), "qps": (1, config.num_qps - 2), "outstanding": (1, 8192),
                  "sge": (1, config.max_sge), "host_latency": (1, 100_000), "link_latency": (1, 100_000),
                  "seed": (0, (1 << 63) - 1)}  # fmt: skip
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}, must be {low}..{high} ({self.config})")
        if self.ipv6 and config.num_gids < 2:
            raise ValueError(f"--ipv6 needs two GIDs, {self.config} has one")


@dataclass
class Report:
    """What a run showed; ``to_json`` is what ``--json`` writes. Cycles from the first doorbell to the last CQE in memory."""

    config: str
    op: str
    bytes: int
    count: int
    qps: int
    mtu: int
    seed: int
    cycles: int = 0
    payload_bytes: int = 0
    bytes_per_cycle: float = 0.0
    frames: int = 0
    wire_bytes: int = 0
    beats: int = 0
    latency_cycles: dict[str, int] = field(default_factory=dict)
    completions: dict[str, int] = field(default_factory=dict)
    data_ok: bool = False
    error: str = ""
    sim: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=2) + "\n"


def plan_for(kind: str, options: Options) -> list[Action]:
    """The messages of a workload without a script, dealt to the QPs in turn. Raises ``ValueError`` for a wrong combination."""
    rng = random.Random(options.seed)
    if options.inline and kind in ("read", "atomic", "mix"):
        raise ValueError(f"--inline does not go with {kind}")
    plan: list[Action] = []
    for n in range(options.count):
        op, length = kind, options.bytes
        if kind == "mix":
            op = rng.choice(["send", "send_imm", "write", "write_imm", "read", "fetch_add", "cmp_swap"])
            length = rng.randint(0, options.bytes)
        if kind == "atomic":
            op = rng.choice(ATOMICS)
        atomic = op in ATOMICS
        plan.append(Post(op, 8 if atomic else length, qp=n % options.qps, sge=1 if atomic else options.sge,
                         inline=options.inline, imm=rng.getrandbits(32) if op.endswith("_imm") else 0))  # fmt: skip
    return plan


@dataclass
class _Message:
    """A message from post to the comparison of its data."""

    number: int
    post: Post
    slot: int
    index: int  # counter of its WQE in the SQ
    data: bytes = b""  # what must arrive
    before: int = 0  # atomics: value at the target, and afterwards
    after: int = 0
    sent: bool = False
    received: bool = False

    @property
    def complete(self) -> bool:
        return self.sent and (self.received or self.post.op not in _RECEIVES)


class _Side:
    """One machine: PD, CQ, a region for what it posts (local) and one for what arrives (target)."""

    def __init__(self, context, cqe: int, local: int, target: int):
        self.context = context
        self.pd, self.cq = PD(context), CQ(context, cqe)
        self.local, self.target = MR(self.pd, local, _ALL), MR(self.pd, target, _ALL)
        for region in (self.local, self.target):
            region.write(bytes([_FILL]) * region.length)


class _Lane:
    """One direction of one QP pair: the messages of its poster, in order."""

    def __init__(self, workload: Workload, host: int, number: int, poster: QP, peer: QP, first_slot: int):
        self.workload, self.host, self.number = workload, host, number
        self.poster, self.peer, self.first_slot = poster, peer, first_slot
        self.waiting: deque[tuple[int, Post]] = deque()
        self.messages: dict[int, _Message] = {}  # by number, from post to comparison
        self.free = deque(range(workload.slots))
        self.open = 0  # posted, not completed
        self.posted = 0

    def offset(self, slot: int) -> int:
        """Where a slot's data begins in both regions."""
        return GUARD + (self.first_slot + slot) * self.workload.stride

    def post(self) -> bool:
        """Post what the window allows, with one doorbell; whether there was any."""
        w = self.workload
        fresh = []
        while self.waiting and self.free and self.open + len(fresh) < w.options.outstanding:
            number, post = self.waiting.popleft()
            message = _Message(number, post, self.free.popleft(), self.posted & 0xFFFF)
            self.messages[number] = message
            fresh.append((message, self._prepare(message)))
            self.posted += 1
        if fresh:
            receives = [self._receive(m) for m, _ in fresh if m.post.op in _RECEIVES]
            if receives:
                self.peer.post_recv(*receives)
            self.poster.post_send(*(wr for _, wr in fresh))
            self.open += len(fresh)
        return bool(fresh)

    def _prepare(self, message: _Message) -> SendWR:
        """Fill the buffers of a message and make its work request."""
        w, post = self.workload, message.post
        rng = random.Random(f"{w.options.seed} {message.number}")
        at, size = self.offset(message.slot), post.bytes
        local, target = w.sides[self.host].local, w.sides[1 - self.host].target
        blank = bytes([_FILL]) * w.size
        local.write(blank, at)
        target.write(blank, at)
        message.data = rng.randbytes(size)
        wr = SendWR(message.number, _OPCODES[post.op], imm_data=post.imm)
        if post.op in ATOMICS:
            message.before = int.from_bytes(message.data, "little")
            target.write(message.data, at)
            operand, hit = rng.getrandbits(64), rng.random() < 0.5
            if post.op == "fetch_add":
                message.after = message.before + operand & (1 << 64) - 1
                wr.set_wr_atomic(target.rkey, target.buf + at, operand, 0)
            else:
                message.after = operand if hit else message.before
                wr.set_wr_atomic(target.rkey, target.buf + at, message.before if hit else message.before ^ 1, operand)
        else:
            (target if post.op == "read" else local).write(message.data, at)
            wr.set_wr_rdma(target.rkey, target.buf + at)
        wr.sg = self._pieces(local, at, size, post.sge)
        wr.send_flags = SendFlags.SIGNALED
        for flag, on in ((SendFlags.INLINE, post.inline), (SendFlags.FENCE, post.fence), (SendFlags.SOLICITED, post.solicited)):
            if on:
                wr.send_flags |= flag
        return wr

    @staticmethod
    def _pieces(region: MR, at: int, size: int, count: int) -> list[SGE]:
        if not size:
            return []
        cuts = [size * i // count for i in range(count + 1)]
        return [SGE(region.buf + at + low, high - low, region.lkey) for low, high in zip(cuts, cuts[1:], strict=False)]

    def _receive(self, message: _Message) -> RecvWR:
        region = self.workload.sides[1 - self.host].target
        size = message.post.bytes if message.post.op != "write_imm" else 0
        return RecvWR(message.number, self._pieces(region, self.offset(message.slot), size, 1))

    def completed(self, wc: WC, receive: bool, now: int) -> None:
        """A completion of one of the messages. Raises `WorkloadError`."""
        message = self.messages.get(wc.wr_id)
        if message is None or (message.received if receive else message.sent):
            raise WorkloadError(f"completion of wr_id {wc.wr_id}, which is not outstanding")
        post = message.post
        what = f"{post.op} {wc.wr_id} on QP {wc.qp_num}"
        if wc.status != WCStatus.SUCCESS:
            raise WorkloadError(f"{what} completed with {wc.status.name} (vendor error {wc.vendor_err})")
        wanted = _RECEIVES[post.op] if receive else _COMPLETIONS[post.op]
        if wc.opcode != wanted:
            raise WorkloadError(f"{what} completed as {wc.opcode.name}, must be {wanted.name}")
        if receive:
            if wc.byte_len != post.bytes or (post.op.endswith("_imm") and wc.imm_data != post.imm):
                raise WorkloadError(f"{what} was received with {wc.byte_len} bytes and immediate {wc.imm_data:#x}")
            message.received = True
        else:
            message.sent = True
            self.open -= 1
        if message.complete:
            self.workload.ripe.append((now + _SETTLE, self, message))
        self.workload.order[self.host if not receive else 1 - self.host].append((wc.qp_num, None if receive else message.index))

    def finish(self, message: _Message) -> None:
        """Compare the data of a completed message and free its slot. Raises `WorkloadError`."""
        self._compare(message)
        del self.messages[message.number]
        self.free.append(message.slot)

    def _compare(self, message: _Message) -> None:
        w, post = self.workload, message.post
        blank = bytes([_FILL])
        here = there = message.data
        if post.op in ATOMICS:
            there = message.after.to_bytes(8, "little")
        mine, yours = w.sides[self.host].local, w.sides[1 - self.host].target
        for region, data, side in ((mine, here, self.host), (yours, there, 1 - self.host)):
            wanted = blank * GUARD + data + blank * (w.size - len(data) + GUARD)
            got = region.read(len(wanted), self.offset(message.slot) - GUARD)
            if got != wanted:
                at = next(i for i, (g, e) in enumerate(zip(got, wanted, strict=True)) if g != e)
                raise WorkloadError(
                    f"{post.op} {message.number} on QP {self.poster.qp_num}: byte {at - GUARD} of {len(data)} at host "
                    f"{'ab'[side]} is {got[at]:#04x}, must be {wanted[at]:#04x}"
                )


@dataclass(frozen=True)
class _Layout:
    """What a plan needs of buffers and queues. ``of`` raises ``ValueError`` when it does not fit the configuration."""

    total: int  # messages
    qps: int
    hosts: list[int]  # machines that post
    size: int  # bytes of the longest message
    stride: int  # from slot to slot
    slots: int  # per QP and direction
    inline: int  # bytes of the longest inline message
    sge: int

    @classmethod
    def of(cls, plan: list[Action], options: Options) -> _Layout:
        config = named_config(options.config)
        posts = [action for action in plan if isinstance(action, Post)]
        qps = max(options.qps, 1 + max(post.qp for post in posts))
        if qps > config.num_qps - 2:
            raise ValueError(f"qp is {qps - 1}, must be 0..{config.num_qps - 3} ({options.config})")
        sge = max(post.sge for post in posts)
        if sge > config.max_sge:
            raise ValueError(f"sge is {sge}, must be 1..{config.max_sge} ({options.config})")
        size = max(8, *(post.bytes for post in posts))
        stride = -(-size // 64) * 64 + GUARD
        slots = min(2 * options.outstanding, len(posts))
        hosts = sorted({post.host for post in posts})
        memory = 2 * len(hosts) * qps * slots * stride
        if memory > _MOST_MEMORY:
            raise ValueError(f"bytes x outstanding x qps need {memory >> 20} MiB of buffers, at most {_MOST_MEMORY >> 20}")
        inline = max((post.bytes for post in posts if post.inline), default=0)
        if inline > (most := abi.inline_bytes(abi.MAX_LOG_STRIDE)):
            raise ValueError(f"{inline} bytes inline, must be at most {most}")
        return cls(len(posts), qps, hosts, size, stride, slots, inline, sge)


class Workload:
    """Two machines, ready to run a plan that fits."""

    def __init__(self, lab: Lab, plan: list[Action], options: Options, layout: _Layout):
        self.lab, self.plan, self.options = lab, plan, options
        self.total, self.size, self.stride, self.slots = layout.total, layout.size, layout.stride, layout.slots
        qps, hosts = layout.qps, layout.hosts
        region = GUARD + qps * self.slots * self.stride
        cqe = min(1 << 16, 2 * qps * (options.outstanding + self.slots))
        self.sides = [_Side(context, cqe, region, region) for context in lab.contexts[:2]]
        cap = QPCap(max_send_wr=options.outstanding, max_recv_wr=self.slots, max_inline_data=layout.inline,
                    max_send_sge=layout.sge)  # fmt: skip
        depth = min(lab.config.max_rd_atomic, options.outstanding)
        rng = random.Random(options.seed)
        self.pairs: list[tuple[int, int]] = []  # QPNs that talk to each other, machine 0 first
        self.lanes: dict[tuple[int, int], _Lane] = {}
        self._by_qp: dict[tuple[int, int, bool], _Lane] = {}  # (machine of the completion, QPN, receive)
        for number in range(qps):
            pair = [QP(side.pd, QPInitAttr(side.cq, side.cq, cap=cap)) for side in self.sides]
            lab.connect(pair[0], pair[1], mtu=options.mtu, gid=int(options.ipv6), max_rd_atomic=depth, max_dest_rd_atomic=depth,
                        psns=(rng.getrandbits(24), rng.getrandbits(24)))  # fmt: skip
            self.pairs.append((pair[0].qp_num, pair[1].qp_num))
            for host in hosts:
                lane = _Lane(self, host, number, pair[host], pair[1 - host], number * self.slots)
                self.lanes[host, number] = lane
                self._by_qp[host, pair[host].qp_num, False] = lane
                self._by_qp[1 - host, pair[1 - host].qp_num, True] = lane
        self.completions: Counter[str] = Counter()
        self.order: list[list[tuple[int, int | None]]] = [[], []]  # per machine the CQEs: QPN and, for sends, WQE counter
        self.ripe: deque[tuple[int, _Lane, _Message]] = deque()  # completed, and the cycle from which on memory must be right
        self.compared = 0

    def run(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """Carry out the plan and compare everything. ``progress(done, total)`` is called now and then.

        Raises `WorkloadError`, `TimeoutError`.
        """
        world, actions, number = self.lab.world, deque(self.plan), 0
        last, pause = world.cycle, 0
        while self.compared < self.total:
            while actions and world.cycle >= pause:
                action = actions.popleft()
                if isinstance(action, Wait):
                    if any(lane.waiting or lane.messages for lane in self.lanes.values()):
                        actions.appendleft(action)
                        break
                elif isinstance(action, Pause):
                    for lane in self.lanes.values():
                        lane.post()
                    pause = world.cycle + action.cycles
                else:
                    self.lanes[action.host, action.qp].waiting.append((number, action))
                    number += 1
            for lane in self.lanes.values():
                lane.post()
            world.step(_LOOK)
            for host, side in enumerate(self.sides):
                for wc in side.cq.poll(256)[1]:
                    last = world.cycle
                    self.completions[wc.status.name] += 1
                    self._lane_of(host, wc).completed(wc, bool(wc.opcode & 0x80), world.cycle)
            while self.ripe and self.ripe[0][0] <= world.cycle:
                _, lane, message = self.ripe.popleft()
                lane.finish(message)
                self.compared += 1
            progress(self.compared, self.total)
            if world.cycle - last > _QUIET and world.cycle - pause > _QUIET:
                raise TimeoutError(f"no completion for {_QUIET} cycles, {self.compared} of {self.total} messages done")
        for host, side in enumerate(self.sides):
            if side.cq.poll()[0]:
                raise WorkloadError(f"host {'ab'[host]} has a completion too many")

    def _lane_of(self, host: int, wc: WC) -> _Lane:
        lane = self._by_qp.get((host, wc.qp_num, bool(wc.opcode & 0x80)))
        if lane is None:
            raise WorkloadError(f"completion {wc} at host {'ab'[host]}, which posted nothing there")
        return lane

    def measure(self, report: Report) -> None:
        """Fill in what the ports showed since monitoring began."""
        rings = [{page // PAGE for page in side.cq.ring.pages} for side in self.sides]
        bells: dict[tuple[int, int], deque[tuple[int, int]]] = {}  # (machine, QPN): producer counters and their cycles
        written: list[list[int]] = [[], []]
        for e in self.lab.world.events():
            if e.kind == EventKind.CSR_WRITE and e.address & ~0xFFFF == abi.DB_SQ:
                bells.setdefault((e.nic, (e.address & 0xFFFF) // 4), deque()).append((e.aux, e.cycle))
            elif e.kind == EventKind.B and e.address // PAGE in rings[e.nic]:
                written[e.nic].append(e.cycle)
        latencies = []
        first = min(queue[0][1] for queue in bells.values())
        for host in (0, 1):
            for cycle, (qpn, index) in zip(written[host], self.order[host], strict=False):
                if index is not None:
                    queue = bells[host, qpn]
                    while queue[0][0] - 1 - index & 0x8000:  # that doorbell ended before this WQE
                        queue.popleft()
                    latencies.append(cycle - queue[0][1])
        report.cycles = max(cycle for cycles in written for cycle in cycles) - first
        report.latency_cycles = _percentiles(latencies)
        report.payload_bytes = sum(action.bytes for action in self.plan if isinstance(action, Post))
        report.bytes_per_cycle = round(report.payload_bytes / report.cycles, 4)


def _percentiles(values: list[int]) -> dict[str, int]:
    ranked = sorted(values)
    at = {"p50": 50, "p99": 99, "max": 100}
    return {name: ranked[min(len(ranked) - 1, len(ranked) * part // 100)] for name, part in at.items()}


def run_workload(kind: str, options: Options, plan: list[Action] | None = None, *, files: Files | None = None,
                 progress: Callable[[int, int], None] = lambda _done, _total: None) -> Report:  # fmt: skip
    """Build, run, compare, write the files. The report tells whether all was right (``data_ok``), else why not (``error``).

    Raises ``ValueError`` for options that do not fit together, before anything runs.
    """
    files = files or Files()
    plan = plan_for(kind, options) if plan is None else plan
    layout = _Layout.of(plan, options)
    report = Report(options.config, kind, options.bytes, layout.total, options.qps, options.mtu, options.seed)
    started = time.perf_counter()
    lab = Lab(options.config, seed=options.seed, host_latency=options.host_latency, link_latency=options.link_latency)
    with lab:
        built = time.perf_counter()
        workload = Workload(lab, plan, options, layout)
        world = lab.world
        world.monitor(events=True, probes=files.trace is not None)
        world.events()
        journal = Journal(lab) if files.trace is not None else None
        begin, skip, run = world.cycle, len(world.frames), time.perf_counter()
        try:
            with recording(world, files.waves) if files.waves is not None else nullcontext():
                workload.run(progress)
            report.data_ok = True
        except (WorkloadError, SimError, TimeoutError, RDMAError) as error:
            report.error = str(error)
        seconds = time.perf_counter() - run
        cycles = world.cycle - begin
        frames = [frame for frame in world.frames[skip:] if frame.port == Port.NET_TX]
        report.frames, report.wire_bytes = len(frames), sum(len(frame.data) for frame in frames)
        report.beats = sum(-(-len(frame.data) // (lab.config.data_width // 8)) for frame in frames)
        report.completions = dict(workload.completions)
        report.sim = {"cycles_per_second": round(cycles / seconds), "run_seconds": round(seconds, 3),
                      "build_seconds": round(built - started, 3)}  # fmt: skip
        if report.data_ok:
            workload.measure(report)
        files.write(lab, frames, journal, workload.pairs)
    if files.json is not None:
        write_text(files.json, report.to_json())
    return report
