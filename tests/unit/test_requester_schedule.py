"""Scheduler: no lost wake-ups, order, limits of a fetch, flush in ERR, rewinds, wrapping counters."""

import dataclasses

import pytest

from rnic.abi import REQUESTER_CFG, SQ_FETCH, CtxTable, QpState
from rnic.config import CONFIGS, Params
from rnic.records import ProbeEvent
from rnic.requester.schedule import Scheduler
from tests.rules import rule
from tests.unit.requester import ctx_words, ctx_write, offer, read_port
from tests.unit.streams import seeded, shared, simulate

RTS, ERR, SQD = QpState.RTS, QpState.ERR, QpState.SQD


@dataclasses.dataclass
class Queue:
    """One SQ as the world outside knows it: counts from 0 on; on the wires + start, mod 2^16."""

    log_sq: int = 3
    log_stride: int = 6
    start: int = 0
    total: int = 0  # WQEs to post in all
    posted: int = 0
    fetched: int = 0
    done: int = 0
    epoch: int = 0

    def counter(self, count):
        return self.start + count & 0xFFFF

    async def set_up(self, ctx, dut, qpn, state=RTS):
        await ctx_words(ctx, dut, CtxTable.SQ_FETCH, qpn, SQ_FETCH.words(index=self.start))
        await ctx_write(ctx, dut, CtxTable.SQ_PRODUCER, qpn, 0, self.start)
        words = REQUESTER_CFG.words(state=state, log_sq=self.log_sq, log_stride=self.log_stride)
        await ctx_words(ctx, dut, CtxTable.REQUESTER_CFG, qpn, words)

    def check(self, p, job):
        assert job.index == self.counter(self.fetched), f"job at {job.index}, expected {self.counter(self.fetched)}"
        assert (job.log_sq, job.log_stride) == (self.log_sq, self.log_stride)
        assert 1 <= job.count <= p.wqe_batch
        ring = 1 << self.log_sq
        assert job.index % ring + job.count <= ring
        first = (job.index % ring) << self.log_stride
        assert first // 4096 == (first + (job.count << self.log_stride) - 1) // 4096
        self.fetched += job.count
        assert self.fetched <= self.posted
        assert self.fetched - self.done <= min(ring, p.sq_outstanding)


def done_port(dut, queues):
    return read_port(dut.done_index_addr, [(dut.done_index, lambda n: queues[n].counter(queues[n].done) if n in queues else 0)])


