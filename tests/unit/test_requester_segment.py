"""Segmenter (and WqeDecoder) against a Python model of segmentation."""

import dataclasses
import random
from collections import defaultdict

import pytest

from rnic.abi import (
    REQUESTER_CFG,
    REQUESTER_HOT,
    SEND_WQE,
    SGE,
    CtxTable,
    QpState,
    QpType,
    SendFlags,
    VendorError,
    WcStatus,
    WqeOpcode,
)
from rnic.config import CONFIGS, Params
from rnic.records import ProbeEvent
from rnic.requester.segment import Segmenter
from tests.rules import rule
from tests.unit.requester import ctx_words, ctx_write, offer, read_port
from tests.unit.streams import packet_of, seeded, shared, simulate

Op, St, Ve = WqeOpcode, WcStatus, VendorError
SEND_OPS = (Op.SEND, Op.SEND_IMM, Op.SEND_INV)
LAST_CODE = {Op.SEND: 0x02, Op.SEND_IMM: 0x03, Op.SEND_INV: 0x16, Op.WRITE: 0x08, Op.WRITE_IMM: 0x09}
ONLY_CODE = {Op.SEND: 0x04, Op.SEND_IMM: 0x05, Op.SEND_INV: 0x17, Op.WRITE: 0x0A, Op.WRITE_IMM: 0x0B}


@dataclasses.dataclass
class Wr:
    """A work request as the model sees it; ``error``: (status, vendor) it must fail with."""

    opcode: int = Op.WRITE
    sges: list = dataclasses.field(default_factory=list)  # (addr, length, lkey)
    inline: bytes | None = None
    flags: int = 0
    imm: int = 0
    remote: int = 0
    rkey: int = 0
    length: int | None = None  # as written in the WQE
    num_sge: int | None = None
    fetch_error: int = 0
    error: tuple | None = None

    def size(self):
        if self.length is not None:
            return self.length
        return len(self.inline) if self.inline is not None else sum(s[1] for s in self.sges)

    def pack(self):
        flags = self.flags | (SendFlags.INLINE if self.inline is not None else 0)
        head = SEND_WQE.pack(opcode=self.opcode, flags=flags, num_sge=len(self.sges) if self.num_sge is None else self.num_sge,
                             length=self.size(), imm=self.imm, remote_addr=self.remote, rkey=self.rkey)[:32]  # fmt: skip
        body = self.inline if self.inline is not None else b"".join(
            SGE.pack(addr=a, length=n, lkey=k) for a, n, k in self.sges)
        return int.from_bytes(head + body, "little")


