"""WqeFetch against rings in a Python memory: order per QP, late and failed translations, short spans, bus errors, rate."""

import pytest

from rnic.config import CONFIGS, Params
from rnic.records import ProbeEvent, XlateStatus
from rnic.requester.wqe_fetch import WqeFetch
from tests.unit.requester import offer
from tests.unit.streams import seeded, shared, simulate


class Host:
    """Translation and memory: ring q's byte va lies at ``base[q] + va``; pages of 4 KiB or smaller pieces."""

    def __init__(self, p, dut, rng, *, piece=4096, fail=(), bus_fail=(), stall=0.0, latency=(2, 30)):
        self.p, self.dut, self.rng, self.piece, self.stall, self.latency = p, dut, rng, piece, stall, latency
        self.fail, self.bus_fail = set(fail), set(bus_fail)  # QPNs
        self.base = {q: rng.randrange(1, 1 << 40) << 12 for q in range(p.num_qps)}
        self.commands = []
        self.delay = lambda qpn: rng.randint(*self.latency)

    def byte(self, address):
        return (address * 0x9E3779B1 >> 7) & 0xFF

    def content(self, address, length):
        return bytes(self.byte(a) for a in range(address, address + length))

    def wqe(self, qpn, place, stride):
        return int.from_bytes(self.content(self.base[qpn] + place * stride, stride), "little")

    async def translate(self, ctx):
        """Answers in any order: each request after a random time."""
        xlate = self.dut.xlate
        waiting = []
        now = 0
        ctx.set(xlate.request.ready, 1)
        async for _, _, valid, ready, request, taken, offered in ctx.tick().sample(
            xlate.request.valid, xlate.request.ready, xlate.request.payload, xlate.response.ready, xlate.response.valid
        ):
            now += 1
            if valid and ready:
                assert request.ring == 1 and request.length > 0
                qpn = request.key - self.p.tpt_sq_base
                waiting.append((now + self.delay(qpn), len(self.commands), qpn, request.tag, request.va,
                                request.length))  # fmt: skip
            ctx.set(xlate.request.ready, self.rng.random() >= self.stall)
            if offered and not taken:
                continue
            ctx.set(xlate.response.valid, 0)
            due = [w for w in waiting if w[0] <= now]
            if due:
                waiting.remove(due[0])
                _, _, qpn, tag, va, length = due[0]
                span = min(length, self.piece - va % self.piece)
                status = XlateStatus.BOUNDS if qpn in self.fail else XlateStatus.OK
                ctx.set(xlate.response.payload,
                        {"tag": tag, "status": status, "address": self.base[qpn] + va, "span": span})  # fmt: skip
                ctx.set(xlate.response.valid, 1)

    async def memory(self, ctx):
        read, lanes = self.dut.read, self.p.lanes
        queue = []
        ctx.set(read.command.ready, 1)
        async for _, _, valid, ready, command, taken, offered in ctx.tick().sample(
            read.command.valid, read.command.ready, read.command.payload, read.word.ready, read.word.valid
        ):
            if valid and ready:
                self.commands.append((int(command.address), int(command.length)))
                words = range(command.address, command.address + command.length, lanes)
                failing = any(self.base[q] <= command.address < self.base[q] + 4096 * 1024 for q in self.bus_fail)
                queue += [(a, a == words[-1], failing) for a in words]
            ctx.set(read.command.ready, self.rng.random() >= self.stall)
            if offered and not taken:
                continue
            ctx.set(read.word.valid, 0)
            if queue and self.rng.random() >= self.stall:
                address, last, failing = queue.pop(0)
                ctx.set(read.word.payload, {
                    "data": int.from_bytes(self.content(address, lanes), "little"), "first": 0, "count": lanes,
                    "last": last, "err": last and failing})  # fmt: skip
                ctx.set(read.word.valid, 1)