@pytest.mark.parametrize("name,seed", [("tiny", 1), ("tiny", 2), ("hundred", 3), ("hundred", 4), ("gigabit", 5)])
def test_nothing_is_lost_with_random_events(name, seed):
    """Doorbells, wakes, rewinds and kicks at random times: every posted WQE is fetched once, in order."""
    rng = seeded(seed)
    p = Params(CONFIGS[name].replace(num_qps=8))
    dut = shared(Scheduler, p)
    queues = {
        n: Queue(log_sq=rng.randrange(0, 8), log_stride=rng.choice([6, 7]), start=rng.choice([0, 0xFFF0, 0xFFFF, 5]),
                 total=rng.randrange(15, 40)) for n in rng.sample(range(8), 5)
    }  # fmt: skip
    finished = False
    rewinds = 0

    async def doorbells(ctx):
        for n, q in queues.items():
            await q.set_up(ctx, dut, n)
        while any(q.posted < q.total for q in queues.values()):
            n, q = rng.choice(list(queues.items()))
            count = min(q.total - q.posted, rng.randint(0, (1 << q.log_sq) - (q.posted - q.done)))
            if count:
                q.posted += count
                await offer(ctx, dut.doorbell, {"id": n, "counter": q.counter(q.posted)})
            for _ in range(rng.choice([0, 0, 1, 2, 3, 30])):
                await ctx.tick()

    async def progress(ctx):
        """Retires fetched WQEs, sometimes rewinds; one wake after each change and none without."""
        nonlocal finished, rewinds
        while any(q.done < q.total for q in queues.values()):
            n, q = rng.choice(list(queues.items()))
            if q.fetched > q.done and rng.random() < 0.2 and rewinds < 40:
                rewinds += 1
                back = rng.randint(q.done, q.fetched)
                q.fetched, q.epoch = back, q.epoch + 1 & 0xFF
                await offer(ctx, dut.rewind, {"qpn": n, "index": q.counter(back), "epoch": q.epoch})
            elif q.fetched > q.done:
                q.done += rng.randint(1, q.fetched - q.done)
                await ctx.tick()
                await offer(ctx, dut.wake, {"qpn": n})
            elif rng.random() < 0.1:
                await offer(ctx, dut.kick, {"qpn": n})
            for _ in range(rng.choice([0, 0, 1, 2, 5])):
                await ctx.tick()
        finished = True

    async def fetches(ctx):
        quiet = 0
        while quiet < 60:
            ctx.set(dut.fetch.ready, rng.random() < 0.6)
            _, _, valid, ready, job, flush = await ctx.tick().sample(
                dut.fetch.valid, dut.fetch.ready, dut.fetch.payload, dut.flush.valid)
            assert not flush
            if valid and ready and job.epoch == queues[job.qpn].epoch:  # an older one will be thrown away
                queues[job.qpn].check(p, job)
            quiet = quiet + 1 if finished and not valid else 0

    simulate(dut, doorbells, progress, fetches, background=[done_port(dut, queues)], limit=9000)
    assert all(q.fetched == q.done == q.total for q in queues.values())
    assert rewinds > 0


@pytest.mark.parametrize("event", ["doorbell", "wake", "rewind", "kick"])
def test_one_event_at_every_moment_of_a_turn(event):
    """A turn runs for one doorbell; one further event, and nothing after it, at each cycle around that turn: it must count."""
    p = Params(CONFIGS["tiny"].replace(num_qps=32, wqe_batch=4))
    dut = shared(Scheduler, p)
    delays = range(1, 22)
    queues = {n: Queue(log_sq=4) for n in delays}  # one QP a delay
    jobs = {n: [] for n in delays}
    first, total = {"doorbell": (1, 2), "wake": (2, 3), "rewind": (1, 1), "kick": (1, 1)}[event]

    async def trial(ctx, n):
        q = queues[n]
        state = QpState.RESET if event == "kick" else RTS
        await q.set_up(ctx, dut, n, state=state)
        ctx.set(dut.fetch.ready, 1)
        events = {0: (dut.doorbell, {"id": n, "counter": first})}
        if event == "doorbell":
            events[n] = (dut.doorbell, {"id": n, "counter": total})
        elif event == "rewind":
            events[n] = (dut.rewind, {"qpn": n, "index": 0, "epoch": 9})
        elif event == "wake":  # the second turn finds the outstanding table full
            events[18] = (dut.doorbell, {"id": n, "counter": total})
            events[18 + n] = (dut.wake, {"qpn": n})
        else:
            events[n] = (dut.kick, {"qpn": n})
        for cycle in range(60):
            if cycle in events:
                port, payload = events[cycle]
                ctx.set(port.payload, payload)
                ctx.set(port.valid, 1)
            if cycle == 17 + n and event == "wake":
                q.done = 1
            if event == "kick":
                ctx.set(dut.ctx.payload, {"table": CtxTable.REQUESTER_CFG, "index": n, "bytes": 1, "data": RTS})
                ctx.set(dut.ctx.valid, cycle == n - 1)
            _, _, valid, job = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload)
            ctx.set(dut.doorbell.valid, 0)
            if cycle in events:
                ctx.set(events[cycle][0].valid, 0)
            if valid:
                jobs[n].append((int(job.index), int(job.count), int(job.epoch)))

    async def bench(ctx):
        await ctx.tick().repeat(40)
        for n in delays:
            await trial(ctx, n)

    simulate(dut, bench, background=[done_port(dut, queues)])
    for n in delays:
        if event == "rewind":
            assert jobs[n][-1] == (0, 1, 9), n
        else:
            assert sum(count for _, count, _ in jobs[n]) == total, (n, jobs[n])
            assert [i for i, _, _ in jobs[n]] == [sum(c for _, c, _ in jobs[n][:k]) for k in range(len(jobs[n]))]


