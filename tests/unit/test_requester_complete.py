"""Completer against a Python model: cumulative ACKs, NAKs, local failures, flushes, wrapping counters, stalls."""

import dataclasses
from collections import defaultdict

import pytest

from rnic.abi import COMPLETER_CFG, COMPLETER_HOT, CtxTable, QpState, VendorError, WcOpcode, WcStatus, WqeOpcode
from rnic.config import CONFIGS, Params
from rnic.records import LandTag, ProbeEvent
from rnic.requester.complete import Completer
from rnic.wire.opcode import Opcode
from rnic.wire.syndrome import NakCode, ack_syndrome, nak_syndrome, rnr_syndrome
from tests.rules import rule
from tests.unit.requester import ctx_words, ctx_write, offer, read_port
from tests.unit.streams import seeded, shared, simulate

Op, St, Ve = WqeOpcode, WcStatus, VendorError
ACK = ack_syndrome()
PD = 0xA00
WC = {Op.SEND: WcOpcode.SEND, Op.SEND_IMM: WcOpcode.SEND, Op.SEND_INV: WcOpcode.SEND, Op.WRITE: WcOpcode.RDMA_WRITE,
      Op.WRITE_IMM: WcOpcode.RDMA_WRITE, Op.READ: WcOpcode.RDMA_READ, Op.CMP_SWAP: WcOpcode.COMP_SWAP,
      Op.FETCH_ADD: WcOpcode.FETCH_ADD}  # fmt: skip
READ_CODES = (WcOpcode.RDMA_READ, WcOpcode.COMP_SWAP, WcOpcode.FETCH_ADD)
READS = (Op.READ, Op.CMP_SWAP, Op.FETCH_ADD)


@dataclasses.dataclass
class Wqe:
    packets: int = 1
    signaled: int = 1
    opcode: int = Op.WRITE
    length: int = 100
    first: int = 0


@dataclasses.dataclass
class Qp:
    """A QP as segmenter, peer and software see it; WQE k has counter start + k."""

    psn: int = 0
    start: int = 0
    cqn: int = 1
    state: int = QpState.RTS
    wqes: list = dataclasses.field(default_factory=list)
    una: int = 0  # packets acknowledged, counted from 0
    nxt: int = 0  # packets sent
    done: int = 0
    dead: bool = False
    cqes: list = dataclasses.field(default_factory=list)  # expected

    def index(self, k):
        return self.start + k & 0xFFFF

    def wire(self, count):
        return self.psn + count & 0xFFFFFF

    def cqe(self, k, status, vendor=0, opcode=0, length=0):
        self.cqes.append((self.cqn, self.index(k), opcode, status, vendor, length))

    def retire(self, until):
        """Success of all WQEs whose packets all lie before ``until``."""
        before = self.done
        while self.done < len(self.wqes) and self.wqes[self.done].first + self.wqes[self.done].packets <= until:
            w = self.wqes[self.done]
            if w.signaled:
                self.cqe(self.done, St.SUCCESS, 0, WC[w.opcode], w.length)
            self.done += 1
        return self.done - before

    def fail(self, status, vendor):
        self.cqe(self.done, status, vendor, WC[self.wqes[self.done].opcode])
        self.done += 1
        self.dead = True