def random_jobs(p, rng, count):
    jobs, position = [], {q: rng.choice([0, 0xFFF8]) for q in range(p.num_qps)}
    shape = {q: (rng.randrange(3, 8), rng.choice([6, 7])) for q in range(p.num_qps)}
    for _ in range(count):
        q = rng.randrange(4)
        log_sq, log_stride = shape[q]
        ring = 1 << log_sq
        page = 4096 >> log_stride
        n = rng.randint(1, min(p.wqe_batch, ring - position[q] % ring, page - position[q] % page))
        jobs.append({"qpn": q, "index": position[q], "count": n, "epoch": rng.randrange(256), "log_sq": log_sq,
                     "log_stride": log_stride})  # fmt: skip
        position[q] = position[q] + n & 0xFFFF
    return jobs


class Rings:
    """Scheduler and segmenter of some jobs: in order, those that were thrown away again after ``bounced``."""

    def __init__(self, jobs):
        self.queues = {}
        for job in jobs:
            self.queues.setdefault(job["qpn"], []).append(job)
        self.at = dict.fromkeys(self.queues, 0)  # next to send
        self.done, self.bounced = [], 0
        self.seen = dict.fromkeys(self.queues, 0)  # jobs that came back
        self.part = dict.fromkeys(self.queues, 0)  # WQEs of the next
        self.turn = 0

    def next(self):
        qpns = sorted(self.queues)
        for k in range(len(qpns)):
            qpn = qpns[(self.turn + k) % len(qpns)]
            if self.at[qpn] < len(self.queues[qpn]):
                self.turn += k + 1
                self.at[qpn] += 1
                return self.queues[qpn][self.at[qpn] - 1]
        return None

    def accepts(self, wqe):
        qpn = int(wqe.qpn)
        if wqe.bounced:
            assert not self.part[qpn], "a job is thrown away as a whole"
            self.bounced += 1
            self.at[qpn] = self.seen[qpn]
            return False
        if self.seen[qpn] == len(self.queues[qpn]):
            return False
        job = self.queues[qpn][self.seen[qpn]]
        if int(wqe.index) != job["index"] + self.part[qpn] & 0xFFFF:
            return False  # behind one that was thrown away
        self.part[qpn] += 1
        if self.part[qpn] == job["count"]:
            self.part[qpn] = 0
            self.seen[qpn] += 1
            self.done.append(job)
        return True


@pytest.mark.parametrize("name,seed,piece,stall", [
    ("tiny", 1, 4096, 0.3), ("hundred", 2, 4096, 0.3), ("gigabit", 3, 256, 0.2), ("hundred", 4, 64, 0.2), ("tiny", 5, 64, 0.0),
])  # fmt: skip
def test_jobs_to_wqes(name, seed, piece, stall):
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=8))
    dut = shared(WqeFetch, p)
    host = Host(p, dut, rng, piece=piece, fail={2}, bus_fail={3}, stall=stall)
    jobs = random_jobs(p, rng, 40)
    total = sum(job["count"] for job in jobs)
    got = {}
    rings = Rings(jobs)

    async def feed(ctx):
        while len(rings.done) < len(jobs):
            job = rings.next()
            if job is None:
                await ctx.tick()
            else:
                await offer(ctx, dut.job, job)

    async def drain(ctx):
        count = 0
        while count < total:
            ctx.set(dut.wqe.ready, rng.random() >= stall)
            _, _, valid, ready, wqe = await ctx.tick().sample(dut.wqe.valid, dut.wqe.ready, dut.wqe.payload)
            if valid and ready and rings.accepts(wqe):
                count += 1
                data = None if wqe.error else int(wqe.wqe)
                got.setdefault(int(wqe.qpn), []).append((int(wqe.index), int(wqe.epoch), data))
        ctx.set(dut.wqe.ready, 1)
        for _ in range(20):
            _, _, valid = await ctx.tick().sample(dut.wqe.valid)
            assert not valid

    simulate(dut, feed, drain, background=[host.translate, host.memory], limit=6000)
    expected = {}
    for job in jobs:
        for k in range(job["count"]):
            index = job["index"] + k & 0xFFFF
            bad = job["qpn"] in (2, 3)
            data = None if bad else host.wqe(job["qpn"], index % (1 << job["log_sq"]), 1 << job["log_stride"])
            expected.setdefault(job["qpn"], []).append((index, job["epoch"], data))
    assert got == expected
    assert not any(host.base[2] <= a < host.base[2] + (1 << 22) for a, _ in host.commands)