@dataclasses.dataclass
class Sq:
    """A send queue: work requests from counter ``start`` on, and what was fetched."""

    wrs: list
    mtu: int = 1
    psn: int = 0
    start: int = 0
    wide: int = 1
    sig_all: int = 0
    pd: int = 7
    state: int = QpState.RTS
    type: int = QpType.RC
    position: int = 0
    epoch: int = 0

    def index(self, k):
        return self.start + k & 0xFFFF

    def packets(self):
        """(jobs, outstanding entries, failure) this queue must give; a job is (fields, payload)."""
        pmtu, psn, jobs, entries = 128 << self.mtu, self.psn, [], []
        for k, wr in enumerate(self.wrs):
            index, size = self.index(k), wr.size()
            signaled = int(bool(wr.flags & SendFlags.SIGNALED or self.sig_all))
            if wr.error:
                entries.append((index, psn, psn, None, None, None))
                return jobs, entries, (index, *wr.error)
            count = max(1, -(-size // pmtu))
            entries.append((index, psn, psn + count - 1 & 0xFFFFFF, int(wr.opcode), signaled, size))
            stream = [(a + i, k) for a, n, k in wr.sges for i in range(n)] if wr.inline is None else list(wr.inline)
            for n in range(count):
                first, last = n == 0, n == count - 1
                kind = 0 if wr.opcode in SEND_OPS else 6
                code = (ONLY_CODE if first else LAST_CODE)[wr.opcode] if last else kind + (0 if first else 1)
                payload = stream[n * pmtu : (n + 1) * pmtu]
                can_solicit = wr.opcode != Op.WRITE
                jobs.append(({
                    "opcode": code, "psn": psn, "solicited": int(last and can_solicit and bool(wr.flags & SendFlags.SOLICITED)),
                    "ackreq": int(last or n % 64 == 63), "length": len(payload), "va": wr.remote, "rkey": wr.rkey,
                    "dma_length": size, "imm": wr.imm, "pd": self.pd, "wqe_index": index,
                    "inline": int(wr.inline is not None)}, payload))  # fmt: skip
                psn = psn + 1 & 0xFFFFFF
        return jobs, entries, None


class Bench:
    """Feeds queues as scheduler and fetch would (rewinds obeyed), collects packets per QP."""

    def __init__(self, dut, p, queues, rng, stall=0.0):
        self.dut, self.p, self.queues, self.rng, self.stall = dut, p, queues, rng, stall
        self.jobs = []
        self.segments, self.beats, self.entries, self.failures, self.rewinds = [], [], defaultdict(list), [], []
        self.probes, self.set_up_done, self.order, self.times = [], False, [], []
        self.una = defaultdict(int)
        self.offered = 0
        self.rd_limit, self.started, self.table, self.hold_rewind = 0, defaultdict(int), [], False
        self.landed = lambda n: 0

    async def set_up(self, ctx):
        for n, q in self.queues.items():
            await ctx_words(ctx, self.dut, CtxTable.REQUESTER_CFG, n, REQUESTER_CFG.words(
                state=q.state, type=q.type, path_mtu=q.mtu, log_sq=6, pd=q.pd, log_stride=6 + q.wide, sig_all=q.sig_all,
                max_rd_atomic=self.rd_limit))
            await ctx_words(ctx, self.dut, CtxTable.REQUESTER_HOT, n, REQUESTER_HOT.words(psn=q.psn, send_index=q.start))
            self.una[n] = q.psn
        self.set_up_done = True

    def fetched(self, n, k, epoch=None):
        q = self.queues[n]
        wr = q.wrs[k]
        return {"qpn": n, "index": q.index(k), "epoch": q.epoch if epoch is None else epoch, "error": wr.fetch_error,
                "wqe": wr.pack()}  # fmt: skip

    async def feed(self, ctx):
        await self.set_up(ctx)
        idle = jobs = 0
        while idle < 80:
            todo = [n for n, q in self.queues.items() if q.position < len(q.wrs)]
            if not todo or self.rng.random() < self.stall:
                await ctx.tick()
                busy = todo or len(self.jobs) != jobs
                idle, jobs = 0 if busy else idle + 1, len(self.jobs)
                continue
            n = self.rng.choice(todo)
            q = self.queues[n]
            k = q.position
            q.position += 1
            idle = 0
            self.offered += 1
            await offer(ctx, self.dut.wqe, self.fetched(n, k))

    async def watch(self, ctx):
        """All outputs, with random stalls, until cancelled with the simulation (background)."""
        dut = self.dut
        ports = [dut.job, dut.segment, dut.inline, dut.rewind, dut.failure]
        cycle = 0
        sampled = [s for port in ports for s in (port.valid, port.ready, port.payload)]
        others = [dut.remember_en, dut.remember_index, dut.remember_data, dut.probe, dut.probe_wqe, dut.read_en, dut.read_index,
                  dut.read_data]  # fmt: skip
        async for _, _, *got in ctx.tick().sample(*sampled, *others):
            cycle += 1
            sinks = [self.jobs, self.segments, self.beats, self.rewinds, self.failures]
            for i, sink in enumerate(sinks):
                valid, ready, payload = got[3 * i : 3 * i + 3]
                if valid and ready:
                    sink.append(payload)
                    if sink is self.rewinds:
                        q = self.queues[int(payload.qpn)]
                        q.position = int(payload.index) - q.start & 0xFFFF
                        q.epoch = int(payload.epoch)
                    if sink is self.jobs:
                        self.times.append(cycle)
            for port in ports:
                ctx.set(port.ready, self.rng.random() >= self.stall and not (port is dut.rewind and self.hold_rewind))
            en, index, entry, *probes, read_en, read_index, read = got[15:]
            if read_en:
                self.table.append((int(read_index), read))
                self.started[int(read_index) // self.p.max_rd_atomic] += 1
            if en:
                self.entries[int(index)].append(entry)
            self.probes += [probe for probe in probes if probe.valid]

    def packets(self):
        """Jobs with their payload, per QP, from the three streams."""
        out = defaultdict(list)
        segments, beats = iter(self.segments), iter(self.beats)
        for job in self.jobs:
            h = job.header
            fields = {f: int(getattr(h, f)) for f in
                      ("opcode", "psn", "solicited", "ackreq", "length", "va", "rkey", "dma_length", "imm")}  # fmt: skip
            fields |= {"pd": int(job.pd), "wqe_index": int(job.wqe_index), "inline": int(job.inline)}
            payload = []
            if job.inline and h.length:
                packet = []
                while not packet or not packet[-1].last:
                    packet.append(next(beats))
                payload = list(packet_of(packet))
            elif h.length:
                last = False
                while not last:
                    s = next(segments)
                    assert s.length > 0
                    payload += [(int(s.va) + i, int(s.lkey)) for i in range(s.length)]
                    last = s.last
            out[int(h.qpn)].append((fields, payload))
        assert next(segments, None) is None and next(beats, None) is None
        return out

    def check(self):
        got = self.packets()
        for n, q in self.queues.items():
            jobs, entries, failure = q.packets()
            assert [j[0] for j in got[n]] == [j[0] for j in jobs], f"QP {n}"
            for (fields, payload), (_, expected) in zip(got[n], jobs, strict=True):
                assert payload == expected, f"QP {n} PSN {fields['psn']}"
            reported = [(int(f.wqe_index), f.status, f.vendor_err) for f in self.failures if f.qpn == n]
            assert reported == ([failure] if failure else []), f"QP {n}"
            for index, first, last, opcode, signaled, size in entries[-self.p.sq_outstanding :]:
                entry = self.entries[n * self.p.sq_outstanding + index % self.p.sq_outstanding][-1]
                assert (entry.first_psn, entry.last_psn) == (first, last)
                if opcode is not None:
                    assert (entry.opcode, entry.signaled, entry.length) == (opcode, signaled, size)

    def run(self, *more, limit=6000):
        self.run_only(self.feed, *more, limit=limit)

    def run_only(self, *benches, limit=6000):
        """Without the feed."""
        dut = self.dut
        una = read_port(dut.una_addr, [(dut.una, lambda n: self.una[n]), (dut.landed, lambda n: self.landed(n) & 0xFF)])
        simulate(dut, *benches, background=[self.watch, una], limit=limit)


def random_sges(rng, total, count):
    cuts = sorted(rng.randint(0, total) for _ in range(count - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return [(rng.getrandbits(48), n, rng.getrandbits(32)) for n in sizes]


def random_wr(rng, p, pmtu, wide, *, longest=5):
    most = min(p.max_sge, 6 if wide else 2)
    flags = rng.choice([0, SendFlags.SIGNALED]) | rng.choice([0, SendFlags.SOLICITED])
    wr = Wr(opcode=rng.choice(list(ONLY_CODE)), flags=flags, imm=rng.getrandbits(32), remote=rng.getrandbits(64),
            rkey=rng.getrandbits(32))  # fmt: skip
    kind = rng.random()
    if kind < 0.2:
        wr.inline = rng.randbytes(rng.choice([0, 1, 31, 32, rng.randint(0, 96 if wide else 32), 96 if wide else 32]))
    elif kind < 0.3:
        wr.sges = rng.choice([[], [(1, 0, 0)] * most])
    else:
        size = rng.choice([1, pmtu - 1, pmtu, pmtu + 1, 2 * pmtu, rng.randint(1, longest * pmtu)])
        wr.sges = random_sges(rng, size, rng.randint(1, most))
    return wr


@rule("R-REQ-1", "R-REQ-2", "R-REQ-3", "R-PSN-3", "R-WQ-4", "R-WQ-5", "R-CQ-1")
@pytest.mark.parametrize("name,max_sge,seed,stall", [
    ("tiny", 4, 1, 0.2), ("tiny", 6, 2, 0.0), ("hundred", 4, 3, 0.2), ("hundred", 6, 4, 0.3), ("tiny", 1, 5, 0.2),
])  # fmt: skip
def test_messages(name, max_sge, seed, stall):
    """Several QPs interleaved, all sizes and SGE splits, PSN and WQE counters that wrap; a small quantum makes turns."""
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=8, max_sge=max_sge))
    dut = Segmenter(p, quantum=512)
    queues = {}
    for n in rng.sample(range(8), 4):
        mtu, wide = rng.choice([1, 1, 2, 3]), rng.randrange(2)
        queues[n] = Sq([random_wr(rng, p, 128 << mtu, wide) for _ in range(10)], mtu=mtu, wide=wide,
                       psn=rng.choice([0, 0xFFFFFA]), start=rng.choice([0, 0xFFFC]), sig_all=rng.randrange(2))  # fmt: skip
    bench = Bench(dut, p, queues, rng, stall)
    bench.run()
    bench.check()
    assert bench.rewinds
    made = [probe for probe in bench.probes if probe.event == ProbeEvent.PACKET_MADE]
    assert [(int(x.qpn), int(x.psn)) for x in made] == [(int(j.header.qpn), int(j.header.psn)) for j in bench.jobs]
    parsed = [probe for probe in bench.probes if probe.event == ProbeEvent.WQE_PARSED]
    assert len(parsed) == 40


@rule("R-REQ-2")
@pytest.mark.parametrize("name", ["tiny", "hundred"])
def test_long_message_asks_for_acks(name):
    p = Params(CONFIGS[name].replace(num_qps=2))
    dut = shared(Segmenter, p)
    queues = {1: Sq([Wr(sges=[(0x1000, 70 * 256 + 3, 9)])], psn=0xFFFFF0)}
    bench = Bench(dut, p, queues, seeded(1))

    async def alone(ctx):
        ctx.set(dut.alone, 1)
        ctx.set(dut.alone_qpn, 1)

    bench.run(alone)
    bench.check()
    assert len(bench.jobs) == 71 and not bench.rewinds
    assert [n for n, job in enumerate(bench.jobs) if job.header.ackreq] == [63, 70]


GOOD = Wr(opcode=Op.SEND, sges=[(0x100, 20, 1)], flags=SendFlags.SIGNALED)
BAD = {
    "opcode": Wr(opcode=77, error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_OPCODE)),
    "too long": Wr(sges=[(0, 0x8000_0000, 1), (0, 1, 1)], error=(St.LOC_LEN_ERR, Ve.BAD_WQE_LENGTH)),
    "sum short": Wr(sges=[(0, 10, 1)], length=11, error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)),
    "sum wraps": Wr(sges=[(0, 0xFFFF_FFFF, 1), (0, 6, 1)], length=5, error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)),
    "sge count": Wr(num_sge=5, length=0, error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)),
    "inline": Wr(inline=bytes(97), error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)),
    "fetch": Wr(fetch_error=1, error=(St.LOC_QP_OP_ERR, Ve.HOST_BUS)),
}


