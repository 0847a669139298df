"""The four requester blocks together: rings in a Python memory, a peer that answers, a command engine that reacts."""

from collections import defaultdict

import pytest
from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.abi import (
    COMPLETER_CFG,
    COMPLETER_HOT,
    REQUESTER_CFG,
    REQUESTER_HOT,
    SEND_WQE,
    SGE,
    CtxTable,
    QpState,
    SendFlags,
    WcStatus,
    WqeOpcode,
)
from rnic.config import CONFIGS, Params
from rnic.records import (
    CqeRequest,
    CtxBus,
    DmaReadSignature,
    Doorbell,
    GatherSegment,
    LandJob,
    LandResult,
    LandTag,
    QpError,
    QpEvent,
    ResponseDesc,
    SendFailure,
    TxJob,
    XlateSignature,
)
from rnic.requester.complete import Completer
from rnic.requester.schedule import Scheduler
from rnic.requester.segment import Segmenter
from rnic.requester.wqe_fetch import WqeFetch
from rnic.stream.arbiter import StreamArbiter
from rnic.wire.opcode import Opcode
from rnic.wire.syndrome import NakCode, ack_syndrome, nak_syndrome
from tests.rules import rule
from tests.unit.requester import ctx_write, offer
from tests.unit.streams import seeded, shared, simulate
from tests.unit.test_requester_wqe_fetch import Host

LOG_SQ = 3


class Requester(wiring.Component):
    """Wires only."""

    def __init__(self, p):
        self.p = p
        self.fetch = WqeFetch(p)
        s = stream.Signature
        super().__init__({
            "ctx": In(CtxBus(p)), "doorbell": In(s(Doorbell(p.qpn_bits))), "kick": In(s(QpEvent(p))),
            "gather_failure": In(s(SendFailure(p))), "response": In(s(ResponseDesc(p))),
            "job": Out(s(TxJob(p))), "segment": Out(s(GatherSegment(p))), "cqe": Out(s(CqeRequest(p))),
            "qp_error": Out(s(QpError(p))), "xlate": Out(XlateSignature(p, self.fetch.tag_bits)),
            "read": Out(DmaReadSignature(p)), "land": Out(s(LandJob(p))), "landed": In(s(LandResult(p))),
        })  # fmt: skip

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.scheduler = scheduler = Scheduler(p)
        m.submodules.fetch = fetch = self.fetch
        m.submodules.segmenter = segmenter = Segmenter(p, quantum=1024)
        m.submodules.completer = completer = Completer(p)
        m.submodules.failures = failures = StreamArbiter(SendFailure(p), 2)
        blocks = (scheduler, segmenter, completer)
        for block in blocks:
            m.d.comb += [block.ctx.payload.eq(self.ctx.payload), block.ctx.valid.eq(self.ctx.valid)]
        m.d.comb += self.ctx.ready.eq(scheduler.ctx.ready & segmenter.ctx.ready & completer.ctx.ready)
        for a, b in ((scheduler.fetch, fetch.job), (fetch.wqe, segmenter.wqe), (segmenter.rewind, scheduler.rewind),
                     (completer.wake, scheduler.wake), (scheduler.flush, completer.flush), (segmenter.failure, failures.i[0]),
                     (failures.o, completer.failure), (wiring.flipped(self.doorbell), scheduler.doorbell),
                     (wiring.flipped(self.kick), scheduler.kick), (wiring.flipped(self.gather_failure), failures.i[1]),
                     (wiring.flipped(self.response), completer.response), (segmenter.job, wiring.flipped(self.job)),
                     (segmenter.segment, wiring.flipped(self.segment)), (completer.cqe, wiring.flipped(self.cqe)),
                     (completer.qp_error, wiring.flipped(self.qp_error)), (fetch.xlate, wiring.flipped(self.xlate)),
                     (fetch.read, wiring.flipped(self.read)), (completer.land, wiring.flipped(self.land)),
                     (wiring.flipped(self.landed), completer.landed)):  # fmt: skip
            wiring.connect(m, a, b)
        m.d.comb += [
            scheduler.done_index.eq(completer.done_index), completer.done_index_addr.eq(scheduler.done_index_addr),
            segmenter.una.eq(completer.una), completer.una_addr.eq(segmenter.una_addr),
            completer.hot_psn.eq(segmenter.hot_psn), completer.hot_send_index.eq(segmenter.hot_send_index),
            completer.hot_reads.eq(segmenter.hot_reads), segmenter.landed.eq(completer.landed_count),
            completer.read_en.eq(segmenter.read_en), completer.read_index.eq(segmenter.read_index),
            completer.read_data.eq(segmenter.read_data),
            segmenter.hot_addr.eq(completer.hot_addr),
            completer.remember_en.eq(segmenter.remember_en), completer.remember_index.eq(segmenter.remember_index),
            completer.remember_data.eq(segmenter.remember_data), completer.free.ready.eq(1), segmenter.inline.ready.eq(1),
            segmenter.alone.eq(fetch.alone), segmenter.alone_qpn.eq(fetch.alone_qpn),
        ]  # fmt: skip
        return m