class Bench:
    def __init__(self, p, qps, rng, stall=0.0):
        self.p, self.qps, self.rng, self.stall = p, qps, rng, stall
        self.dut = shared(Completer, p)
        self.cqes, self.wakes, self.errors, self.frees, self.bad = defaultdict(list), [], [], [], 0
        self.retired, self.responses_seen, self.cycle = [], 0, 0
        self.cqe_ready = True
        self.cqe_times = []
        self.lands, self.landing, self.land_faults, self.land_hold, self.land_delay = [], [], {}, False, 5
        self.reads = defaultdict(int)  # READ and ATOMIC started
        self.in_memory = []  # (QP, WQE) of landings that ended

    async def set_up(self, ctx, only=None):
        for n, q in self.qps.items():
            if only is None or n == only:
                await ctx_words(ctx, self.dut, CtxTable.COMPLETER_CFG, n, COMPLETER_CFG.words(
                    state=q.state, cqn=q.cqn, pd=PD + n, path_mtu=1))
                await ctx_words(ctx, self.dut, CtxTable.COMPLETER_HOT, n, COMPLETER_HOT.words(una=q.psn, done_index=q.start))

    async def post(self, ctx, n, *, packets=1, sent=None, **fields):
        """The segmenter begins a WQE (``sent`` packets of it, default all)."""
        q = self.qps[n]
        w = Wqe(packets=packets, first=q.nxt, **fields)
        k = len(q.wqes)
        ctx.set(self.dut.remember_en, 1)
        ctx.set(self.dut.remember_index, n * self.p.sq_outstanding + q.index(k) % self.p.sq_outstanding)
        ctx.set(self.dut.remember_data, {
            "first_psn": q.wire(w.first), "last_psn": q.wire(w.first + packets - 1), "opcode": w.opcode, "signaled": w.signaled,
            "length": w.length})  # fmt: skip
        await ctx.tick()
        ctx.set(self.dut.remember_en, 0)
        if w.opcode in READS:
            ctx.set(self.dut.read_en, 1)
            ctx.set(self.dut.read_index, n * self.p.max_rd_atomic + self.reads[n] % self.p.max_rd_atomic)
            ctx.set(self.dut.read_data, {
                "first_psn": q.wire(w.first), "last_psn": q.wire(w.first + packets - 1), "opcode": w.opcode, "length": w.length,
                "wqe_index": q.index(k), "sges": [{"addr": q.index(k), "length": w.length, "lkey": n}]})  # fmt: skip
            await ctx.tick()
            ctx.set(self.dut.read_en, 0)
            self.reads[n] += 1
        q.wqes.append(w)
        q.nxt += packets if sent is None else sent
        await ctx.tick().repeat(2)  # no answer comes in the cycles of the write

    async def respond(self, ctx, n, count, syndrome=ACK, opcode=Opcode.RC_ACK, length=0, head=0, original=0):
        """An answer with the PSN of packet ``count``."""
        await offer(ctx, self.dut.response, {
            "qpn": n, "opcode": opcode.value, "psn": self.qps[n].wire(count), "syndrome": syndrome, "length": length,
            "head": head, "original": original})  # fmt: skip

    async def street(self, ctx):
        """The responder's data mover: takes landings, answers each after a while, in order."""
        dut = self.dut
        while True:
            ctx.set(dut.land.ready, len(self.landing) < 3 and self.rng.random() >= self.stall)
            due = self.landing and self.landing[0][0] <= self.cycle and not self.land_hold
            if due:
                result = self.landing.pop(0)[1]
                ctx.set(dut.landed.payload, result)
                if result["tag"] == LandTag.LAST:
                    self.in_memory.append((result["qpn"], result["index"]))
            ctx.set(dut.landed.valid, bool(due))
            _, _, taken, job = await ctx.tick().sample(dut.land.valid & dut.land.ready, dut.land.payload)
            if taken:
                self.lands.append(job)
                status, vendor = self.land_faults.get((int(job.qpn), int(job.index)), (St.SUCCESS, Ve.NONE))
                if not job.length and job.tag in (LandTag.SWEEP, LandTag.FLUSH):
                    status, vendor = St.SUCCESS, Ve.NONE
                self.landing.append((self.cycle + self.land_delay, {
                    "qpn": int(job.qpn), "tag": job.tag, "index": int(job.index), "status": status, "vendor_err": vendor}))

    async def set_state(self, ctx, n, state):
        self.qps[n].state = state
        await ctx_write(ctx, self.dut, CtxTable.COMPLETER_CFG, n, 0, state, mask=1)

    async def watch(self, ctx):
        dut = self.dut
        ports = [dut.cqe, dut.wake, dut.qp_error, dut.free]
        sampled = [s for port in ports for s in (port.valid, port.ready, port.payload)]
        async for _, _, *got in ctx.tick().sample(*sampled, dut.bad_response, dut.probe_retired, dut.probe):
            self.cycle += 1
            for i, sink in enumerate((None, self.wakes, self.errors, self.frees)):
                valid, ready, item = got[3 * i : 3 * i + 3]
                if valid and ready:
                    if sink is None:
                        self.cqe_times.append((self.cycle, int(item.qpn)))
                        if item.opcode in READ_CODES and item.status == St.SUCCESS:  # R-ORD-5
                            assert (int(item.qpn), int(item.wqe_counter)) in self.in_memory
                        if item.status != St.SUCCESS:  # nothing may arrive in a buffer whose WQE has ended
                            data = [r for _, r in self.landing if r["tag"] in (LandTag.PART, LandTag.LAST)]
                            assert not any(r["qpn"] == item.qpn for r in data)
                        self.cqes[int(item.qpn)].append((int(item.cqn), int(item.wqe_counter), item.opcode, item.status,
                                                         item.vendor_err, int(item.byte_len)))  # fmt: skip
                    else:
                        sink.append(int(item.qpn) if hasattr(item, "qpn") else int(item))
            for port in ports:
                ctx.set(port.ready, self.rng.random() >= self.stall and (port is not dut.cqe or self.cqe_ready))
            self.bad += got[12]
            if got[13].valid:
                assert got[13].event == ProbeEvent.WQE_RETIRED
                self.retired.append((int(got[13].qpn), int(got[13].index), int(got[13].opcode)))
            self.responses_seen += int(got[14].valid)

    async def settle(self, ctx, cycles=60):
        await ctx.tick().repeat(cycles)

    def run(self, main, limit=6000):
        dut, qps = self.dut, self.qps

        def sent(n):
            q = qps[n]
            return q.index(sum(w.first + w.packets <= q.nxt for w in q.wqes))

        hot = read_port(dut.hot_addr, [
            (dut.hot_psn, lambda n: qps[n].wire(qps[n].nxt) if n in qps else 0),
            (dut.hot_send_index, lambda n: sent(n) if n in qps else 0),
            (dut.hot_reads, lambda n: self.reads[n] & 0xFF),
        ])  # fmt: skip
        simulate(dut, main, background=[self.watch, hot, self.street], limit=limit)

    async def check(self, ctx, n):
        q = self.qps[n]
        assert self.cqes[n] == q.cqes, f"QP {n}"
        ctx.set(self.dut.done_index_addr, n)
        ctx.set(self.dut.una_addr, n)
        await ctx.tick().repeat(2)
        assert ctx.get(self.dut.done_index) == q.index(q.done), f"QP {n}"


