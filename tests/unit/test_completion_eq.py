"""Event queue writer against a plain-Python model of EQ rings (rules.md 16, design.md section 3)."""

from collections import deque

import pytest

from rnic.abi import EQ_CTX, EQE, EQE_BYTES, CtxTable, EventType
from rnic.completion.eq import EqWriter
from rnic.config import CONFIGS, Params
from rnic.records import XlateStatus
from tests.rules import rule

from .responder_bench import Port, Sampler
from .streams import seeded, shared, simulate

PAGE = 4096


class EqBench:
    """A host: memory, interrupts counted, an interrupt handler that takes EQEs by their phase and arms again."""

    def __init__(self, config, seed, stall, logs):
        self.p, self.rng = Params(CONFIGS[config]), seeded(seed)
        self.dut = d = shared(EqWriter, self.p)
        self.logs = logs  # EQN: log2 of the entries
        self.memory = bytearray(PAGE * (1 + self.p.num_eqs))
        self.ports = {name: Port(stream, self.rng, stall, feeds=feeds) for name, stream, feeds in [
            ("event", d.event, True), ("doorbell", d.doorbell, True), ("ctx", d.ctx, True), ("answer", d.xlate.response, True),
            ("accepted", d.write.accepted, True), ("done", d.write.done, True), ("ask", d.xlate.request, False),
            ("write", d.write.command, False), ("data", d.write.data, False),
        ]}
        self.later = []
        self.address, self.raw = None, b""
        self.fail_translation = self.fail_write = False
        self.irqs = {eqn: 0 for eqn in logs}
        self.consumer = {eqn: 0 for eqn in logs}
        self.found = {eqn: [] for eqn in logs}
        self.takes = True
        self.fatal = 0
        self.pending = deque()
        for eqn, log in logs.items():
            for i, word in enumerate(EQ_CTX.words(valid=1, log_size=log)):
                self.ports["ctx"].queue.append({"table": CtxTable.EQ, "index": eqn, "word": i, "bytes": 15, "data": word})

    def react(self, name, item, cycle):
        if name == "ask":
            eqn = int(item.key) - self.p.tpt_eq_base
            assert item.ring == 1 and item.length == EQE_BYTES and int(item.va) < EQE_BYTES << self.logs[eqn]
            status = XlateStatus.HOST_BUS if self.fail_translation else XlateStatus.OK
            self.later.append((cycle + self.rng.randint(1, 9), "answer", {
                "tag": int(item.tag), "status": status, "address": PAGE * (1 + eqn) + int(item.va), "span": EQE_BYTES}))
        elif name == "write":
            self.address = int(item.address)
        elif name == "data":
            self.raw += int(item.data).to_bytes(self.p.lanes, "little")[: int(item.keep).bit_count()]
            assert item.last == (len(self.raw) == EQE_BYTES)
        if self.address is not None and len(self.raw) == EQE_BYTES:
            if not self.fail_write:
                self.memory[self.address : self.address + EQE_BYTES] = self.raw
            self.ports["accepted"].queue.append(1)
            self.later.append((cycle + self.rng.randint(1, 15), "done", int(self.fail_write)))
            self.address, self.raw = None, b""

    def take(self, eqn):
        """The interrupt handler."""
        while True:
            counter, log = self.consumer[eqn], self.logs[eqn]
            at = PAGE * (1 + eqn) + EQE_BYTES * (counter % (1 << log))
            fields = EQE.unpack(bytes(self.memory[at : at + EQE_BYTES]))
            if fields["phase"] == counter >> log & 1:
                break
            self.found[eqn].append((EventType(fields["type"]), fields["id"]))
            assert fields["stamp"] > 0
            self.consumer[eqn] = counter + 1
        self.arm(eqn)

    def arm(self, eqn):
        # The first arming comes when the EQ exists.
        self.later.append((80, "doorbell", {"id": eqn, "counter": self.consumer[eqn], "arm": 2}))

    def run(self, events, *, gap=0, limit=6000, settle=150):
        d, events = self.dut, deque(events)
        names, ports = list(self.ports), list(self.ports.values())
        sampler = Sampler(self.ports, [d.eq_event, d.fatal])

        async def bench(ctx):
            still = cycle = 0
            while events or still < settle:
                cycle += 1
                assert cycle < limit, f"no end after {limit} cycles"
                ctx.set(d.cycle, cycle)
                if not self.ports["ctx"].queue and not self.ports["event"].queue and events and self.rng.random() >= gap:
                    self.ports["event"].queue.append(events.popleft())
                for entry in [e for e in self.later if e[0] <= cycle]:
                    self.later.remove(entry)
                    if entry[1] == "irq":
                        self.take(entry[2])
                    else:
                        self.ports[entry[1]].queue.append(entry[2])
                for port in ports:
                    port.drive(ctx)
                _, _, raw = await ctx.tick().sample(sampler.value)
                self.fatal |= sampler.other(raw, 1)
                for eqn in self.logs:
                    if sampler.other(raw, 0) >> eqn & 1:
                        self.irqs[eqn] += 1
                        if self.takes:
                            self.later.append((cycle + self.rng.randint(1, 60), "irq", eqn))
                moved = False
                for i, (name, port) in enumerate(zip(names, ports, strict=True)):
                    if sampler.moved(raw, i):
                        port.settle(ctx)
                        moved = True
                        if not port.feeds:
                            self.react(name, sampler.payload(raw, i), cycle)
                still = 0 if moved or self.later else still + 1

        simulate(d, bench, limit=None)