class Rings(Host):
    """Host memory of which the rings are all there is."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data = defaultdict(int)

    def byte(self, address):
        return self.data[address]

    def put(self, qpn, counter, raw):
        at = self.base[qpn] + (counter % (1 << LOG_SQ)) * 64
        self.data.update(enumerate(raw, at))


def wqe(length, *, bad=False, signaled=True):
    head = SEND_WQE.pack(opcode=99 if bad else WqeOpcode.SEND, flags=SendFlags.SIGNALED if signaled else 0, num_sge=1,
                         length=length)  # fmt: skip
    return head[:32] + SGE.pack(addr=0x1000, length=length, lkey=1) + bytes(16)


def street(dut, rng, *, delay=(3, 30), seen=None):
    """A background bench in place of the responder's data mover: takes landings, answers each after a while, in order."""
    async def bench(ctx):
        waiting, cycle = [], 0
        while True:
            cycle += 1
            ctx.set(dut.land.ready, len(waiting) < 4 and rng.random() < 0.8)
            due = bool(waiting) and waiting[0][0] <= cycle
            if due:
                job = waiting.pop(0)[1]
                ctx.set(dut.landed.payload, {"qpn": int(job.qpn), "tag": job.tag, "index": int(job.index)})
                if seen is not None and job.tag == LandTag.LAST:
                    seen.append((int(job.qpn), int(job.index)))
            ctx.set(dut.landed.valid, due)
            _, _, taken, job = await ctx.tick().sample(dut.land.valid & dut.land.ready, dut.land.payload)
            if taken:
                waiting.append((cycle + rng.randint(*delay), job))
    return bench


async def create(ctx, dut, n, start=0, psn=0, max_rd_atomic=0):
    tables = [
        (CtxTable.REQUESTER_HOT, REQUESTER_HOT.words(psn=psn, send_index=start)),
        (CtxTable.COMPLETER_HOT, COMPLETER_HOT.words(una=psn, done_index=start)),
        (CtxTable.SQ_FETCH, [start]), (CtxTable.SQ_PRODUCER, [start]),
        (CtxTable.COMPLETER_CFG, COMPLETER_CFG.words(state=QpState.RTS, cqn=1, path_mtu=1)),
        (CtxTable.REQUESTER_CFG, REQUESTER_CFG.words(state=QpState.RTS, path_mtu=1, log_sq=LOG_SQ, log_stride=6,
                                                     max_rd_atomic=max_rd_atomic)),
    ]  # fmt: skip
    for table, words in tables:
        for word, value in enumerate(words):
            await ctx_write(ctx, dut, table, n, word, value)