@rule("R-RSP-1", "R-RSP-2", "R-CQ-1", "R-PSN-2")
@pytest.mark.parametrize("name,seed,stall", [("tiny", 1, 0.3), ("tiny", 2, 0.0), ("hundred", 3, 0.3), ("hundred", 4, 0.5)])
def test_cumulative_acks(name, seed, stall):
    """R-RSP-1, R-RSP-2: QPs interleaved; ACKs of any packet, duplicates and PSNs never sent; counters wrap."""
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=8))
    qps = {n: Qp(psn=rng.choice([0, 0xFFFFF0, 0x7FFFFA]), start=rng.choice([0, 0xFFF5]), cqn=rng.randrange(8))
           for n in rng.sample(range(8), 4)}  # fmt: skip
    bench = Bench(p, qps, rng, stall)
    ghosts = 0
    wakes = defaultdict(int)

    async def main(ctx):
        nonlocal ghosts
        await bench.set_up(ctx)
        for _ in range(150):
            n, q = rng.choice(list(qps.items()))
            if rng.random() < 0.6:
                if len(q.wqes) - sum(r[0] == n for r in bench.retired) < p.sq_outstanding:
                    await bench.post(ctx, n, packets=rng.choice([1, 1, 2, 40]), signaled=rng.randrange(2),
                                     opcode=rng.choice([op for op in WC if op not in READS]),
                                     length=rng.getrandbits(31))  # fmt: skip
            elif rng.random() < 0.2:
                ghosts += 1
                await bench.respond(ctx, n, q.nxt + rng.choice([0, 1, 1000, (1 << 23) - 1 - q.nxt + q.una]))
                await bench.settle(ctx, 60)  # until it was looked at: later that PSN may have been sent
            elif rng.random() < 0.2:
                await bench.respond(ctx, n, q.una - rng.choice([1, 2, 100, 1 << 22]))
            elif q.nxt > q.una:
                psn = rng.randrange(q.una, q.nxt)
                q.una = psn + 1
                wakes[n] += bool(q.retire(q.una))
                await bench.respond(ctx, n, psn)
                if p.sq_outstanding > 16 or rng.random() < 0.5:
                    await bench.settle(ctx, 8)
        await bench.settle(ctx, 300)
        for n, q in qps.items():
            await bench.check(ctx, n)
            assert ctx.get(bench.dut.una) == q.wire(q.una)
            assert bench.wakes.count(n) >= (wakes[n] > 0)
        assert bench.bad == ghosts > 0 and not bench.errors

    bench.run(main)