@pytest.mark.parametrize("width", ["tiny", "hundred"])
def test_rate_and_turns(width):
    """Every QP has much to do: one turn per at most 9 cycles, strictly in turn."""
    p = Params(CONFIGS[width].replace(num_qps=8, sq_outstanding=128))
    dut = shared(Scheduler, p)
    queues = {n: Queue(log_sq=7, log_stride=6) for n in range(8)}
    jobs = []

    async def bench(ctx):
        for n, q in queues.items():
            await q.set_up(ctx, dut, n)
            q.posted = 128
        for n in queues:
            await offer(ctx, dut.doorbell, {"id": n, "counter": 128})
        ctx.set(dut.fetch.ready, 1)
        for cycle in range(330):
            _, _, valid, job, probe = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload, dut.probe)
            assert probe.valid == valid or cycle == 0  # the first job may have waited for ready
            if probe.valid:
                assert (probe.event, probe.qpn, probe.index, probe.length) == (
                    ProbeEvent.SCHEDULED, job.qpn, job.index, job.count)
            if valid:
                queues[job.qpn].check(p, job)
                jobs.append((cycle, job.qpn))

    simulate(dut, bench, background=[done_port(dut, queues)])
    gaps = [b - a for (a, _), (b, _) in zip(jobs, jobs[1:], strict=False)]
    assert len(jobs) >= 36 and max(gaps) <= 9
    assert all({n for _, n in jobs[at : at + 8]} == set(range(8)) for at in range(8, len(jobs) - 8))


def test_latency_from_doorbell():
    p = Params(CONFIGS["tiny"])
    dut = shared(Scheduler, p)
    queues = {3: Queue(start=0xFFFF, posted=1)}
    seen = []

    async def bench(ctx):
        await queues[3].set_up(ctx, dut, 3)
        await ctx.tick().repeat(20)
        ctx.set(dut.doorbell.payload, {"id": 3, "counter": 0x10000})  # the upper bits of the counter are not used
        ctx.set(dut.doorbell.valid, 1)
        ctx.set(dut.fetch.ready, 1)
        for cycle in range(40):
            _, _, valid, job, probe = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload, dut.probe_doorbell)
            ctx.set(dut.doorbell.valid, 0)
            if valid:
                seen.append((cycle, job.index, job.count))
            if probe.valid:
                assert (probe.event, probe.qpn, probe.index) == (ProbeEvent.SQ_DOORBELL, 3, 0)

    simulate(dut, bench, background=[done_port(dut, queues)])
    assert [job[1:] for job in seen] == [(0xFFFF, 1)]
    assert seen[0][0] <= 12