def event(eqn, number, kind=EventType.COMPLETION):
    return {"eqn": eqn, "type": kind, "id": number}


@rule("R-EVT-1")
@pytest.mark.parametrize(("config", "stall", "gap"), [("tiny", 0.3, 0.96), ("hundred", 0.3, 0.96), ("tiny", 0.0, 0.98)])
def test_no_event_is_lost(config, stall, gap):
    """Two EQs over several rounds, events at random distances from the handler's arming: each EQE once, in order, and never one
    left in the ring without an interrupt."""
    bench = EqBench(config, 5, stall, {0: 4, 1: 3})
    bench.arm(0)
    bench.arm(1)
    kinds = [k for k in EventType if k != EventType.NONE]
    wanted = [(bench.rng.randrange(2), bench.rng.choice(kinds), bench.rng.randrange(1 << 24)) for _ in range(70)]
    bench.run([event(eqn, number, kind) for eqn, kind, number in wanted], gap=gap, limit=9000)
    assert not bench.fatal
    for eqn in bench.logs:
        mine = [(kind, number) for n, kind, number in wanted if n == eqn]
        assert bench.found[eqn] == mine and len(mine) > 20
        assert 5 < bench.irqs[eqn] <= len(mine)


def test_one_interrupt_for_an_arming():
    """Not armed: no interrupt. Armed with EQEs unread: at once, and once."""
    bench = EqBench("tiny", 6, 0.2, {0: 4})
    bench.takes = False
    bench.run([event(0, n) for n in range(3)])
    assert bench.irqs[0] == 0
    bench = EqBench("tiny", 7, 0.2, {0: 4})
    bench.takes = False
    bench.later += [(400, "doorbell", {"id": 0, "counter": 0, "arm": 2}), (500, "doorbell", {"id": 0, "counter": 3, "arm": 2}),
                    (550, "doorbell", {"id": 0, "counter": 2, "arm": 0})]
    bench.run([event(0, n) for n in range(3)])
    assert bench.irqs[0] == 1


def test_full_ring_is_fatal():
    """The full capacity is used, nothing is overwritten, what does not fit sets ``fatal``."""
    for count in (4, 5):
        bench = EqBench("tiny", 8, 0.1, {0: 2})
        bench.takes = False
        bench.run([event(0, 100 + n) for n in range(count)])
        assert bench.fatal == (count == 5)
        bench.take(0)
        assert [number for _, number in bench.found[0]] == [100, 101, 102, 103]


@pytest.mark.parametrize("how", ["fail_translation", "fail_write"])
def test_failed_write_is_fatal(how):
    bench = EqBench("tiny", 9, 0.1, {0: 4, 1: 4})
    setattr(bench, how, True)
    bench.arm(0)
    bench.run([event(0, 1)])
    assert bench.fatal and bench.irqs[0] == 0


def test_event_of_no_queue_vanishes():
    bench = EqBench("tiny", 10, 0.0, {0: 4})
    bench.arm(0)
    bench.run([event(1, 1), event(0, 2), event(1, 3)])
    assert not bench.fatal and bench.found[0] == [(EventType.COMPLETION, 2)]