@rule("R-WQ-7", "R-LEN-2", "R-ERR-7")
@pytest.mark.parametrize("what", list(BAD))
@pytest.mark.parametrize("name", ["tiny", "hundred"])
def test_bad_wqe_stops_its_qp_only(name, what):
    """R-ERR-7: nothing of later WQEs leaves; other QPs go on; a write of REQUESTER_HOT word 0 starts the QP again."""
    p = Params(CONFIGS[name].replace(num_qps=4))
    dut = shared(Segmenter, p)
    status, _ = BAD[what].error or (None, None)
    queues = {1: Sq([GOOD, BAD[what], GOOD, GOOD], psn=5), 2: Sq([GOOD] * 6)}
    bench = Bench(dut, p, queues, seeded(7), 0.1)

    async def again(ctx):
        while not (bench.set_up_done and all(q.position == len(q.wrs) for q in queues.values())):
            await ctx.tick()
        await ctx.tick().repeat(40)
        bench.check()
        failed = [probe for probe in bench.probes if probe.event == ProbeEvent.LOCAL_FAILED]
        assert [(int(x.qpn), int(x.index), int(x.opcode)) for x in failed] == [(1, 1, status)]
        await ctx_words(ctx, dut, CtxTable.REQUESTER_HOT, 1, REQUESTER_HOT.words(psn=100, send_index=0))
        before = len(bench.jobs)
        await offer(ctx, dut.wqe, bench.fetched(1, 0))
        await ctx.tick().repeat(30)
        assert [int(j.header.psn) for j in bench.jobs[before:]] == [100]

    bench.run(again)


