"""`rnic bench`: the budgets of the RNIC, each measured at its ports.

Every number comes from the port monitors of the simulation (AXI address and data beats, register writes, first and last beats
of frames, each with its cycle), never from a counter or a probe of the RNIC. Conditions unless a row says otherwise: idle RNIC,
every key and ring used once before (warm translation), messages of 64 bytes, no loss, a link of one cycle.
``L`` is the host bus from AR to the first R beat, ``Wr`` from the last W beat to B.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rnic import abi
from rnic.config import named_config
from rnic.wire.opcode import Opcode

from .enums import AccessFlags, SendFlags, WCStatus, WROpcode
from .lab import Lab
from .link import Frame
from .native import EventKind, Port
from .qp import QP, QPCap, QPInitAttr
from .verbs import CQ, MR, PD, SGE, SendWR
from .vm import PAGE
from .world import Event

__all__ = ["BenchError", "Measurement", "NotBuilt", "print_table", "run_bench", "write_json"]

WR = 16  # cycles from the last W beat to B in every row
_ALL = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_PAGE = 65536  # pages of the payload regions: one page each, so a key used once is warm
_BTH = 42  # where the BTH starts in an untagged IPv4 frame
_PATIENCE = 400_000  # cycles a measurement may take


class BenchError(RuntimeError):
    """A measurement that should be there is not."""


class NotBuilt(Exception):  # noqa: N818 (not an error)
    """The RNIC answers an operation with LOC_QP_OP_ERR: it does not have it."""


@dataclass(frozen=True)
class Measurement:
    """One row: ``measured`` must be at most ``budget``, or at least when ``at_least``. ``None`` budget: for information;
    ``None`` measured: the RNIC does not have the operation."""

    row: str
    what: str
    formula: str
    budget: float | None
    measured: float | None
    unit: str = "cycles"
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not built yet"
        if self.budget is None:
            return ""
        good = self.measured >= self.budget if self.at_least else self.measured <= self.budget
        return "ok" if good else "over" if not self.at_least else "under"


@dataclass
class _Run:
    """What the ports showed during one run."""

    events: list[Event]
    frames: list[Frame]

    def first(self, nic: int, kind: EventKind, after: int = 0, *, page: int | None = None) -> int:
        """Cycle of the first event of a kind on a NIC from cycle ``after`` on; ``page``: a register write in that page."""
        for e in self.events:
            if e.nic == nic and e.kind == kind and e.cycle >= after and (page is None or e.address & ~0xFFFF == page):
                return e.cycle
        raise BenchError(f"no {kind.name} on nic {'ab'[nic]} from cycle {after} on")

    def sent(self, nic: int, opcodes: Iterable[Opcode] | None = None) -> list[Frame]:
        """Frames a NIC sent, in order."""
        wanted = None if opcodes is None else {o.value for o in opcodes}
        return [f for f in self.frames if f.nic == nic and (wanted is None or f.data[_BTH] in wanted)]


_WRITES = (Opcode.RC_WRITE_ONLY, Opcode.RC_WRITE_FIRST, Opcode.RC_WRITE_MIDDLE, Opcode.RC_WRITE_LAST)
_READ_RESPONSES = (Opcode.RC_READ_RESP_ONLY, Opcode.RC_READ_RESP_FIRST, Opcode.RC_READ_RESP_MIDDLE, Opcode.RC_READ_RESP_LAST)


class _Rig:
    """Two RNICs, on each a CQ, a region of one page and as many QPs as asked for; ``deep`` is the depth of the first QP."""

    def __init__(self, config: str, qps: int, deep: int):
        self.lab = Lab(config, host_latency=64, write_latency=WR, link_latency=1)
        self.width = self.lab.config.data_width
        self.lanes = self.width // 8
        self.world = self.lab.world
        self.cqs = [CQ(c, 64) for c in self.lab.contexts]
        self.pds = [PD(c) for c in self.lab.contexts]
        self.regions = [MR(pd, _PAGE, _ALL, page_size=_PAGE) for pd in self.pds]
        for i, region in enumerate(self.regions):
            region.write(bytes((i + 3 * n) & 0xFF for n in range(_PAGE)))
        self.pairs: list[tuple[QP, QP]] = []
        for n in range(qps):
            self.add_pair(QPCap(max_send_wr=deep if n == 0 else 64, max_recv_wr=2, max_inline_data=64 if n == 1 else 0))
        for side in (0, 1):
            self.run([(side, 0, deep, 64, WROpcode.RDMA_WRITE)])  # all pages of its ring

    def add_pair(self, cap: QPCap) -> tuple[QP, QP]:
        """One more connected pair of QPs, PMTU 4096, with all READs in flight the RNICs allow."""
        one, two = (QP(pd, QPInitAttr(cq, cq, cap=cap)) for pd, cq in zip(self.pds, self.cqs, strict=True))
        most = self.lab.config.max_rd_atomic
        self.lab.connect(one, two, mtu=4096, max_rd_atomic=most, max_dest_rd_atomic=most)
        self.pairs.append((one, two))
        self.warm(len(self.pairs) - 1)
        return one, two

    def close(self) -> None:
        self.lab.close()

    def latency(self, cycles: int) -> None:
        """Host bus from AR to the first R beat, both machines."""
        for host in self.world.nic:
            host.bus(read_latency=cycles)

    def warm(self, pair: int) -> None:
        """A WRITE each way: every key, ring and context of the pair was used."""
        for side in (0, 1):
            self.run([(side, pair, 1, 64, WROpcode.RDMA_WRITE)])

    def run(self, loads: list[tuple[int, int, int, int, WROpcode]], *, inline: bool = False,
            scattered: MR | None = None) -> _Run:  # fmt: skip
        """Post everything, ring one doorbell a QP, wait for the completions.

        A load is (side, pair, messages, bytes, operation); the last message of each is signaled. The messages of the first
        load come from a 4 KiB page of ``scattered`` each, when given.
        """
        world, start = self.world, len(self.world.frames)
        expected = [0, 0]
        for which, (side, pair, count, size, opcode) in enumerate(loads):
            qp, local, remote = self.pairs[pair][side], self.regions[side], self.regions[1 - side]
            expected[side] += 1
            for n in range(count):
                flags = (SendFlags.SIGNALED if n == count - 1 else 0) | (SendFlags.INLINE if inline else 0)
                at = n * size % (_PAGE // 2) // 64 * 64
                source = SGE(local.buf + at, size, local.lkey)
                if scattered is not None and which == 0:
                    source = SGE(scattered.buf + n * PAGE, size, scattered.lkey)
                wr = SendWR(n, opcode, [source], flags)
                wr.set_wr_rdma(remote.rkey, remote.buf + _PAGE // 2 + at)
                qp.post_send(wr, ring=False)
        self.lab.relax(400)  # idle
        world.monitor(events=True, probes=False)
        world.events()
        for side, pair, *_ in loads:
            self.pairs[pair][side].ring_sq()
        done, end = [0, 0], world.cycle + _PATIENCE
        while done != expected:
            if world.cycle >= end:
                raise BenchError(f"{sum(done)} of {sum(expected)} completions after {_PATIENCE} cycles")
            world.step(64)
            for side in (0, 1):
                for wc in self.cqs[side].poll(64)[1]:
                    if wc.status == WCStatus.LOC_QP_OP_ERR:
                        raise NotBuilt
                    if wc.status != WCStatus.SUCCESS:
                        raise BenchError(f"completion with {wc.status.name}")
                    done[side] += 1
        self.lab.relax(400)
        events = world.events()
        world.monitor()
        return _Run(events, [f for f in world.frames[start:] if f.port == Port.NET_TX])

    def beats(self, frame: Frame) -> int:
        return -(-len(frame.data) // self.lanes)


def _middle(frames: list[Frame], what: str) -> list[Frame]:
    """The middle half: neither ramp-up nor the tail."""
    if len(frames) < 8:
        raise BenchError(f"{what}: only {len(frames)} frames")
    return frames[len(frames) // 4 : -(len(frames) // 4)]


def _pace(frames: list[Frame], what: str) -> float:
    """Cycles from frame to frame in the middle of a run."""
    middle = _middle(frames, what)
    return (middle[-1].first - middle[0].first) / (len(middle) - 1)


# ------------------------------------------------------------------------------------------------- the rows
def _idle(rig: _Rig) -> list[Measurement]:
    """Row 1: WRITEs in both directions at once, so ACKs are among the frames."""
    found = []
    for size, count in ((4096, 48), (64, 128)):
        rig.latency(64)
        depth = min(count, rig.pairs[0][0].cap.max_send_wr)
        run = rig.run([(0, 0, depth, size, WROpcode.RDMA_WRITE), (1, 0, depth, size, WROpcode.RDMA_WRITE)])
        inside, between, mean = 0, 0, []
        for nic in (0, 1):
            frames = run.sent(nic)
            inside = max(inside, *(f.last - f.first + 1 - rig.beats(f) for f in frames))
            middle = _middle(frames, f"row 1, {size} B")
            gaps = [b.first - a.last - 1 for a, b in zip(middle, middle[1:], strict=False)]
            between = max(between, *gaps)
            mean += gaps
        found += [
            Measurement("1", f"idle cycles inside a packet, {size} B, both directions", "0", 0, inside),
            Measurement("1", f"idle cycles between packets, {size} B, worst (mean {sum(mean) / len(mean):.1f})", "1", 1, between),
        ]
    return found


def _write_rate(rig: _Rig) -> list[Measurement]:
    rig.latency(250)
    frame = 14 + 20 + 8 + 12 + 16 + 64 + 4
    least = max(4, -(-frame // rig.lanes) + 1)
    formula = "4" if least == 4 else f"{least - 1} beats + 1"
    depth = rig.pairs[0][0].cap.max_send_wr
    one = rig.run([(0, 0, depth, 64, WROpcode.RDMA_WRITE)])
    found = [Measurement("2", "64 B WRITE, one QP, per message, L = 250", formula, least, _pace(one.sent(0, _WRITES), "row 2"))]
    many = min(16, len(rig.pairs))
    run = rig.run([(0, n, 64, 64, WROpcode.RDMA_WRITE) for n in range(many)])
    found.append(Measurement("2", f"64 B WRITE, {many} QPs, per message, L = 250", formula, least,
                             _pace(run.sent(0, _WRITES), "row 2")))  # fmt: skip
    return found


def _read_rate(rig: _Rig) -> list[Measurement]:
    found, n = [], rig.lab.config.max_rd_atomic
    frame = 14 + 20 + 8 + 12 + 4 + 64 + 4
    for latency in (64, 250):
        rig.latency(latency)
        loop = 70 + latency + WR
        budget = max(6, loop / n, -(-frame // rig.lanes) + 1)
        run = rig.run([(0, 0, min(128, rig.pairs[0][0].cap.max_send_wr), 64, WROpcode.RDMA_READ)])
        found.append(Measurement("3", f"64 B READ, {n} outstanding, per message, L = {latency}", f"max(6, {loop} / {n})",
                                 budget, _pace(run.sent(0, [Opcode.RC_READ_REQUEST]), "row 3")))  # fmt: skip
    return found


def _read_bandwidth(rig: _Rig) -> list[Measurement]:
    rig.latency(250)
    n = rig.lab.config.max_rd_atomic
    run = rig.run([(0, 0, 48 if rig.lanes == 64 else 24, 4096, WROpcode.RDMA_READ)])
    middle = _middle(run.sent(1, _READ_RESPONSES), "row 4")
    cycles = middle[-1].first - middle[0].first
    share = 4096 * (len(middle) - 1) / (cycles * rig.lanes)
    return [Measurement("4", f"4 KiB READ, PMTU 4096, L = 250, {n} outstanding: payload bytes / (cycles x width)", "", 0.95,
                        share, "", at_least=True)]  # fmt: skip


def _one_write(rig: _Rig, latency: int, *, inline: bool = False) -> tuple[_Run, int]:
    rig.latency(latency)
    rig.run([(0, 1 if inline else 0, 1, 64, WROpcode.RDMA_WRITE)], inline=inline)
    run = rig.run([(0, 1 if inline else 0, 1, 64, WROpcode.RDMA_WRITE)], inline=inline)
    return run, run.first(0, EventKind.CSR_WRITE, page=abi.DB_SQ)


def _doorbell(rig: _Rig) -> list[Measurement]:
    found = []
    for latency in (64, 250):
        run, bell = _one_write(rig, latency)
        found.append(Measurement("5", f"doorbell to first wire beat, L = {latency}", "40 + 2 L", 40 + 2 * latency,
                                 run.first(0, EventKind.NET_TX_FIRST) - bell))  # fmt: skip
        run, bell = _one_write(rig, latency, inline=True)
        found.append(Measurement("5", f"doorbell to first wire beat, inline data, L = {latency}", "40 + L", 40 + latency,
                                 run.first(0, EventKind.NET_TX_FIRST) - bell))  # fmt: skip
    return found


def _place(rig: _Rig) -> list[Measurement]:
    run, _ = _one_write(rig, 64)
    beats = -(-64 // rig.lanes)
    arrived = run.first(1, EventKind.NET_RX_LAST)
    return [
        Measurement("6", "last wire beat in to first AXI W beat", "24", 24, run.first(1, EventKind.W_FIRST, arrived) - arrived),
        Measurement("6", "last wire beat in to last AXI W beat", "24 + payload beats + 2", 26 + beats,
                    run.first(1, EventKind.W_LAST, arrived) - arrived),
        Measurement("7", "last request beat in to first ACK beat", "40 + payload beats", 40 + beats,
                    run.first(1, EventKind.NET_TX_FIRST, arrived) - arrived),
    ]  # fmt: skip


def _round_trip(rig: _Rig) -> list[Measurement]:
    found = []
    for latency in (64, 250):
        run, bell = _one_write(rig, latency)
        found.append(Measurement("8", f"WRITE 64 B doorbell to CQE in memory, link 1, L = {latency}", "130 + 2 L",
                                 130 + 2 * latency, run.first(0, EventKind.B, bell) - bell))  # fmt: skip
    return found


def _read_trip(rig: _Rig) -> list[Measurement]:
    found = []
    for latency in (64, 250):
        rig.latency(latency)
        rig.run([(0, 0, 1, 64, WROpcode.RDMA_READ)])
        run = rig.run([(0, 0, 1, 64, WROpcode.RDMA_READ)])
        bell = run.first(0, EventKind.CSR_WRITE, page=abi.DB_SQ)
        data = run.first(0, EventKind.B, bell)
        found.append(Measurement("9", f"READ 64 B doorbell to CQE in memory, link 1, L = {latency}", "150 + 2 L + Wr",
                                 150 + 2 * latency + WR, run.first(0, EventKind.B, data + 1) - bell))  # fmt: skip
    return found


def _all_qps(rig: _Rig) -> list[Measurement]:
    """Row 10, the rate: the same WRITEs on 16 QPs and on every QP there is."""
    usable = rig.lab.config.num_qps - 2
    if usable < 32:
        return []
    rig.latency(64)  # setting up
    while len(rig.pairs) < usable:
        rig.add_pair(QPCap(max_send_wr=64, max_recv_wr=2))
    rig.latency(250)
    few = _pace(rig.run([(0, n, 16, 64, WROpcode.RDMA_WRITE) for n in range(16)]).sent(0, _WRITES), "row 10")
    all_qps = _pace(rig.run([(0, n, 16, 64, WROpcode.RDMA_WRITE) for n in range(usable)]).sent(0, _WRITES), "row 10")
    return [Measurement("10", f"64 B WRITE, {usable} QPs, per message, L = 250 (budget: as with 16 QPs)", "", few, all_qps)]


def _cold(rig: _Rig) -> list[Measurement]:
    """Row 11: one QP sends from pages never used before, behind two-level page tables, the others from warm ones."""
    rig.latency(500)
    others = range(1, min(16, len(rig.pairs)))
    pages = 600  # more than one table holds
    count = rig.pairs[others[-1]][0].cap.max_send_wr
    scattered = MR(rig.pds[0], pages * PAGE, _ALL)
    loads = [(0, n, count, 64, WROpcode.RDMA_WRITE) for n in (0, *others)]
    numbers = {rig.pairs[n][1].qp_num for n in others}

    def rate(run: _Run) -> float:
        mine = [f for f in run.sent(0, _WRITES) if int.from_bytes(f.data[_BTH + 5 : _BTH + 8], "big") in numbers]
        return 1 / _pace(mine, "row 11")

    warm = rate(rig.run(loads))
    share = rate(rig.run(loads, scattered=scattered)) / warm
    return [Measurement("11", "rate of the others while one QP has cold two-level walks, L = 500", "", 0.95, share, "",
                        at_least=True)]  # fmt: skip


def _flood(rig: _Rig) -> list[Measurement]:
    """Row 12: machine 1 WRITEs 4 KiB messages while machine 0 READs 4 KiB messages from it on other QPs."""
    rig.latency(64)
    writes = 48 if rig.lanes == 64 else 16
    readers = min(4, len(rig.pairs) - 2)
    run = rig.run([(0, 2 + n, writes, 4096, WROpcode.RDMA_READ) for n in range(readers)]
                  + [(1, 0, writes, 4096, WROpcode.RDMA_WRITE)])  # fmt: skip
    own, other = run.sent(1, _WRITES), run.sent(1, _READ_RESPONSES)
    begin, end = max(own[0].first, other[0].first), min(own[-1].first, other[-1].first)
    count = sum(begin <= f.first < end for f in own)
    if count < 4:
        raise BenchError(f"row 12: only {count} WRITE frames during the flood")
    return [Measurement("12", "own 4 KiB WRITEs under a flood of inbound READs: payload bytes / (cycles x width)", "", 0.40,
                        4096 * count / ((end - begin) * rig.lanes), "", at_least=True)]  # fmt: skip


def _short_frames(rig: _Rig) -> list[Measurement]:
    """Row 13: an old ACK, 62 bytes and so one beat at 512 bits, again and again."""
    run, _ = _one_write(rig, 64)
    (ack,) = run.sent(1, [Opcode.RC_ACK])
    beats = rig.beats(ack)
    rig.world.monitor(events=True, probes=False, frames=())
    rig.world.events()
    count = 2000
    for _ in range(count):
        rig.world.nic[0].inject(ack.data)
    rig.lab.relax(count * (beats + 2) + 200)
    starts = [e.cycle for e in rig.world.events() if e.nic == 0 and e.kind == EventKind.NET_RX_FIRST]
    rig.world.monitor()
    if len(starts) < count // 2:
        raise BenchError(f"row 13: {len(starts)} of {count} frames were taken")
    starts = starts[len(starts) // 4 :]
    return [Measurement("13", f"frames of {beats} beat{'s' * (beats > 1)} at net_rx, {count} in a row, per frame",
                        "2" if beats == 1 else f"{beats} beats + 1", 2 if beats == 1 else beats + 1,
                        (starts[-1] - starts[0]) / (len(starts) - 1))]  # fmt: skip


def _speed(rig: _Rig) -> list[Measurement]:
    """Simulated cycles per second of processor time while both directions are busy, waves and monitors off."""
    world = rig.world
    world.monitor(probes=False, frames=())
    size, count = 4096, min(64, rig.pairs[0][0].cap.max_send_wr)
    for side in (0, 1):
        qp, local, remote = rig.pairs[0][side], rig.regions[side], rig.regions[1 - side]
        for n in range(count):
            wr = SendWR(n, WROpcode.RDMA_WRITE, [SGE(local.buf, size, local.lkey)], SendFlags.SIGNALED if n == count - 1 else 0)
            wr.set_wr_rdma(remote.rkey, remote.buf + _PAGE // 2)
            qp.post_send(wr, ring=False)
        qp.ring_sq()
    cycles = count * size // rig.lanes
    started = time.process_time()
    world.step(cycles)
    seconds = time.process_time() - started
    world.monitor()
    for cq in rig.cqs:
        rig.lab.wait_wc(cq, 1, _PATIENCE)
    what = "simulator, per second of processor time: two RNICs, both directions busy, no waves"
    return [Measurement("-", what, "", None, round(cycles / seconds), "cycles/s")]


_ROWS: tuple[tuple[str, str, Callable[[_Rig], list[Measurement]]], ...] = (
    ("1", "idle cycles", _idle), ("2", "64 B WRITE rate", _write_rate), ("3", "64 B READ rate", _read_rate),
    ("4", "4 KiB READ bandwidth", _read_bandwidth), ("5", "doorbell to wire", _doorbell), ("6", "wire to memory", _place),
    ("8", "WRITE doorbell to CQE", _round_trip), ("9", "READ doorbell to CQE", _read_trip),
    ("11", "others beside cold walks", _cold), ("12", "own WRITEs under inbound READs", _flood),
    ("13", "short frames at net_rx", _short_frames), ("10", "rate with all QPs", _all_qps), ("-", "simulator speed", _speed),
)  # fmt: skip


def run_bench(config: str, *, progress: Callable[[str], None] = lambda _text: None) -> list[Measurement]:
    """All rows of one configuration. Raises `BenchError` when a number could not be measured."""
    named_config(config)
    progress(f"{config}: building the model (cached after the first time)")
    usable = named_config(config).num_qps - 2
    found: list[Measurement] = []
    rig = _Rig(config, qps=min(16, usable), deep=64 if config == "tiny" else 512)
    try:
        for row, what, measure in _ROWS:
            progress(f"{config}: row {row}, {what}")
            try:
                found += measure(rig)
            except NotBuilt:
                found.append(Measurement(row, what, "", None, None))
                rig.close()  # the QP is in ERR
                rig = _Rig(config, qps=min(16, usable), deep=64 if config == "tiny" else 512)
    finally:
        rig.close()
    return sorted(found, key=lambda row: (not row.row.isdigit(), int(row.row) if row.row.isdigit() else 0))


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "cycles/s":
        return f"{value:,.0f}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"


def print_table(console: Console, config: str, rows: list[Measurement]) -> None:
    """The table of one configuration."""
    width = named_config(config).data_width
    table = Table(title=f"{config}: {width} bits; measured at the ports, cycles unless said", title_justify="left")
    for name in ("#", "what", "budget", "measured", ""):
        table.add_column(name, justify="right" if name in ("#", "measured") else "left", overflow="fold")
    for row in rows:
        style = {"ok": "green", "over": "red", "under": "red"}.get(row.verdict, "")
        budget = "" if row.budget is None else _number(row.budget, row.unit)
        if row.formula not in ("", budget):
            budget = f"{row.formula} = {budget}"
        table.add_row(row.row, row.what, budget, _number(row.measured, row.unit),
                      f"[{style}]{row.verdict}[/]" if style else row.verdict)  # fmt: skip
    console.print(table)


def write_json(path: Path, results: dict[str, list[Measurement]]) -> None:
    """All rows of all configurations as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {config: [asdict(row) | {"verdict": row.verdict} for row in rows] for config, rows in results.items()}
    path.write_text(json.dumps(document, indent=2) + "\n")