@rule("R-RSP-2", "R-ERR-1", "R-ERR-3", "R-ERR-4", "R-ERR-5", "7.4", "R-ERR-2")
@pytest.mark.parametrize("name", ["tiny", "hundred"])
@pytest.mark.parametrize("syndrome,status,vendor", [
    (nak_syndrome(NakCode.PSN_SEQUENCE), St.RETRY_EXC_ERR, Ve.NAK_SEQUENCE),
    (nak_syndrome(NakCode.INVALID_REQUEST), St.REM_INV_REQ_ERR, Ve.REMOTE_NAK),
    (nak_syndrome(NakCode.REMOTE_ACCESS), St.REM_ACCESS_ERR, Ve.REMOTE_NAK),
    (nak_syndrome(NakCode.REMOTE_OPERATIONAL), St.REM_OP_ERR, Ve.REMOTE_NAK),
    (rnr_syndrome(3), St.RNR_RETRY_EXC_ERR, Ve.RNR),
])  # fmt: skip
def test_nak(name, syndrome, status, vendor):
    """rules.md 7.4: WQEs before p succeed, the one with p fails though unsignaled, the rest is flushed in post order."""
    p = Params(CONFIGS[name].replace(num_qps=8, sq_outstanding=8))
    qps = {3: Qp(psn=0xFFFFFE, start=0xFFFE), 4: Qp()}
    bench = Bench(p, qps, seeded(1), 0.2)
    q = qps[3]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 3, packets=2)
        await bench.post(ctx, 3, packets=3, signaled=0)
        await bench.post(ctx, 3, packets=4, signaled=0, opcode=Op.SEND_IMM)  # p is its third packet
        await bench.post(ctx, 3, packets=1)
        await bench.post(ctx, 4)
        q.retire(5)
        q.fail(status, vendor)
        await bench.respond(ctx, 3, 7, syndrome)
        await bench.respond(ctx, 3, 9)  # never trusted after an error
        await bench.settle(ctx)
        await bench.check(ctx, 3)
        assert bench.errors == [3] and bench.bad == 0
        # The command engine moves the QP to ERR, then the scheduler sends the flush; posts in ERR are flushed too.
        await bench.set_state(ctx, 3, QpState.ERR)
        for producer in (4, 4, 7):
            while q.done < producer:
                q.cqe(q.done, St.WR_FLUSH_ERR)
                q.done += 1
            await offer(ctx, bench.dut.flush, {"qpn": 3, "producer": q.index(producer)})
        await bench.settle(ctx)
        await bench.check(ctx, 3)
        # A reset QP works again, others were not touched.
        qps[3] = Qp(psn=50)
        bench.cqes[3].clear()
        await bench.set_up(ctx, 3)
        for n in (3, 4):
            if n == 3:
                await bench.post(ctx, 3)
            qps[n].retire(1)
            await bench.respond(ctx, n, 0)
        await bench.settle(ctx)
        for n in (3, 4):
            await bench.check(ctx, n)
        assert bench.errors == [3]
        assert [r[1:] for r in bench.retired[:3]] == [(0xFFFE, St.SUCCESS), (0xFFFF, St.SUCCESS), (0, status)]

    bench.run(main)