@rule("R-WQ-7")
@pytest.mark.parametrize("type,opcode", [
    (QpType.RC, Op.READ), (QpType.RC, Op.CMP_SWAP), (QpType.RC, Op.FETCH_ADD), (QpType.RC, Op.LOCAL_INV), (QpType.RC, Op.BIND_MW),
    (QpType.UC, Op.READ), (QpType.UD, Op.WRITE),
])  # fmt: skip
def test_operations_not_carried_out(type, opcode):
    p = Params(CONFIGS["tiny"])
    dut = shared(Segmenter, p)
    queues = {1: Sq([Wr(opcode=opcode, error=(St.LOC_QP_OP_ERR, Ve.BAD_WQE_OPCODE))], type=type)}
    bench = Bench(dut, p, queues, seeded(1))
    bench.run()
    bench.check()


def test_wqes_of_another_epoch_or_place_are_thrown_away():
    p = Params(CONFIGS["tiny"])
    dut = shared(Segmenter, p)
    queues = {n: Sq([GOOD, GOOD], state=s) for n, s in ((1, QpState.RTS), (2, QpState.ERR), (3, QpState.RESET))}
    bench = Bench(dut, p, queues, seeded(1))

    async def main(ctx):
        await bench.set_up(ctx)
        for k, epoch in ((0, 1), (1, 0), (0, 0), (0, 0), (1, 255), (1, 0)):
            await offer(ctx, dut.wqe, bench.fetched(1, k, epoch))
            for n in (2, 3):
                await offer(ctx, dut.wqe, bench.fetched(n, k, epoch))
        await ctx.tick().repeat(40)
        assert [(int(j.header.qpn), int(j.wqe_index)) for j in bench.jobs] == [(1, 0), (1, 1)]
        assert not bench.rewinds and not bench.failures

    simulate(dut, main, background=[bench.watch])


