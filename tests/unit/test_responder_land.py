"""Landings: data of own READs and ATOMICs through the responder's data mover, next to inbound requests."""

from collections import defaultdict

import pytest
from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.abi import Access, VendorError, WcStatus
from rnic.config import CONFIGS, Params
from rnic.records import LandTag, XlateStatus
from rnic.responder.source import PayloadPlace, PayloadSource
from rnic.stream.beat import Beat
from rnic.stream.packet_store import PacketHandle, PacketStore
from rnic.wire.opcode import Kind
from tests.rules import rule
from tests.unit.responder_bench import Bench, Packet, Port, rc
from tests.unit.streams import recv, recv_packet, seeded, send, send_packets, simulate

VENDOR = {XlateStatus.KEY: VendorError.KEY_INVALID, XlateStatus.PD: VendorError.KEY_PD,
          XlateStatus.RIGHTS: VendorError.KEY_RIGHTS, XlateStatus.BOUNDS: VendorError.KEY_BOUNDS}  # fmt: skip
BASE = 0x7000_0000_0000 - 60  # a page border close to the start


class LandBench(Bench):
    """`Bench` with the completer's two streams. ``expected``: results in order of the landings."""

    def __init__(self, config, rng, **more):
        super().__init__(config, rng, **more)
        stall = self.ports["request"].stall
        self.ports["land"] = Port(self.dut.land, rng, stall, feeds=True)
        self.ports["landed"] = Port(self.dut.landed, rng, stall, feeds=False)
        self.expected, self.results = [], []

    def land(self, qpn, payload, sges, offset=0, *, index=0, tag=LandTag.LAST, value=None):
        """A landing of ``payload`` at byte ``offset`` of a message to ``sges`` (address, length, key)."""
        qp, head = self.qps[qpn], 0
        if payload and value is None:
            head = self.rng.choice([c for c in range(self.p.rx_cells) if c not in self.cells])
            self.cells[head] = payload
        pieces, left, at = [], len(payload), offset
        for address, length, key in sges:
            take = min(left, max(0, length - at))
            if take:
                pieces.append((key, address + at, take))
            left, at = left - take, max(0, at - length)
        assert not left
        bad = [s for key, va, n in pieces if (s := self.world.check(key, qp.pd, Access.LOCAL_WRITE, va, n, 0)) != XlateStatus.OK]
        targets = [] if bad else [t for piece in pieces for t in self.world.virtual(*piece)]
        for target, byte in zip(targets, payload, strict=False):
            self.model.memory[target] = byte
        status = (WcStatus.LOC_PROT_ERR, VENDOR[bad[0]]) if bad else (WcStatus.SUCCESS, VendorError.NONE)
        if self.bad_writes & set(targets):
            status = (WcStatus.LOC_QP_OP_ERR, VendorError.HOST_BUS)
        self.expected.append((qpn, index, tag, *status))
        self.ports["land"].queue.append({
            "qpn": qpn, "tag": tag, "psn": 5, "pd": qp.pd, "index": index, "head": head, "length": len(payload), "offset": offset,
            "immediate": int(value is not None), "value": value or 0,
            "sges": [{"addr": a, "length": n, "lkey": k} for a, n, k in sges]})  # fmt: skip

    def react(self, name, item):
        if name == "landed":
            self.results.append((int(item.qpn), int(item.index), item.tag, item.status, item.vendor_err))
        super().react(name, item)

    def finish(self):
        self.compare()
        assert self.results == self.expected


def regions(bench, qpn):
    """Two regions of a QP and one that only reads: keys 0x100 * QP + 1, 2, 3."""
    qp = bench.qps[qpn]
    for n, rights in ((1, Access.LOCAL_WRITE), (2, Access.LOCAL_WRITE | Access.REMOTE_WRITE), (3, 0)):
        bench.world.region(0x100 * qpn + n, qp.pd, int(rights), BASE + (n << 24), 9000)
    return {n: (BASE + (n << 24), 0x100 * qpn + n) for n in (1, 2, 3)}