@rule("R-RSP-2")
def test_nak_of_a_message_still_being_sent():
    """p lies in a WQE of which only some packets were sent (send_index has not moved past it)."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp(psn=10)}, seeded(1))
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1)
        await bench.post(ctx, 1, packets=20, sent=6, opcode=Op.SEND)
        await bench.respond(ctx, 1, 3)  # an ACK inside it
        q.retire(4)
        await bench.settle(ctx)
        await bench.check(ctx, 1)
        assert ctx.get(bench.dut.una) == 14
        q.fail(St.REM_ACCESS_ERR, Ve.REMOTE_NAK)
        await bench.respond(ctx, 1, 5, nak_syndrome(NakCode.REMOTE_ACCESS))
        await bench.settle(ctx)
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-RSP-2", "R-PSN-2")
def test_ack_inside_a_huge_message():
    """The last PSN of a message of 1.9 GB is more than a quarter of all PSNs ahead of an ACK: it is not acknowledged."""
    bench = Bench(Params(CONFIGS["tiny"]), {1: Qp(psn=0xFFFFFE)}, seeded(1))
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1)
        await bench.post(ctx, 1, packets=7_500_000, sent=10, opcode=Op.SEND)
        await bench.respond(ctx, 1, 3)
        q.retire(4)
        await bench.settle(ctx)
        await bench.check(ctx, 1)
        assert len(q.cqes) == 1 and ctx.get(bench.dut.una) == q.wire(4)

    bench.run(main)


@rule("7.4", "R-RSP-1", "R-QP-5", "R-QP-2")
def test_ignored_answers():
    """Reserved syndromes and PSNs never sent: counted. Duplicates with data: cells freed. In RESET or ERR: nothing else."""
    p = Params(CONFIGS["tiny"])
    bench = Bench(p, {1: Qp(), 2: Qp(state=QpState.ERR)}, seeded(1))

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1)
        reserved = [0x40, 0x5F, *(nak_syndrome(NakCode.PSN_SEQUENCE) + code for code in range(4, 32))]
        for syndrome in reserved:
            await bench.respond(ctx, 1, 0, syndrome)
        await bench.respond(ctx, 1, 1, ACK, Opcode.RC_READ_RESP_ONLY, length=64, head=5)
        await bench.respond(ctx, 1, 7, ACK, Opcode.RC_ATOMIC_ACK)
        await bench.respond(ctx, 1, -1, ACK, Opcode.RC_READ_RESP_LAST, length=64, head=6)
        await bench.respond(ctx, 2, 0, ACK, Opcode.RC_READ_RESP_MIDDLE, length=256, head=9)
        await bench.respond(ctx, 2, 0)
        await bench.settle(ctx)
        assert bench.bad == len(reserved) + 2
        assert bench.frees == [5, 6, 9]
        assert bench.responses_seen == len(reserved) + 5
        for n in (1, 2):
            await bench.check(ctx, n)
        assert not bench.errors and not bench.wakes

    bench.run(main)


@rule("R-ERR-7", "R-ERR-1")
@pytest.mark.parametrize("order", [(2,), (2, 3), (3, 2), (0,), (1, 0)])
@pytest.mark.parametrize("name", ["tiny", "hundred"])
def test_local_failure_waits_for_its_turn(name, order):
    """R-ERR-7: earlier WQEs complete first; of several failures the oldest counts."""
    p = Params(CONFIGS[name].replace(num_qps=4, sq_outstanding=8))
    bench = Bench(p, {1: Qp(start=0xFFFF, psn=0xFFFFFF), 2: Qp()}, seeded(3), 0.2)
    q = bench.qps[1]
    oldest = min(order)

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(4):
            await bench.post(ctx, 1, packets=2, signaled=0, opcode=Op.SEND)
        for k in order:
            failure = {"qpn": 1, "wqe_index": q.index(k), "status": St.LOC_PROT_ERR if k == oldest else St.LOC_LEN_ERR,
                       "vendor_err": Ve.KEY_PD}  # fmt: skip
            await offer(ctx, bench.dut.failure, failure)
        await bench.settle(ctx)
        if oldest:
            # (1, 0) and (0,) are reported at once; the later ones wait for the ACKs before them
            assert not bench.cqes[1] and not bench.errors
            for count in range(2 * oldest):
                await bench.respond(ctx, 1, count)
            await bench.settle(ctx)
        q.done = oldest
        q.fail(St.LOC_PROT_ERR, Ve.KEY_PD)
        await bench.check(ctx, 1)
        assert bench.errors == [1]
        await offer(ctx, bench.dut.failure, {"qpn": 1, "wqe_index": q.index(oldest + 1), "status": St.LOC_PROT_ERR})
        await bench.settle(ctx)
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-ERR-7")
def test_failure_reported_with_the_ack_that_uncovers_it():
    """One ACK retires up to the failed WQE; the failure follows without another event."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp()}, seeded(3))
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(3):
            await bench.post(ctx, 1)
        await offer(ctx, bench.dut.failure, {"qpn": 1, "wqe_index": 2, "status": St.LOC_PROT_ERR, "vendor_err": Ve.KEY_BOUNDS})
        await bench.settle(ctx)
        await bench.respond(ctx, 1, 1)
        await bench.settle(ctx)
        q.retire(2)
        q.fail(St.LOC_PROT_ERR, Ve.KEY_BOUNDS)
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-ERR-3", "R-ERR-4")
def test_long_flush_lets_others_pass():
    """A flush of 200 WQEs gives way; answers of other QPs and a second flush are served; a blocked CQ stops only this."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp(state=QpState.ERR, start=0xFFA0), 2: Qp(), 3: Qp(state=QpState.ERR)}, seeded(3))

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 2)
        for n, count in ((1, 200), (3, 3)):
            await offer(ctx, bench.dut.flush, {"qpn": n, "producer": bench.qps[n].index(count)})
            for k in range(count):
                bench.qps[n].cqe(k, St.WR_FLUSH_ERR)
            bench.qps[n].done = count
            if n == 1:
                bench.qps[2].retire(1)
                await bench.respond(ctx, 2, 0)
        await bench.settle(ctx, 700)
        for n in (1, 2, 3):
            await bench.check(ctx, n)
        at = [n for _, n in bench.cqe_times].index(2)
        assert at <= 2 * Completer.TURN
        # a flush that is behind done_index does nothing
        await offer(ctx, bench.dut.flush, {"qpn": 3, "producer": 1})
        await offer(ctx, bench.dut.flush, {"qpn": 2, "producer": 5})  # not in ERR
        await bench.settle(ctx)
        await bench.check(ctx, 3)
        await bench.check(ctx, 2)

    bench.run(main)


@pytest.mark.parametrize("signaled", [0, 1])
def test_long_retire(signaled):
    """100 WQEs retired by one ACK, then by one NAK: at most 4 cycles each; answers of the other QP pass in between."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp(psn=0xFFFFF0), 2: Qp()}, seeded(3))
    q = bench.qps[1]

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(100):
            await bench.post(ctx, 1, signaled=signaled)
        await bench.post(ctx, 2)
        start = bench.cycle
        await bench.respond(ctx, 1, 98)
        await bench.respond(ctx, 2, 0)
        await bench.respond(ctx, 1, 99, nak_syndrome(NakCode.REMOTE_ACCESS))
        q.retire(99)
        q.fail(St.REM_ACCESS_ERR, Ve.REMOTE_NAK)
        bench.qps[2].retire(1)
        while len(bench.retired) < 101:
            await ctx.tick()
        assert bench.cycle - start <= 4 * 101
        await bench.settle(ctx)
        await bench.check(ctx, 1)
        await bench.check(ctx, 2)
        assert [n for n, _, _ in bench.retired].index(2) <= 2 * Completer.TURN

    bench.run(main)