def test_misaligned_ring_is_an_error():
    p = Params(CONFIGS["tiny"])
    dut = shared(WqeFetch, p)
    host = Host(p, dut, seeded(1))
    host.base[1] += 8

    async def bench(ctx):
        ctx.set(dut.wqe.ready, 1)
        await offer(ctx, dut.job, {"qpn": 1, "index": 0, "count": 1, "log_sq": 3, "log_stride": 6})
        await offer(ctx, dut.job, {"qpn": 0, "index": 9, "count": 1, "log_sq": 3, "log_stride": 6})
        errors = {}
        while len(errors) < 2:
            _, _, valid, wqe = await ctx.tick().sample(dut.wqe.valid, dut.wqe.payload)
            if valid:
                errors[int(wqe.qpn)] = int(wqe.error)
        assert errors == {1: 1, 0: 0}
        assert host.commands == [(host.base[0] + 64, 64)]

    simulate(dut, bench, background=[host.translate, host.memory])


def test_a_cold_translation_does_not_stop_other_qps():
    """One QP's translation takes 400 cycles; jobs of others pass it, its own wait and keep their order."""
    p = Params(CONFIGS["gigabit"].replace(num_qps=8))
    dut = shared(WqeFetch, p)
    rng = seeded(9)
    host = Host(p, dut, rng, latency=(4, 4))
    seen = []

    original = host.rng.randint
    first = [True]

    def randint(low, high):
        value = original(low, high)
        if first[0]:
            first[0] = False
            return 400
        return value

    host.rng.randint = randint

    async def feed(ctx):
        await offer(ctx, dut.job, {"qpn": 1, "index": 0, "count": 1, "log_sq": 3, "log_stride": 6})
        await offer(ctx, dut.job, {"qpn": 1, "index": 1, "count": 1, "log_sq": 3, "log_stride": 6})
        for k in range(12):
            await offer(ctx, dut.job, {"qpn": 2, "index": k, "count": 1, "log_sq": 5, "log_stride": 6})

    async def drain(ctx):
        ctx.set(dut.wqe.ready, 1)
        cycle = 0
        while len(seen) < 14:
            _, _, valid, wqe = await ctx.tick().sample(dut.wqe.valid, dut.wqe.payload)
            cycle += 1
            if valid:
                seen.append((cycle, int(wqe.qpn), int(wqe.index)))

    simulate(dut, feed, drain, background=[host.translate, host.memory])
    assert [s[1:] for s in seen] == [(2, k) for k in range(12)] + [(1, 0), (1, 1)]
    assert seen[11][0] < 300