@rule("R-QP-3")
def test_sqd_puts_wqes_back():
    """R-QP-3: a WQE not begun is rewound in SQD and sent after the QP is back in RTS."""
    p = Params(CONFIGS["tiny"])
    dut = shared(Segmenter, p)
    queues = {1: Sq([GOOD, GOOD, GOOD])}
    bench = Bench(dut, p, queues, seeded(1))

    async def main(ctx):
        await bench.set_up(ctx)
        await offer(ctx, dut.wqe, bench.fetched(1, 0))
        await ctx.tick().repeat(20)
        await ctx_write(ctx, dut, CtxTable.REQUESTER_CFG, 1, 0, QpState.SQD, mask=1)
        await offer(ctx, dut.wqe, bench.fetched(1, 1))
        await offer(ctx, dut.wqe, bench.fetched(1, 2))
        await ctx.tick().repeat(30)
        assert len(bench.jobs) == 1
        assert [(int(r.index), int(r.epoch)) for r in bench.rewinds] == [(1, 1)]
        await ctx_write(ctx, dut, CtxTable.REQUESTER_CFG, 1, 0, QpState.RTS, mask=1)
        await offer(ctx, dut.wqe, bench.fetched(1, 1))
        await offer(ctx, dut.wqe, bench.fetched(1, 2))
        await ctx.tick().repeat(30)
        bench.check()

    simulate(dut, main, background=[bench.watch])


@pytest.mark.parametrize("delay", range(9))
def test_state_change_while_a_wqe_is_inside(delay):
    """The state that counts is the one when the WQE begins: never a packet after a command said RESET, none lost before."""
    p = Params(CONFIGS["tiny"])
    dut = shared(Segmenter, p)
    queues = {1: Sq([GOOD])}
    bench = Bench(dut, p, queues, seeded(1))

    async def main(ctx):
        await bench.set_up(ctx)
        ctx.set(dut.wqe.payload, bench.fetched(1, 0))
        ctx.set(dut.wqe.valid, 1)
        for cycle in range(30):
            write = cycle == delay
            ctx.set(dut.ctx.payload, {"table": CtxTable.REQUESTER_CFG, "index": 1, "word": 0, "bytes": 1, "data": 0})
            ctx.set(dut.ctx.valid, write)
            _, _, taken = await ctx.tick().sample(dut.wqe.ready)
            if taken:
                ctx.set(dut.wqe.valid, 0)
        assert len(bench.jobs) == (delay >= 4)  # handed over in cycle 4: begun

    simulate(dut, main, background=[bench.watch])


@rule("R-PSN-6")
def test_psn_window():
    """R-PSN-6: with the window full the WQE is put back, and goes when una has moved."""
    p = Params(CONFIGS["tiny"])
    dut = Segmenter(p, psn_window=4)
    queues = {1: Sq([Wr(sges=[(0, 700, 1)]), Wr(sges=[(0, 300, 1)]), GOOD], psn=0xFFFFFE)}
    bench = Bench(dut, p, queues, seeded(1))

    async def acks(ctx):
        while len(bench.rewinds) < 3:
            await ctx.tick()
        assert len(bench.jobs) == 5  # 3 + 2 packets: the check is before the message
        bench.una[1] = 1

    bench.run(acks)
    bench.check()