def test_one_ack_per_message():
    """An answer that retires one WQE takes at most 6 cycles."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp()}, seeded(3))

    async def main(ctx):
        await bench.set_up(ctx)
        for _ in range(32):
            await bench.post(ctx, 1)
        start = bench.cycle
        for k in range(32):
            await bench.respond(ctx, 1, k)
        assert bench.cycle - start <= 6 * 32 + 4
        bench.qps[1].retire(32)
        await bench.settle(ctx)
        await bench.check(ctx, 1)

    bench.run(main)


@rule("R-QP-4")
@pytest.mark.parametrize("delay", range(10))
def test_reset_command_meets_an_answer(delay):
    """COMPLETER_HOT written while an answer of that QP is worked on: the command's values stay."""
    p = Params(CONFIGS["tiny"])
    bench = Bench(p, {1: Qp()}, seeded(3))

    async def main(ctx):
        await bench.set_up(ctx)
        await bench.post(ctx, 1)
        ctx.set(bench.dut.response.payload, {"qpn": 1, "opcode": Opcode.RC_ACK.value, "psn": 0, "syndrome": ACK})
        ctx.set(bench.dut.response.valid, 1)
        words = COMPLETER_HOT.words(una=1234, done_index=77)
        taken = False
        for _ in range(delay):
            taken |= (await ctx.tick().sample(bench.dut.response.ready))[2]
            ctx.set(bench.dut.response.valid, not taken)
        ctx.set(bench.dut.response.valid, 0)
        await ctx_words(ctx, bench.dut, CtxTable.COMPLETER_HOT, 1, words)
        await bench.settle(ctx, 20)
        ctx.set(bench.dut.done_index_addr, 1)
        ctx.set(bench.dut.una_addr, 1)
        await ctx.tick().repeat(2)
        assert (ctx.get(bench.dut.done_index), ctx.get(bench.dut.una)) == (77, 1234)

    bench.run(main)


@rule("R-RSP-1", "R-RSP-2")
def test_acks_that_wait_are_absorbed():
    """ACKs of one QP, one behind the other: a WQE each 3 cycles, where a job of its own takes 6. One in the middle names a PSN
    that was never sent: it ends the run, is counted, and acknowledges nothing."""
    p = Params(CONFIGS["hundred"].replace(num_qps=4))
    bench = Bench(p, {1: Qp(psn=0xFFFFFC)}, seeded(6), stall=0)

    async def main(ctx):
        await bench.set_up(ctx)
        q = bench.qps[1]
        for _ in range(24):
            await bench.post(ctx, 1)
        for psn in (*range(12), 1000, *range(12, 24)):
            await bench.respond(ctx, 1, psn)
        q.una = 24
        q.retire(24)
        await bench.settle(ctx, 120)
        await bench.check(ctx, 1)
        assert bench.bad == 1 and not bench.errors
        gaps = [b - a for (a, _), (b, _) in zip(bench.cqe_times, bench.cqe_times[1:], strict=False)]
        assert sorted(gaps)[: len(gaps) // 2] == [3] * (len(gaps) // 2), gaps

    bench.run(main)