@rule("R-AT-2", "R-MR-4", "R-MR-5", "R-WQ-4", "R-ORD-5")
@pytest.mark.parametrize("name,max_sge,seed", [
    ("tiny", 4, 1), ("hundred", 4, 2), ("tiny", 6, 3), ("hundred", 6, 4), ("tiny", 1, 5),
])  # fmt: skip
def test_landings_next_to_requests(name, max_sge, seed):
    """Random SGE lists, offsets and page borders, ATOMIC values, empty jobs, next to inbound WRITEs of the same QPs."""
    rng = seeded(seed)
    bench = LandBench(CONFIGS[name].replace(num_qps=8, max_sge=max_sge, rx_cells=80), rng, num_qps=2)
    places = {n: regions(bench, n) for n in bench.qps}
    actions, used = [], defaultdict(int)

    def one(n, k):
        def act(b):
            (base, key), total = places[n][1], rng.choice([64, 300, 1000])
            start, cuts = used[n], sorted(rng.randint(0, total) for _ in range(max_sge - 1))
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
            sges = [(base + start + at, size, key) if size else (rng.getrandbits(60), 0, 0xBAD)
                    for at, size in zip([0, *cuts], sizes, strict=True)]  # fmt: skip
            used[n] += total
            kind = rng.random()
            if kind < 0.2:
                b.land(n, b"", [], index=k, tag=rng.choice([LandTag.FLUSH, LandTag.SWEEP, LandTag.LAST]))
            elif kind < 0.4:
                value = rng.getrandbits(64)
                b.land(n, value.to_bytes(8, "little"), [(base + start + 3, 8, key)], index=k, value=value)
            else:
                offset = rng.randint(0, total - 1)
                length = rng.randint(1, min(256, total - offset))
                b.land(n, rng.randbytes(length), sges, offset, index=k, tag=rng.choice([LandTag.PART, LandTag.LAST]))
        return act

    for k in range(30):
        n = rng.choice(list(bench.qps))
        qp = bench.qps[n]
        if used[n] < 8000 and sum(a[0] == "call" for a in actions if not isinstance(a, Packet)) < 8 + k:
            actions.append(("call", one(n, k)))
        if rng.random() < 0.5:
            payload = rng.randbytes(rng.randint(1, 200))
            base, key = places[n][2]
            psn = qp.epsn + sum(isinstance(a, Packet) and a.qpn == n for a in actions) & 0xFFFFFF
            actions.append(Packet(n, rc(Kind.WRITE), psn, payload, base + rng.randint(0, 8000), key, len(payload)))
    bench.run(actions, limit=8000)
    bench.finish()
    assert len(bench.results) >= 20 and sum(len(a) for a in bench.acks.values()) > 5


@rule("R-RSP-8")
@pytest.mark.parametrize("name", ["tiny", "hundred"])
def test_failing_landings(name):
    """Each check has its vendor code; a write error is HOST_BUS; inbound requests of the QP go on, cells are freed."""
    rng = seeded(9)
    bench = LandBench(CONFIGS[name].replace(num_qps=8), rng, num_qps=2)
    places = {n: regions(bench, n) for n in bench.qps}
    (base, key), (_, other) = places[2][1], places[3][1]
    read_only, data = places[2][3], rng.randbytes(100)
    bench.bad_writes = set(bench.world.virtual(key, base + 8500, 1))

    def act(b):
        b.land(2, data, [(base, 200, key)], 100, index=1)
        b.land(2, data, [(base, 50, key), (base + 500, 50, 0xBAD00)], index=2)
        b.land(2, data, [(base, 100, other)], index=3)
        b.land(2, data, [(read_only[0], 100, read_only[1])], index=4)
        b.land(2, data, [(base + 8950, 100, key)], index=5)
        b.land(2, bytes(8), [(base + 8999, 8, key)], index=6, value=0)
        b.land(2, data, [(base + 8420, 100, key)], index=7)
        b.land(2, data, [(base + 2000, 100, key)], index=8)
        b.land(3, data, [(places[3][1][0], 100, other)], index=9)

    payload = rng.randbytes(50)
    at, write_key = places[2][2]
    bench.run([("call", act), ("wait", 200), Packet(2, rc(Kind.WRITE), bench.qps[2].epsn, payload, at, write_key, 50)])
    bench.finish()
    assert [r[4] for r in bench.results] == [
        VendorError.NONE, VendorError.KEY_INVALID, VendorError.KEY_PD, VendorError.KEY_RIGHTS, VendorError.KEY_BOUNDS,
        VendorError.KEY_BOUNDS, VendorError.HOST_BUS, VendorError.NONE, VendorError.NONE,
    ]  # fmt: skip
    assert not bench.errors and bench.error_drop == 0