def test_a_message_that_shrinks_while_rewound_fails():
    """A driver that changes a WQE in flight harms its own QP only: the rest cannot be sent, the QP stops."""
    p = Params(CONFIGS["tiny"])
    dut = Segmenter(p, quantum=256)
    queues = {1: Sq([Wr(sges=[(0, 2000, 1)])]), 2: Sq([GOOD] * 4)}
    bench = Bench(dut, p, queues, seeded(1))

    async def main(ctx):
        await bench.set_up(ctx)
        await offer(ctx, dut.wqe, bench.fetched(1, 0))
        await offer(ctx, dut.wqe, bench.fetched(2, 0))
        await ctx.tick().repeat(40)
        assert bench.rewinds
        queues[1].wrs[0] = Wr(sges=[(0, 200, 1)])
        await offer(ctx, dut.wqe, bench.fetched(1, 0))
        await offer(ctx, dut.wqe, bench.fetched(2, 1))
        await ctx.tick().repeat(40)
        assert [(int(f.qpn), f.status, f.vendor_err) for f in bench.failures] == [(1, St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)]
        assert [int(j.wqe_index) for j in bench.jobs if j.header.qpn == 2] == [0, 1]

    simulate(dut, main, background=[bench.watch])


@pytest.mark.parametrize("one_qp", [True, False])
def test_rate_of_small_messages(one_qp):
    """512 bit: a one-packet message per 4 cycles, of one QP or of many."""
    p = Params(CONFIGS["hundred"].replace(num_qps=16))
    dut = shared(Segmenter, p)
    count = 24
    queues = {n: Sq([GOOD] * (count if one_qp else 3)) for n in ([3] if one_qp else range(8))}
    bench = Bench(dut, p, queues, random.Random(1))
    bench.run()
    bench.check()
    assert len(bench.times) == count
    assert (bench.times[-1] - bench.times[0]) / (count - 1) <= 4.05


def read_wr(opcode, size, *, sges=None, flags=0, operands=(0, 0), **fields):
    """A READ, or an ATOMIC with its operands in front of the SGE."""
    wr = Wr(opcode=opcode, sges=[(0x1000, size, 5)] if sges is None else sges, flags=flags, remote=0x7654_3210, rkey=0xABC,
            **fields)  # fmt: skip
    if opcode != Op.READ:
        pack = wr.pack
        wr.pack = lambda: pack() & (1 << 256) - 1 | (operands[0] | operands[1] << 64) << 256 | pack() >> 256 << 384  # type: ignore
    return wr