@rule("R-ERR-3", "R-ERR-4", "R-ERR-5", "R-CQ-1")
@pytest.mark.parametrize("name,seed,trouble", [
    ("tiny", 1, None), ("hundred", 2, None), ("tiny", 3, "nak"), ("hundred", 4, "nak"), ("tiny", 5, "bad"), ("hundred", 6, "bad"),
    ("hundred", 7, "local"), ("tiny", 8, "software"),
])  # fmt: skip
def test_every_wqe_gets_its_end(name, seed, trouble):
    """One CQE per WQE in post order, counters wrapping; one QP gets in trouble: what follows is flushed, posts after it too."""
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=4))
    dut = shared(Requester, p)
    host = Rings(p, dut, rng, stall=0.1, latency=(2, 12))
    total, sick, at = 22, 2, 9
    posted, cqes, payload = defaultdict(int), defaultdict(list), defaultdict(list)
    starts = {n: rng.choice([0, 0xFFF7]) for n in range(4)}
    answers, errors, failed, gathered = [], [], False, 0

    async def driver(ctx):
        for n in range(4):
            await create(ctx, dut, n, starts[n], psn=0xFFFFF8)
        while any(posted[n] < total for n in range(4)):
            n = rng.randrange(4)
            count = rng.randint(0, min((1 << LOG_SQ) - (posted[n] - len(cqes[n])), total - posted[n]))
            for _ in range(count):
                bad = trouble == "bad" and (n, posted[n]) == (sick, at)
                host.put(n, starts[n] + posted[n], wqe(rng.choice([0, 1, 64, 256, 257, 1500]), bad=bad))
                posted[n] += 1
            if count:
                await offer(ctx, dut.doorbell, {"id": n, "counter": starts[n] + posted[n] & 0xFFFF})
            await ctx.tick().repeat(rng.choice([1, 5, 20]))
        for _ in range(3000):
            await ctx.tick()
            if all(len(cqes[n]) == total for n in range(4)):
                break

    async def peer(ctx):
        """Takes packets, checks PSN order, answers where asked to."""
        expected = defaultdict(lambda: 0xFFFFF8)
        dead = set()
        async for _, _, valid, ready, job, svalid, sready, segment in ctx.tick().sample(
            dut.job.valid, dut.job.ready, dut.job.payload, dut.segment.valid, dut.segment.ready, dut.segment.payload
        ):
            nonlocal failed, gathered
            if svalid and sready:
                gathered += segment.length
            if valid and ready:
                n, header = int(job.header.qpn), job.header
                assert header.psn == expected[n]
                expected[n] = expected[n] + 1 & 0xFFFFFF
                payload[n].append(int(header.length))
                index = int(job.wqe_index) - starts[n] & 0xFFFF
                if n in dead:
                    pass
                elif trouble == "nak" and (n, index) == (sick, at):
                    dead.add(n)
                    answers.append({"qpn": n, "psn": int(header.psn), "opcode": Opcode.RC_ACK.value,
                                    "syndrome": nak_syndrome(NakCode.REMOTE_ACCESS)})  # fmt: skip
                elif trouble == "local" and (n, index) == (sick, at):
                    dead.add(n)
                    failed = True
                elif header.ackreq:
                    answers.append({"qpn": n, "psn": int(header.psn), "opcode": Opcode.RC_ACK.value,
                                    "syndrome": ack_syndrome()})  # fmt: skip
            ctx.set(dut.job.ready, rng.random() < 0.8)
            ctx.set(dut.segment.ready, rng.random() < 0.8)

    async def answer(ctx):
        while True:
            await ctx.tick()
            if answers and rng.random() < 0.3:
                await offer(ctx, dut.response, answers.pop(0))

    async def gather(ctx):
        while not failed:
            await ctx.tick()
        await offer(ctx, dut.gather_failure, {"qpn": sick, "wqe_index": starts[sick] + at & 0xFFFF,
                                              "status": WcStatus.LOC_PROT_ERR})  # fmt: skip

    async def cqs(ctx):
        async for _, _, valid, ready, cqe in ctx.tick().sample(dut.cqe.valid, dut.cqe.ready, dut.cqe.payload):
            if valid and ready:
                cqes[int(cqe.qpn)].append((int(cqe.wqe_counter), cqe.status))
            ctx.set(dut.cqe.ready, rng.random() < 0.7)

    async def command_engine(ctx):
        ctx.set(dut.qp_error.ready, 1)
        while True:
            _, _, valid, item = await ctx.tick().sample(dut.qp_error.valid, dut.qp_error.payload)
            if valid or (trouble == "software" and not errors and len(cqes[sick]) == at):
                n = int(item.qpn) if valid else sick
                errors.append(n)
                await ctx.tick().repeat(40)
                for table in (CtxTable.REQUESTER_CFG, CtxTable.COMPLETER_CFG):
                    await ctx_write(ctx, dut, table, n, 0, QpState.ERR, mask=1)
                await offer(ctx, dut.kick, {"qpn": n})

    simulate(dut, driver, background=[host.translate, host.memory, peer, answer, gather, cqs, command_engine,
                                   street(dut, rng)], limit=9000)
    for n in range(4):
        assert [c for c, _ in cqes[n]] == [starts[n] + k & 0xFFFF for k in range(total)], f"QP {n}"
        statuses = [s for _, s in cqes[n]]
        if not trouble or n != sick:
            assert set(statuses) == {WcStatus.SUCCESS}
        elif trouble == "software":
            flushed = statuses.index(WcStatus.WR_FLUSH_ERR)
            assert flushed >= at and set(statuses[flushed:]) == {WcStatus.WR_FLUSH_ERR}
        else:
            status = {"nak": WcStatus.REM_ACCESS_ERR, "bad": WcStatus.LOC_QP_OP_ERR, "local": WcStatus.LOC_PROT_ERR}[trouble]
            assert statuses == [WcStatus.SUCCESS] * at + [status] + [WcStatus.WR_FLUSH_ERR] * (total - at - 1)
    assert gathered == sum(sum(sizes) for sizes in payload.values())
    assert errors == ([sick] if trouble else [])


