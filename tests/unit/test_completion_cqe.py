"""CQE writer against a plain-Python model of CQ rings (rules.md 11)."""

from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest

from rnic.abi import CQ_CTX, CQE, CqeFlags, CtxTable, EventType, WcOpcode, WcStatus
from rnic.completion.cqe import CqeWriter
from rnic.config import CONFIGS, Params
from rnic.records import XlateStatus
from tests.rules import rule

from .responder_bench import Port, Sampler
from .streams import seeded, shared, simulate

PAGE = 4096


@dataclass
class Cq:
    cqn: int
    log_size: int
    start: int = 0  # producer counter at the beginning
    pages: list = field(default_factory=list)
    consumer: int = 0
    valid: int = 1
    eqn: int = 255
    wanted: list = field(default_factory=list)  # CQEs of the model
    seen: int = 0  # CQEs found in memory
    stamps: list = field(default_factory=list)


class CqBench:
    """Drives the writer; software polls each ring by phase, in memory order, and rings the consumer doorbell."""

    def __init__(self, config: str, rng, stall: float, cqs: list[Cq]):
        self.p, self.rng = Params(CONFIGS[config]), rng
        self.dut = d = shared(CqeWriter, self.p)
        self.cqs = {cq.cqn: cq for cq in cqs}
        self.memory = bytearray(16 * PAGE)
        free = list(range(1, 16))
        for cq in cqs:
            count = max(1, (32 << cq.log_size) // PAGE)
            cq.pages = [PAGE * free.pop(rng.randrange(len(free))) for _ in range(count)]
            # Not a CQE of the coming round: software clears the ring, or it holds the round before.
            old = ~(cq.start >> cq.log_size) & 1 ^ 1
            for i in range(1 << cq.log_size):
                ahead = i < cq.start % (1 << cq.log_size)
                self.memory[self.where(cq, i) + 31] = old ^ ahead if cq.start else 0
            cq.consumer = cq.start
        self.ports = {name: Port(stream, rng, stall, feeds=feeds) for name, stream, feeds in [
            ("cqe", d.cqe, True), ("doorbell", d.doorbell, True), ("ctx", d.ctx, True), ("answer", d.xlate.response, True),
            ("accepted", d.write.accepted, True), ("done", d.write.done, True), ("ask", d.xlate.request, False),
            ("write", d.write.command, False), ("data", d.write.data, False), ("cq_error", d.cq_error, False),
            ("event", d.event, False),
        ]}
        self.later: list = []
        self.commands: deque = deque()
        self.raw = b""
        self.bad_writes: set[int] = set()
        self.bad_pages: set[int] = set()
        self.errors: list[int] = []
        self.notified: list[tuple[int, int, int]] = []  # cycle, EQN, CQN of events
        self.done_cycles: list[int] = []
        self.overflows = 0
        self.found: dict[int, list] = defaultdict(list)
        self.polls = True
        self.written_probes: list = []
        self.times: list[int] = []
        self.done_delay = (1, 20)
        self.extra = None

    def where(self, cq: Cq, counter: int) -> int:
        at = 32 * (counter % (1 << cq.log_size))
        return cq.pages[at // PAGE] + at % PAGE

    def request(self, cqn: int, number: int) -> dict:
        rng = self.rng
        fields = {
            "qpn": rng.randrange(1 << 24), "wqe_counter": number & 0xFFFF, "opcode": rng.choice(list(WcOpcode)),
            "status": rng.choice(list(WcStatus)), "vendor_err": rng.randrange(15), "byte_len": rng.randrange(1 << 32),
            "imm": rng.randrange(1 << 32), "src_qp": rng.randrange(1 << 24), "flags": rng.randrange(16),
        }
        self.cqs[cqn].wanted.append({k: int(getattr(v, "value", v)) for k, v in fields.items()})
        return {"cqn": cqn, **fields}

    def react(self, name, item, cycle):
        if name == "ask":
            cq = self.cqs[int(item.key) - self.p.tpt_cq_base]
            assert item.ring == 1 and item.length == 32 and int(item.va) < 32 << cq.log_size
            page = cq.pages[int(item.va) // PAGE]
            bad = page in self.bad_pages
            self.later.append((cycle + self.rng.randint(1, 12), "answer", {
                "tag": int(item.tag), "status": XlateStatus.HOST_BUS if bad else XlateStatus.OK,
                "address": page + int(item.va) % PAGE, "span": 32}))
        elif name == "write":
            assert item.length == 32
            self.commands.append(int(item.address))
            self.times.append(cycle)
        elif name == "data":
            self.raw += int(item.data).to_bytes(self.p.lanes, "little")[: int(item.keep).bit_count()]
            assert item.last == (len(self.raw) % 32 == 0)
        elif name == "event":
            assert item.type == EventType.COMPLETION
            self.notified.append((cycle, int(item.eqn), int(item.id)))
        elif name == "cq_error":
            self.errors.append(int(item))
        while self.commands and len(self.raw) >= 32:
            address = self.commands.popleft()
            bad = address in self.bad_writes
            if not bad:
                self.memory[address : address + 32] = self.raw[:32]
            self.raw = self.raw[32:]
            self.ports["accepted"].queue.append(1)
            self.later.append((cycle + self.done_delay[0], "done", int(bad)))

    def poll(self):
        """What software sees: the next CQE of a ring is there when its phase is that of the round."""
        for cq in self.cqs.values():
            took = False
            while True:
                counter = (cq.start + cq.seen) % (1 << 24)
                raw = bytes(self.memory[self.where(cq, counter) : self.where(cq, counter) + 32])
                if (raw[31] & 1) != (~(counter >> cq.log_size) & 1):
                    break
                fields = CQE.unpack(raw)
                cq.stamps.append(fields.pop("stamp"))
                assert fields.pop("phase") == raw[31] & 1
                self.found[cq.cqn].append(fields)
                cq.seen += 1
                took = True
            if took and self.rng.random() < 0.5:
                cq.consumer = (cq.start + cq.seen) % (1 << 24)
                self.ports["doorbell"].queue.append({"id": cq.cqn, "counter": cq.consumer, "arm": 0})

    def run(self, requests, limit=4000, settle=120):
        d = self.dut
        names, ports = list(self.ports), list(self.ports.values())
        sampler = Sampler(self.ports, [d.overflow, d.probe])
        requests = deque(requests)

        async def bench(ctx):
            for cq in self.cqs.values():
                words = CQ_CTX.words(valid=cq.valid, log_size=cq.log_size, producer=cq.start, eqn=cq.eqn)
                rows = [(CtxTable.CQ, i, w) for i, w in enumerate(words)] + [(CtxTable.CQ_CONSUMER, 0, cq.consumer)]
                self.ports["ctx"].queue.extend(
                    {"table": t, "index": cq.cqn, "word": i, "bytes": 15, "data": w} for t, i, w in rows)
            still = cycle = 0
            while requests or still < settle:
                cycle += 1
                if cycle >= limit:
                    raise TimeoutError(f"{limit} cycles; queues {({n: len(q.queue) for n, q in self.ports.items()})}")
                ctx.set(d.cycle, cycle)
                if not self.ports["ctx"].queue and len(self.ports["cqe"].queue) < 3 and requests:
                    self.ports["cqe"].queue.append(requests.popleft())
                if self.polls and cycle % 7 == 0:
                    self.poll()
                for entry in [e for e in self.later if e[0] <= cycle]:
                    if entry[1] != "done" or entry is next(e for e in self.later if e[1] == "done"):
                        self.later.remove(entry)
                        self.ports[entry[1]].queue.append(entry[2])
                for port in ports:
                    port.drive(ctx)
                _, _, raw = await ctx.tick().sample(sampler.value)
                self.overflows += sampler.other(raw, 0)
                if sampler.other(raw, 1).valid:
                    self.written_probes.append(int(sampler.other(raw, 1).index))
                moved = False
                for i, (name, port) in enumerate(zip(names, ports, strict=True)):
                    if sampler.moved(raw, i):
                        port.settle(ctx)
                        moved = True
                        if name == "done":
                            self.done_cycles.append(cycle)
                        if not port.feeds:
                            self.react(name, sampler.payload(raw, i), cycle)
                still = 0 if moved or self.later else still + 1
            self.poll()

        simulate(d, bench, *([] if self.extra is None else [self.extra]), limit=None)


@rule("R-CQ-2", "R-CQ-3", "R-CQ-4", "R-CQ-9", "R-ERR-4", "R-CQ-6")
@pytest.mark.parametrize(("config", "stall", "seed"), [("tiny", 0.3, 1), ("hundred", 0.3, 2), ("tiny", 0.0, 3)])
def test_rings(config, stall, seed):
    """Several CQs, rings of one to many rounds, also over the wrap of the 24-bit counters: each CQE once, in order, whole."""
    rng = seeded(seed)
    cqs = [Cq(0, 5), Cq(1, 6, start=(1 << 24) - 13), Cq(3, 8, start=256 * 5 + 250), Cq(6, 5, start=32 * 3 + 7)]
    bench = CqBench(config, rng, stall, cqs)
    bench.run([bench.request(rng.choice(cqs).cqn, i) for i in range(150)])
    for cq in cqs:
        assert bench.found[cq.cqn] == cq.wanted and len(cq.wanted) > 20
        assert all(0 < a < b for a, b in zip(cq.stamps, cq.stamps[1:], strict=False))
    assert sorted(bench.written_probes) == list(range(150))
    assert bench.overflows == 0 and not bench.errors


@rule("R-CQ-6")
@pytest.mark.parametrize("start", [0, 5, (1 << 24) - 3])
def test_overflow(start):
    """A full ring: its full capacity is used, nothing is overwritten, the CQ is named once and swallows what follows; other
    CQs go on; a CQ that was never valid swallows too."""
    rng = seeded(start)
    cqs = [Cq(1, 2, start=start), Cq(2, 4), Cq(3, 3, valid=0)]
    bench = CqBench("tiny", rng, 0.2, cqs)
    bench.polls = False
    bench.run([bench.request(cqn, i) for i, cqn in enumerate([1, 2, 1, 3, 1, 1, 2, 1, 1, 2, 3, 1])])
    assert bench.found[1] == cqs[0].wanted[:4]
    assert bench.found[2] == cqs[1].wanted and len(cqs[1].wanted) == 3
    assert not bench.found[3]
    assert bench.errors == [1] and bench.overflows == 1


@rule("R-CQ-6")
@pytest.mark.parametrize("how", ["write", "translation"])
def test_failed_write(how):
    """A CQE that cannot be written puts its CQ in error, named once though several fail; other CQs go on."""
    rng = seeded(len(how))
    cqs = [Cq(1, 5), Cq(2, 5)]
    bench = CqBench("tiny", rng, 0.1, cqs)
    if how == "write":
        bench.bad_writes |= {bench.where(cqs[0], i) for i in (2, 3, 4)}
    else:
        bench.bad_pages.add(cqs[0].pages[0])
    bench.run([bench.request(1 + (i % 3 == 0), i) for i in range(30)])
    assert bench.found[2] == cqs[1].wanted and len(cqs[1].wanted) == 10
    assert bench.found[1] == (cqs[0].wanted[:2] if how == "write" else [])
    assert bench.errors == [1] and bench.overflows == 0


def test_rate():
    """At 512 bits one CQE at most every 8 cycles of one CQ, with translations and write responses hidden."""
    rng = seeded(7)
    cqs = [Cq(1, 7)]
    bench = CqBench("hundred", rng, 0.0, cqs)
    bench.done_delay = (100, 100)
    bench.run([bench.request(1, i) for i in range(60)])
    assert bench.found[1] == cqs[0].wanted
    spacing = (bench.times[-1] - bench.times[10]) / (len(bench.times) - 11)
    print(f"{spacing:.2f} cycles a CQE")
    assert spacing <= 6


def plain(bench, cqn, number, *, solicited=False, status=WcStatus.SUCCESS):
    """A CQE request whose flags and status are chosen."""
    request = bench.request(cqn, number)
    changes = {"flags": CqeFlags.SOLICITED if solicited else CqeFlags.WITH_IMM, "status": status}
    bench.cqs[cqn].wanted[-1] |= {name: int(value) for name, value in changes.items()}
    return request | changes


@rule("R-CQ-5")
def test_which_cqe_makes_an_event():
    """Armed for the next: the first. Armed for solicited: the first with SE or an error. Once each. Not without an EQ."""
    kinds = {"plain": {}, "se": {"solicited": True}, "error": {"status": WcStatus.WR_FLUSH_ERR}}
    for arm, cqes, events in ((0, ["plain", "se", "error"], 0), (1, ["plain", "plain"], 1), (1, ["error", "se"], 1),
                              (2, ["plain", "plain"], 0), (2, ["plain", "se", "se"], 1), (2, ["plain", "error", "se"], 1)):
        for eqn in (1, 255):
            bench = CqBench("tiny", seeded(20), 0.1, [Cq(2, 5, eqn=eqn)])
            bench.later.append((40, "doorbell", {"id": 2, "counter": 0, "arm": arm}))
            bench.later += [(200, "cqe", plain(bench, 2, i, **kinds[kind])) for i, kind in enumerate(cqes)]
            bench.run([])
            assert [event[1:] for event in bench.notified] == [(1, 2)] * (events if eqn == 1 else 0), (arm, cqes)
            assert bench.found[2] == bench.cqs[2].wanted


@rule("R-CQ-5")
def test_arming_while_a_cqe_is_written():
    """C95: at every distance between arming and write response: an event, unless the CQE was in memory when the doorbell was
    taken. Both occur; never an event before its CQE is in memory."""
    fired = set()
    for offset in range(0, 60):
        bench = CqBench("tiny", seeded(21), 0.0, [Cq(2, 5, eqn=0)])
        bench.later.append((60, "cqe", plain(bench, 2, 0)))
        bench.later.append((60 + offset, "doorbell", {"id": 2, "counter": 0, "arm": 1}))
        bench.run([])
        (done,) = bench.done_cycles
        taken = 60 + offset  # the doorbell is never held for long
        if bench.notified:
            assert len(bench.notified) == 1 and bench.notified[0][0] > done
        else:
            assert taken >= done
        fired.add(bool(bench.notified))
    assert fired == {True, False}


def test_mark_waits_for_what_was_under_way():
    """``marked`` comes after the write responses of all CQEs that had a place at the mark, and does not wait for later ones."""
    rng = seeded(22)
    bench = CqBench("tiny", rng, 0.0, [Cq(1, 7)])
    bench.done_delay = (150, 150)
    d = bench.dut
    seen = []

    async def marker(ctx):
        for cycle in range(700):
            ctx.set(d.mark, cycle == 150)
            _, _, marked = await ctx.tick().sample(d.marked)
            if marked:
                seen.append(cycle)

    bench.extra = marker
    bench.run([bench.request(1, i) for i in range(60)])
    issued = sum(cycle <= 150 for cycle in bench.times)
    (at,) = seen
    done = sum(cycle <= at for cycle in bench.done_cycles)
    assert issued > 4 and issued <= done <= issued + 8 < 60