@rule("R-PSN-3", "R-OPC-3", "R-REQ-2", "R-REQ-3", "R-WQ-6")
@pytest.mark.parametrize("name", ["tiny", "hundred"])
def test_read_and_atomic_requests(name):
    """One packet without payload, PSNs for the responses, operands; the read table says where the data goes."""
    p = Params(CONFIGS[name].replace(num_qps=4, max_rd_atomic=4, sq_outstanding=16))
    dut = shared(Segmenter, p)
    add, compare = 0x0102030405060708, 0xF1F2F3F4F5F6F7F8
    lengths = [0, 1, 256, 257, 1000]
    sges = [(1 << 50, 100, 1), (7, 0, 2), (0xFFFF_FFFF_FFFF_F000, 900, 3)]
    wrs = [read_wr(Op.READ, n) for n in lengths] + [
        read_wr(Op.CMP_SWAP, 8, operands=(add, compare), flags=SendFlags.SOLICITED | SendFlags.SIGNALED),
        read_wr(Op.FETCH_ADD, 8, operands=(~add & (1 << 64) - 1, 0)), read_wr(Op.READ, 0, sges=sges), GOOD]  # fmt: skip
    wide = Sq(wrs, psn=0xFFFFFC, start=0xFFFE)
    bench = Bench(dut, p, {1: wide}, seeded(1), 0.2)
    bench.rd_limit, bench.landed = 255, lambda n: bench.started[n]  # all that was sent has landed
    bench.run()
    psn = wide.psn
    expected = []
    for wr in wrs[:-1]:
        expected.append((psn, wr.size()))
        psn = psn + max(1, -(-wr.size() // 256)) & 0xFFFFFF
    jobs = [j.header for j in bench.jobs]
    assert [(int(h.psn), int(h.dma_length)) for h in jobs[:-1]] == expected and jobs[-1].psn == psn
    assert [int(h.opcode) for h in jobs] == [0x0C] * 5 + [0x13, 0x14, 0x0C, 0x04]
    assert all(h.ackreq and not h.solicited and not h.length for h in jobs[:-1])
    assert all((h.va, h.rkey) == (0x7654_3210, 0xABC) for h in jobs[:-1])
    assert (jobs[5].swap, jobs[5].compare, jobs[6].swap) == (add, compare, ~add & (1 << 64) - 1)
    assert len(bench.segments) == 1 and not bench.rewinds and not bench.failures
    assert [i for i, _ in bench.table] == [4 + k % 4 for k in range(8)]
    for k, (_, entry) in enumerate(bench.table):
        count = max(1, -(-wrs[k].size() // 256))
        assert (entry.first_psn, entry.last_psn) == (expected[k][0], expected[k][0] + count - 1 & 0xFFFFFF)
        assert (entry.opcode, entry.length, entry.wqe_index) == (wrs[k].opcode, wrs[k].size(), wide.index(k))
        got = [(int(s.addr), int(s.length), int(s.lkey)) for s in entry.sges]
        assert got[: len(wrs[k].sges)] == wrs[k].sges


@rule("R-WQ-5", "R-WQ-6", "R-WQ-7", "R-LEN-2")
@pytest.mark.parametrize("wr", [
    read_wr(Op.CMP_SWAP, 8, sges=[(0, 7, 1)]), read_wr(Op.FETCH_ADD, 8, sges=[(0, 16, 1)], length=16),
    read_wr(Op.FETCH_ADD, 8, sges=[(0, 4, 1), (4, 4, 1)]), read_wr(Op.CMP_SWAP, 8, num_sge=0), read_wr(Op.CMP_SWAP, 8, length=4),
    read_wr(Op.CMP_SWAP, 8, flags=SendFlags.INLINE), read_wr(Op.READ, 8, flags=SendFlags.INLINE), read_wr(Op.READ, 8, length=9),
])  # fmt: skip
def test_bad_read_or_atomic(wr):
    """R-WQ-5, R-WQ-6: one SGE of 8 bytes, nothing inline; nothing leaves."""
    p = Params(CONFIGS["tiny"])
    bench = Bench(shared(Segmenter, p), p, {1: Sq([wr, GOOD])}, seeded(1))
    bench.rd_limit = 1
    bench.run()
    assert [(f.status, f.vendor_err) for f in bench.failures] == [(St.LOC_QP_OP_ERR, Ve.BAD_WQE_LENGTH)]
    assert not bench.jobs and not bench.table


@rule("R-REQ-4", "R-ORD-2", "R-PSN-6")
@pytest.mark.parametrize("what", ["limit", "configured limit", "fence", "psn window"])
@pytest.mark.parametrize("late", [False, True])
def test_blocked_wqe_sleeps(what, late):
    """The QP is put to sleep once; when the counters moved on before the scheduler took that, it is woken at once."""
    p = Params(CONFIGS["tiny"].replace(max_rd_atomic=4))
    dut = shared(Segmenter, p)
    first = read_wr(Op.READ, 1 << 31 if what == "psn window" else 8)
    wrs = {
        "limit": [first] * 5, "configured limit": [first] * 3, "psn window": [first, GOOD],
        "fence": [first, Wr(opcode=Op.SEND, flags=SendFlags.FENCE)],
    }[what]
    bench = Bench(dut, p, {1: Sq(wrs)}, seeded(1))
    bench.rd_limit = 2 if what == "configured limit" else 200
    done, acknowledged = 0, 1 << 23 if what == "psn window" else len(wrs) - 1
    bench.landed = lambda n: done

    async def main(ctx):
        nonlocal done
        await bench.set_up(ctx)
        bench.hold_rewind = True
        for k in range(len(wrs)):
            await offer(ctx, dut.wqe, bench.fetched(1, k))
        await ctx.tick().repeat(30)
        assert len(bench.jobs) == len(wrs) - 1 and not bench.rewinds
        if late:
            done, bench.una[1] = 1, acknowledged
            await ctx.tick().repeat(3)
        bench.hold_rewind = False
        await ctx.tick().repeat(30)
        assert [(int(r.index), int(r.epoch), int(r.sleep)) for r in bench.rewinds] == \
            [(len(wrs) - 1, 1, 1)] + [(len(wrs) - 1, 1, 0)] * late
        done, bench.una[1] = 1, acknowledged
        await ctx.tick().repeat(3)
        await offer(ctx, dut.wqe, bench.fetched(1, len(wrs) - 1))
        await ctx.tick().repeat(30)
        assert len(bench.jobs) == len(wrs)
        assert what != "psn window" or bench.jobs[-1].header.psn == 1 << 23

    bench.run_only(main)


class ByHand:
    """A segmenter whose inputs a test drives step by step; collects jobs and rewinds with their cycles."""

    def __init__(self, reads=2):
        self.p = Params(CONFIGS["tiny"].replace(max_rd_atomic=2))
        self.dut = Segmenter(self.p)
        wr = Wr(opcode=Op.READ, sges=[(0, 64, 1)])
        self.bench = Bench(self.dut, self.p, {1: Sq([wr] * 8), 2: Sq([GOOD] * 8)}, seeded(1))
        self.bench.rd_limit = reads
        self.count = {1: 0, 2: 0}

    async def give(self, ctx, qpn, **changes):
        """The next WQE of a QP, fetched under its epoch."""
        k = self.bench.queues[qpn].position
        self.bench.queues[qpn].position += 1
        await offer(ctx, self.dut.wqe, self.bench.fetched(qpn, k) | changes)

    def rewinds(self):
        return [(int(r.qpn), int(r.index), int(r.sleep)) for r in self.bench.rewinds]

    def jobs(self, qpn):
        return sum(int(job.header.qpn) == qpn for job in self.bench.jobs)

    def run(self, main):
        self.bench.run_only(main)


@pytest.mark.parametrize("noted", [0, 1])
def test_a_qp_with_its_share_of_the_window_stops(noted):
    """No packet without share; a slow QP is rewound when others wait, and sleeps only if the window will wake it."""
    by = ByHand()
    dut = by.dut

    async def main(ctx):
        await by.bench.set_up(ctx)
        ctx.set(dut.share_none, 1)
        ctx.set(dut.alone, 1)
        ctx.set(dut.alone_qpn, 2)
        ctx.set(dut.noted, noted)
        await by.give(ctx, 2)
        await ctx.tick().repeat(40)
        assert not by.bench.jobs and not by.bench.rewinds  # not slow: it waits
        ctx.set(dut.slow, 1)
        await ctx.tick().repeat(40)
        assert not by.bench.jobs and not by.bench.rewinds  # slow, but nobody is behind it
        ctx.set(dut.alone, 0)
        notes = 0
        for _ in range(20):
            _, _, note, qpn = await ctx.tick().sample(dut.note, dut.share_qpn)
            notes += note
            assert not note or (qpn == 2 and len(by.bench.rewinds) == 1)  # after the scheduler knows
        assert notes == 1
        assert by.rewinds() == [(2, 0, 1)] + [(2, 0, 0)] * (not noted)
        ctx.set(dut.share_none, 0)
        ctx.set(dut.slow, 0)
        await by.give(ctx, 2)
        await ctx.tick().repeat(20)
        assert by.jobs(2) == 1 and len(by.bench.rewinds) == 2 - noted

    by.run(main)


@rule("R-REQ-4")
@pytest.mark.parametrize("end", ["landed", "others", "command"])
def test_alone_at_the_read_limit_it_waits(end):
    """R-REQ-4 without a rewind while nothing else is behind; others and commands do not wait for it."""
    by = ByHand()
    dut = by.dut

    async def main(ctx):
        await by.bench.set_up(ctx)
        ctx.set(dut.alone, 1)
        ctx.set(dut.alone_qpn, 1)
        for _ in range(3):
            await by.give(ctx, 1)
        await ctx.tick().repeat(100)
        assert by.jobs(1) == 2 and not by.bench.rewinds
        if end == "landed":
            by.bench.landed = lambda n: 1
            await ctx.tick().repeat(20)
            assert by.jobs(1) == 3 and not by.bench.rewinds
            return
        if end == "others":
            await by.give(ctx, 2)
        else:
            await ctx_write(ctx, dut, CtxTable.REQUESTER_HOT, 1, 1, 0, 0)
        await ctx.tick().repeat(30)
        assert by.rewinds() == [(1, 2, 1)] and by.jobs(1) == 2 and by.jobs(2) == (end == "others")

    by.run(main)


def test_a_bounced_job_is_fetched_again():
    by = ByHand()

    async def main(ctx):
        await by.bench.set_up(ctx)
        await by.give(ctx, 2)
        await by.give(ctx, 2, bounced=1, error=1, wqe=0, epoch=77)  # of before another rewind
        by.bench.queues[2].position -= 1
        await by.give(ctx, 2, bounced=1, error=1, wqe=0)
        await by.give(ctx, 2)  # fetched before the rewind
        await ctx.tick().repeat(30)
        assert by.rewinds() == [(2, 1, 0)] and by.jobs(2) == 1 and not by.bench.failures
        await by.give(ctx, 2)
        await ctx.tick().repeat(30)
        assert by.jobs(2) == 2

    by.run(main)