@rule("R-ERR-5")
def test_err_flushes_and_other_states_do_nothing():
    """R-ERR-5: each doorbell in ERR gives a flush; a producer beyond the ring is a driver fault and counts as a full ring."""
    p = Params(CONFIGS["tiny"])
    dut = shared(Scheduler, p)
    queues = {1: Queue(start=0xFFFE, log_sq=2), 2: Queue(log_sq=2)}

    async def flushes(ctx, cycles=40, ready=1):
        out = []
        ctx.set(dut.flush.ready, ready)
        for _ in range(cycles):
            _, _, valid, item, fetch = await ctx.tick().sample(dut.flush.valid, dut.flush.payload, dut.fetch.valid)
            assert not fetch
            if valid and ready:
                out.append((item.qpn, item.producer))
        return out

    async def bench(ctx):
        await queues[1].set_up(ctx, dut, 1, state=SQD)
        await offer(ctx, dut.doorbell, {"id": 1, "counter": 0xFFFF})
        assert await flushes(ctx) == []
        await ctx_write(ctx, dut, CtxTable.REQUESTER_CFG, 1, 0, ERR, mask=1)
        await offer(ctx, dut.kick, {"qpn": 1})
        assert await flushes(ctx) == [(1, 0xFFFF)]
        queues[1].done = 1
        await offer(ctx, dut.wake, {"qpn": 1})
        assert await flushes(ctx) == []  # nothing left to flush
        await offer(ctx, dut.doorbell, {"id": 1, "counter": 2})
        assert await flushes(ctx) == [(1, 2)]
        await offer(ctx, dut.doorbell, {"id": 1, "counter": 2000})
        assert await flushes(ctx) == [(1, 3)]  # done 0xFFFF + 4 entries
        # A completer that takes no flush does not stop the others.
        await queues[2].set_up(ctx, dut, 2)
        queues[2].posted = 4
        await offer(ctx, dut.doorbell, {"id": 1, "counter": 2})
        assert await flushes(ctx, ready=0) == []
        await offer(ctx, dut.doorbell, {"id": 1, "counter": 2})
        await offer(ctx, dut.doorbell, {"id": 2, "counter": 4})
        ctx.set(dut.fetch.ready, 1)
        for _ in range(60):
            _, _, valid, job = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload)
            if valid:
                assert job.qpn == 2
                queues[2].check(p, job)
        assert queues[2].fetched == 2  # sq_outstanding
        assert await flushes(ctx) == [(1, 2), (1, 2)]

    simulate(dut, bench, background=[done_port(dut, queues)])


@pytest.mark.parametrize("log_sq,count", [(0, 1), (3, 8), (15, 16)])
def test_producer_fault_fetches_no_more_than_the_ring_holds(log_sq, count):
    p = Params(CONFIGS["hundred"].replace(num_qps=4, sq_outstanding=16))
    dut = shared(Scheduler, p)
    queues = {0: Queue(log_sq=log_sq, start=7, posted=0xFFFF)}

    async def bench(ctx):
        await queues[0].set_up(ctx, dut, 0)
        await offer(ctx, dut.doorbell, {"id": 0, "counter": 6})
        ctx.set(dut.fetch.ready, 1)
        for _ in range(80):
            _, _, valid, job = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload)
            if valid:
                queues[0].check(p, job)
        assert queues[0].fetched == count

    simulate(dut, bench, background=[done_port(dut, queues)])


def test_reset_command_wins_over_a_turn():
    """SQ_FETCH written by a command while a turn of that QP reads and writes it: the command's value stays."""
    p = Params(CONFIGS["tiny"].replace(num_qps=2, sq_outstanding=16))

    for delay in range(12):
        dut = shared(Scheduler, p)
        queues = {1: Queue(posted=1)}
        indices = []

        async def bench(ctx, dut=dut, queues=queues, indices=indices, delay=delay):
            await queues[1].set_up(ctx, dut, 1)
            await offer(ctx, dut.doorbell, {"id": 1, "counter": 1})
            ctx.set(dut.fetch.ready, 1)
            for _ in range(delay):
                await ctx.tick()
            await ctx_write(ctx, dut, CtxTable.REQUESTER_CFG, 1, 0, QpState.RESET, mask=1)
            await ctx_write(ctx, dut, CtxTable.SQ_FETCH, 1, 0, 5)
            await ctx.tick().repeat(20)
            await ctx_write(ctx, dut, CtxTable.REQUESTER_CFG, 1, 0, RTS, mask=1)
            await offer(ctx, dut.doorbell, {"id": 1, "counter": 6})
            for _ in range(20):
                _, _, valid, job = await ctx.tick().sample(dut.fetch.valid, dut.fetch.payload)
                if valid:
                    indices.append(int(job.index))

        simulate(dut, bench, background=[done_port(dut, queues)])
        assert indices[-1] == 5, (delay, indices)