READ_OPS = {WqeOpcode.READ: Opcode.RC_READ_REQUEST, WqeOpcode.CMP_SWAP: Opcode.RC_CMP_SWAP,
            WqeOpcode.FETCH_ADD: Opcode.RC_FETCH_ADD}  # fmt: skip


def read_wqe(opcode, length, flags):
    head = SEND_WQE.pack(opcode=opcode, flags=flags | SendFlags.SIGNALED, num_sge=1, length=length)[:32]
    sge = SGE.pack(addr=0x1000, length=length, lkey=1)
    return head + (bytes(16) + sge if opcode in (WqeOpcode.CMP_SWAP, WqeOpcode.FETCH_ADD) else sge + bytes(16))


@rule("R-REQ-1", "R-REQ-4", "R-ORD-2", "R-PSN-3")
@pytest.mark.parametrize("name,seed,limit", [("tiny", 1, 1), ("hundred", 2, 1), ("hundred", 3, 2), ("hundred", 4, 4)])
def test_reads_and_fences(name, seed, limit):
    """READ limit and fence: never broken, order kept, every WQE ends (no wake-up is lost), and nothing spins meanwhile."""
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=4, max_rd_atomic=4))
    dut = shared(Requester, p)
    host = Rings(p, dut, rng, stall=0.1, latency=(2, 12))
    total = 24
    wrs = {n: [] for n in range(4)}
    posted, cqes, sent = defaultdict(int), defaultdict(list), defaultdict(list)
    answers, in_memory, fetched = [], [], 0
    for n in range(4):
        for _ in range(total):
            opcode = rng.choice([WqeOpcode.SEND, WqeOpcode.READ, WqeOpcode.READ, WqeOpcode.CMP_SWAP, WqeOpcode.FETCH_ADD])
            length = {WqeOpcode.SEND: 300, WqeOpcode.READ: rng.choice([0, 64, 700])}.get(opcode, 8)
            wrs[n].append((opcode, length, rng.choice([0, 0, SendFlags.FENCE])))

    async def driver(ctx):
        for n in range(4):
            await create(ctx, dut, n, psn=0xFFFFF8, max_rd_atomic=limit)
        while any(posted[n] < total for n in range(4)):
            n = rng.randrange(4)
            count = rng.randint(0, min((1 << LOG_SQ) - (posted[n] - len(cqes[n])), total - posted[n]))
            for _ in range(count):
                host.put(n, posted[n], read_wqe(*wrs[n][posted[n]]))
                posted[n] += 1
            if count:
                await offer(ctx, dut.doorbell, {"id": n, "counter": posted[n]})
            await ctx.tick().repeat(rng.choice([1, 20, 60]))
        for _ in range(6000):
            await ctx.tick()
            if all(len(cqes[n]) == total for n in range(4)):
                break

    async def peer(ctx):
        """Takes packets, checks order, PSNs, READ limit and fence against what has landed; answers all."""
        nonlocal fetched
        expected = defaultdict(lambda: 0xFFFFF8)
        async for _, _, valid, ready, job, fetch in ctx.tick().sample(
            dut.job.valid, dut.job.ready, dut.job.payload, dut.read.command.valid & dut.read.command.ready
        ):
            fetched += int(fetch)
            if valid and ready:
                n, header = int(job.header.qpn), job.header
                k = int(job.wqe_index)
                opcode, length, flags = wrs[n][k]
                first = not sent[n] or sent[n][-1] != k
                assert k == (sent[n][-1] + first if sent[n] else 0) and header.psn == expected[n]
                reads = [i for i in range(k) if wrs[n][i][0] in READ_OPS]
                landed = [i for i in reads if (n, i) in in_memory]
                if flags & SendFlags.FENCE and first:
                    assert reads == landed
                packets = max(1, -(-length // 256))
                if opcode in READ_OPS:
                    assert len(reads) - len(landed) < limit
                    assert header.opcode == READ_OPS[opcode].value and header.length == 0 and header.dma_length == length
                    for i in range(packets):
                        code = Opcode.RC_ATOMIC_ACK
                        if opcode == WqeOpcode.READ:
                            code = Opcode.RC_READ_RESP_ONLY if packets == 1 else Opcode.RC_READ_RESP_LAST \
                                if i == packets - 1 else Opcode.RC_READ_RESP_MIDDLE if i else Opcode.RC_READ_RESP_FIRST
                        answers.append({
                            "qpn": n, "psn": expected[n] + i & 0xFFFFFF, "opcode": code.value, "syndrome": ack_syndrome(),
                            "length": min(256, length - 256 * i) if opcode == WqeOpcode.READ else 0})
                elif header.ackreq:
                    answers.append({"qpn": n, "psn": int(header.psn), "opcode": Opcode.RC_ACK.value,
                                    "syndrome": ack_syndrome()})  # fmt: skip
                expected[n] = expected[n] + (packets if opcode in READ_OPS else 1) & 0xFFFFFF
                sent[n].append(k)
            ctx.set(dut.job.ready, rng.random() < 0.8)
            ctx.set(dut.segment.ready, 1)

    async def answer(ctx):
        while True:
            await ctx.tick()
            if answers and rng.random() < 0.3:
                await offer(ctx, dut.response, answers.pop(0))

    async def cqs(ctx):
        async for _, _, valid, ready, cqe in ctx.tick().sample(dut.cqe.valid, dut.cqe.ready, dut.cqe.payload):
            if valid and ready:
                cqes[int(cqe.qpn)].append((int(cqe.wqe_counter), cqe.status))
            ctx.set(dut.cqe.ready, rng.random() < 0.7)

    background = [host.translate, host.memory, peer, answer, cqs, street(dut, rng, delay=(5, 120), seen=in_memory)]
    simulate(dut, driver, background=background, limit=12000)
    for n in range(4):
        assert cqes[n] == [(k, WcStatus.SUCCESS) for k in range(total)], f"QP {n}"
    assert fetched <= 5 * total * 4  # host reads: a sleeping QP fetches nothing