def test_a_dead_qp_still_lands():
    """The mark that drops a QP's inbound requests does not concern its own READs."""
    rng = seeded(4)
    bench = LandBench(CONFIGS["tiny"], rng, num_qps=1)
    places = regions(bench, 2)
    base, key = places[1]
    bad = Packet(2, rc(Kind.WRITE), bench.qps[2].epsn, b"abc", base, 0xBAD00, 3)
    late = Packet(2, rc(Kind.WRITE), bench.qps[2].epsn + 1 & 0xFFFFFF, b"abc", base, 0xBAD00, 3)
    bench.run([bad, late, ("call", lambda b: b.land(2, b"hello", [(base, 5, key)])), ("wait", 100)])
    bench.finish()
    assert bench.results[0][3] == WcStatus.SUCCESS and bench.errors == [2]


class StoreAndSource(wiring.Component):
    """Wires only."""

    def __init__(self, p):
        self.p = p
        super().__init__({
            "i": In(stream.Signature(PayloadPlace(p))), "o": Out(stream.Signature(Beat(p.data_width))),
            "packet": In(stream.Signature(Beat(p.data_width))), "handle": Out(stream.Signature(PacketHandle(p.rx_cells))),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        m.submodules.store = store = PacketStore(self.p.data_width, self.p.rx_cells)
        m.submodules.source = source = PayloadSource(self.p)
        for a, b in ((wiring.flipped(self.packet), store.i), (store.handle, wiring.flipped(self.handle)),
                     (wiring.flipped(self.i), source.i), (source.o, wiring.flipped(self.o)), (source.store_read, store.read),
                     (store.o, source.store_data)):  # fmt: skip
            wiring.connect(m, a, b)
        return m


@rule("R-AT-2")
@pytest.mark.parametrize("name,stall", [("tiny", 0.3), ("hundred", 0.0), ("hundred", 0.3)])
def test_source_with_the_packet_store(name, stall):
    """Stored packets and values in any order, behind the store that takes a command with the packet's last word."""
    rng = seeded(1)
    p = Params(CONFIGS[name])
    dut = StoreAndSource(p)
    packets = [rng.randbytes(rng.choice([1, 8, 64, 300, 1000])) for _ in range(8)]
    wanted = []

    async def feed(ctx):
        await ctx.tick().repeat(p.rx_cells + 8)
        await send_packets(ctx, dut.packet, packets, p.data_width)

    async def ask(ctx):
        for packet in packets:
            head = int((await recv(ctx, dut.handle, 1))[0].head)
            for _ in range(rng.choice([0, 1, 3])):
                value = rng.getrandbits(64)
                wanted.append(value.to_bytes(8, "little"))
                await send(ctx, dut.i, [{"immediate": 1, "value": value, "length": 8}], rng, stall)
            wanted.append(packet)
            await send(ctx, dut.i, [{"head": head, "length": len(packet)}], rng, stall)

    async def take(ctx):
        got = []
        while len([g for g in got if g in packets]) < len(packets):
            got.append((await recv_packet(ctx, dut.o, rng, stall))[0])
        assert got == wanted

    simulate(dut, feed, ask, take, limit=4000)