@pytest.mark.parametrize("name,bound", [("hundred", 2), ("tiny", 9)])
def test_rate_and_probe(name, bound):
    """64-byte WQEs: at most 2 cycles each at 512 bits, 8 words (and one idle cycle) at 64."""
    p = Params(CONFIGS[name].replace(num_qps=8, desc_depth=32, wqe_batch=8, sq_outstanding=128))
    dut = shared(WqeFetch, p)
    host = Host(p, dut, seeded(3), latency=(4, 4))
    times, probes = [], []

    async def feed(ctx):
        for k in range(12):
            job = {"qpn": k % 4, "index": 8 * (k // 4), "count": 8, "log_sq": 5, "log_stride": 6}
            await offer(ctx, dut.job, job)

    async def drain(ctx):
        ctx.set(dut.wqe.ready, 1)
        cycle = 0
        while len(times) < 96:
            _, _, valid, probe = await ctx.tick().sample(dut.wqe.valid, dut.probe)
            cycle += 1
            if valid:
                times.append(cycle)
            if probe.valid:
                assert probe.event == ProbeEvent.WQE_FETCH and probe.length == 512
                probes.append((int(probe.qpn), int(probe.index)))

    simulate(dut, feed, drain, background=[host.translate, host.memory])
    assert (times[-1] - times[8]) / (len(times) - 9) <= bound
    assert sorted(probes) == sorted((k % 4, 8 * (k // 4)) for k in range(12))


@pytest.mark.parametrize("name", ["tiny", "gigabit", "hundred"])
@pytest.mark.parametrize("stall", [0.0, 0.2])
def test_many_cold_jobs_do_not_stop_other_qps(name, stall):
    """One QP's translations take 600 cycles and it has any number of jobs: the others keep their rate, it loses none."""
    p = Params(CONFIGS[name].replace(num_qps=8))
    dut = WqeFetch(p)
    rng = seeded(7)
    host = Host(p, dut, rng, latency=(8, 12), stall=stall)
    cold = [{"qpn": 1, "index": k, "count": 1, "log_sq": 7, "log_stride": 6} for k in range(6 if name == "tiny" else 20)]
    warm = [{"qpn": 2 + k % 3, "index": k // 3, "count": 1, "log_sq": 7, "log_stride": 6} for k in range(60)]
    rings = Rings(cold + warm)
    times = {1: [], 2: [], 3: [], 4: []}
    original = host.rng.randint
    host.delay = lambda qpn: 600 if qpn == 1 else original(8, 12)

    async def feed(ctx):
        while len(rings.done) < len(cold + warm):
            job = rings.next()
            await (ctx.tick() if job is None else offer(ctx, dut.job, job))

    async def drain(ctx):
        cycle = 0
        while len(rings.done) < len(cold + warm):
            ctx.set(dut.wqe.ready, rng.random() >= stall)
            _, _, valid, ready, wqe = await ctx.tick().sample(dut.wqe.valid, dut.wqe.ready, dut.wqe.payload)
            cycle += 1
            if valid and ready and rings.accepts(wqe):
                times[int(wqe.qpn)].append(cycle)

    simulate(dut, feed, drain, background=[host.translate, host.memory], limit=12000)
    assert rings.bounced
    assert times[1][0] > 600
    others = sorted(times[2] + times[3] + times[4])
    assert others[-1] < 60 * (26 if name == "tiny" else 14) * (1.5 if stall else 1), others[-1]


def test_a_slow_consumer_is_not_a_slow_translation():
    """Jobs that wait for those before them to be taken are not thrown away."""
    p = Params(CONFIGS["gigabit"].replace(num_qps=8))
    dut = WqeFetch(p)
    host = Host(p, dut, seeded(4), latency=(8, 8))
    jobs = [{"qpn": 1, "index": i, "count": 1, "epoch": 0, "log_sq": 5, "log_stride": 6} for i in range(32)]
    taken = []

    async def feed(ctx):
        for job in jobs:
            await offer(ctx, dut.job, job)

    async def drain(ctx):
        while len(taken) < len(jobs):
            await ctx.tick().repeat(48)
            ctx.set(dut.wqe.ready, 1)
            wqe, = await ctx.tick().sample(dut.wqe.payload).until(dut.wqe.valid)
            ctx.set(dut.wqe.ready, 0)
            taken.append((int(wqe.index), int(wqe.bounced)))

    simulate(dut, feed, drain, background=[host.translate, host.memory], limit=4000)
    assert taken == [(i, 0) for i in range(len(jobs))]


def test_alone():
    """``alone`` until a job of another QP comes, and again when that has left."""
    p = Params(CONFIGS["gigabit"].replace(num_qps=8))
    dut = WqeFetch(p)
    host = Host(p, dut, seeded(3), latency=(8, 8))

    def job(qpn, index):
        return {"qpn": qpn, "index": index, "count": 1, "log_sq": 5, "log_stride": 6}

    async def bench(ctx):
        await offer(ctx, dut.job, job(1, 0))
        await offer(ctx, dut.job, job(1, 1))
        await ctx.tick().repeat(40)
        assert ctx.get(dut.alone) and ctx.get(dut.alone_qpn) == 1
        ctx.set(dut.job.valid, 1)
        ctx.set(dut.job.payload, job(2, 0))
        await ctx.tick().repeat(2)
        assert not ctx.get(dut.alone)
        await ctx.tick().repeat(8)
        ctx.set(dut.job.valid, 0)
        await ctx.tick().repeat(40)
        assert not (ctx.get(dut.alone) and ctx.get(dut.alone_qpn) == 1)
        ctx.set(dut.wqe.ready, 1)
        await ctx.tick().repeat(20)
        await offer(ctx, dut.job, job(1, 2))
        await ctx.tick().repeat(2)
        assert ctx.get(dut.alone) and ctx.get(dut.alone_qpn) == 1

    simulate(dut, bench, background=[host.translate, host.memory])
