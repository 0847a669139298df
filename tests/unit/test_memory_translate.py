# amaranth: UnusedElaboratable=no
"""Translation block against a Python model: checks, page tables, cache, walks, invalidation."""

import pytest

from rnic.abi import TPT_ENTRY, Access, CtxTable
from rnic.config import CONFIGS, Params
from rnic.memory.translate import RESPONSES, Translate
from rnic.records import XlateStatus
from tests.rules import rule
from tests.unit.streams import seeded, simulate

TOP = 1 << 64
CLIENTS = [("gather", 5), ("place", 3), ("ring", 4)]


class Tables:
    """The TPT and the page tables as software sees them; page-table entries come into being when first looked at."""

    def __init__(self, p, rng):
        self.p, self.rng = p, rng
        self.entries = [[{}] for _ in range(p.tpt_entries)]  # versions of every entry, {} = not valid
        self.memory: dict[int, tuple[int, int, int]] = {}  # address -> (value, TPT index, version)
        self.broken: set[int] = set()  # page-table addresses that answer with an error
        self.next_table = 1 << 40

    def fresh_table(self):
        self.next_table += 1 << 45  # room for any table; the lower bits random but aligned
        return self.next_table + 8 * self.rng.randrange(1 << 20)

    def new(self, index, **fields):
        """A new version of an entry, as words to write."""
        self.entries[index].append(fields)
        return TPT_ENTRY.words(valid=1, **fields) if fields else [0]

    def _pte(self, address, align, index, version):
        if address not in self.memory:
            self.memory[address] = (self.rng.getrandbits(64 - align) << align, index, version)
        return self.memory[address][0]

    def answer(self, request, version=None):
        """(status, address, span) the request must get under a version of its entry (default: the newest)."""
        index = request["key"] if request["ring"] else request["key"] >> 8
        if index >= (self.p.tpt_entries if request["ring"] else self.p.num_mrs):
            return XlateStatus.KEY, None, None
        number = len(self.entries[index]) - 1 if version is None else version
        e = self.entries[index][number]
        if not e or not request["ring"] and e["variant"] != request["key"] & 0xFF:
            return XlateStatus.KEY, None, None
        if not request["ring"]:
            if e["pd"] != request["pd"]:
                return XlateStatus.PD, None, None
            if request["rights"] & ~e["rights"]:
                return XlateStatus.RIGHTS, None, None
        va, length = request["va"], request["length"]
        if va < e["base"] or va + length > e["base"] + e["length"]:  # Python integers do not wrap
            return XlateStatus.BOUNDS, None, None
        offset = va - e["base"]
        if e["levels"] == 0:
            address = (e["table_addr"] + offset) % TOP
        else:
            size = 1 << e["log_page"]
            page, inside = divmod(offset + e["base"] % size, size)
            reads = []
            if e["levels"] == 2:
                reads.append(e["table_addr"] + 8 * (page // 512))
                reads.append(self._pte(reads[0], 12, index, number) + 8 * (page % 512))
            else:
                reads.append(e["table_addr"] + 8 * page)
            address = self._pte(reads[-1], e["log_page"], index, number) + inside
            if self.broken.intersection(reads):
                return XlateStatus.HOST_BUS, None, None
        return XlateStatus.OK, address, min(length, 4096 - address % 4096)

    def random_entry(self, levels=None, big=True):
        rng = self.rng
        levels = rng.randrange(3) if levels is None else levels
        log_page = rng.randrange(12, 31)
        pages = rng.choice([1, 2, 3, 600, 5000]) if big else rng.choice([1, 2, 4])
        length = max(1, (pages << log_page) - rng.randrange(1 << log_page))
        base = rng.choice([0, rng.getrandbits(32), rng.getrandbits(64), TOP - length, TOP - length - rng.getrandbits(20)])
        base = max(0, min(base, TOP - length))
        return {
            "levels": levels, "variant": rng.getrandbits(8), "rights": rng.getrandbits(4), "log_page": log_page,
            "pd": rng.getrandbits(24), "base": base, "length": length,
            "table_addr": self.fresh_table() if levels else rng.getrandbits(64),
        }  # fmt: skip

    def random_request(self, index, ring, hot=0.5):
        """An access to an entry, mostly a legal one. ``hot``: how often it falls into the first or last bytes."""
        rng = self.rng
        e = self.entries[index][-1] or self.entries[index][-2] if len(self.entries[index]) > 1 else {}
        if not e:
            e = {"variant": 0, "pd": 0, "rights": 0, "base": 0, "length": 1 << 20}
        room = min(e["length"], 1 << 31)
        length = rng.choice([1, min(room, 4096), min(room, 4097), rng.randint(1, min(room, 9000)), rng.randint(1, room)])
        offset = rng.choice([0, e["length"] - length]) if rng.random() < hot else rng.randint(0, e["length"] - length)
        request = {
            "ring": ring, "key": index if ring else index << 8 | e["variant"], "pd": rng.getrandbits(24) if ring else e["pd"],
            "rights": rng.getrandbits(8) if ring else e["rights"] & rng.getrandbits(4), "va": e["base"] + offset,
            "length": length,
        }  # fmt: skip
        match rng.randrange(12):
            case 0:
                request["key"] ^= 1 << rng.randrange(32)
            case 1:
                request["pd"] ^= 1 << rng.randrange(24)
            case 2:
                request["rights"] ^= 1 << rng.randrange(5)
            case 3:
                request["length"] = min(e["length"] - offset + rng.choice([1, 7, 4096]), 1 << 31)
            case 4:
                request["va"] = (request["va"] + rng.choice([-1, 1, -length, TOP - length, 1 << 63])) % TOP
        return request


class Bench:
    """Runs clients, the TPT writer and the host memory behind ``walk``."""

    def __init__(self, config, seed, clients=CLIENTS):
        self.rng = seeded(seed)
        self.p = Params(config)
        self.dut = Translate(self.p, clients)
        self.tables = Tables(self.p, self.rng)
        self.clients = dict(clients)
        self.done = 0  # clients that have finished
        self.started = [0] * self.p.tpt_entries  # versions the writer has begun to write
        self.complete = [0] * self.p.tpt_entries  # versions whose write has been acknowledged
        self.hits = self.misses = 0
        self.reads = []

    async def write(self, ctx, index, words):
        """Words 1.. first, word 0 (valid) last; returns the cycles the last word took."""
        bus = self.dut.ctx
        cycles = 0
        for word in [*range(1, len(words)), 0]:
            if word == 0:
                self.started[index] += 1
            ctx.set(bus.payload, {"table": CtxTable.TPT, "index": index, "word": word, "bytes": 15, "data": words[word]})
            ctx.set(bus.valid, 1)
            ready, cycles = False, 0
            while not ready:
                _, _, ready = await ctx.tick().sample(bus.ready)
                cycles += 1
            ctx.set(bus.valid, 0)
        self.complete[index] += 1
        return cycles

    def host(self, latency, p_stall):
        """Host memory: answers reads in order, each ``latency()`` cycles after its command."""
        walk, rng = self.dut.walk, self.rng

        async def run(ctx):
            queue, now = [], 0
            while self.done < len(self.clients) or queue:
                ctx.set(walk.command.ready, rng.random() >= p_stall)
                if queue and queue[0][0] <= now and not ctx.get(walk.word.valid):
                    address = queue[0][1]
                    value, index, version = self.tables.memory[address]
                    lane = address % self.p.lanes
                    ctx.set(walk.word.payload, {
                        "data": value << 8 * lane | rng.getrandbits(8 * lane), "first": lane, "count": 8, "last": 1,
                        "err": address in self.tables.broken,
                    })
                    ctx.set(walk.word.valid, 1)
                _, _, taken, valid, command, ready, hit, miss = await ctx.tick().sample(
                    walk.command.ready, walk.command.valid, walk.command.payload, walk.word.ready, self.dut.hit, self.dut.miss)
                now += 1
                self.hits += hit
                self.misses += miss
                if ctx.get(walk.word.valid) and ready:
                    queue.pop(0)
                    ctx.set(walk.word.valid, 0)
                if taken and valid:
                    assert command.length == 8
                    address = int(command.address)
                    assert address in self.tables.memory, f"read of {address:#x}, which is no page-table entry"
                    _, index, version = self.tables.memory[address]
                    assert self.complete[index] <= version <= self.started[index], "walk of a purged entry"
                    self.reads.append(address)
                    queue.append((now + latency(), address))
        return run

    def client(self, name, requests, p_stall=0.3, p_idle=0.3, counts=True):
        """Sends ``requests`` (dicts or functions making one) with free tags, checks the answers.

        ``counts``: this is all the client has to do.
        """
        port, rng, tables = getattr(self.dut, name), self.rng, self.tables
        tags = list(range(1 << self.clients[name]))
        open_requests = {}

        async def run(ctx):
            todo = list(requests)
            current = None
            while todo or open_requests or current:
                if current is None and todo and tags and rng.random() >= p_idle:
                    request = todo.pop(0)
                    request = request() if callable(request) else request
                    current = request | {"tag": tags.pop(rng.randrange(len(tags)))}
                    tables.answer(current)  # makes the page-table entries
                    ctx.set(port.request.payload, current)
                    ctx.set(port.request.valid, 1)
                    index = current["key"] if current["ring"] else current["key"] >> 8
                    low = self.complete[index] if index < self.p.tpt_entries else 0
                ctx.set(port.response.ready, rng.random() >= p_stall)
                _, _, taken, valid, ready, answer = await ctx.tick().sample(
                    port.request.ready, port.response.valid, port.response.ready, port.response.payload)
                if valid and ready:
                    request, low_version = open_requests.pop(int(answer.tag))
                    tags.append(int(answer.tag))
                    self.check(request, low_version, answer)
                if current is not None and taken:
                    open_requests[current["tag"]] = current, low
                    ctx.set(port.request.valid, 0)
                    current = None
            self.done += counts
        return run

    def check(self, request, low, answer):
        index = request["key"] if request["ring"] else request["key"] >> 8
        high = self.started[index] if index < self.p.tpt_entries else 0
        got = answer.status, int(answer.address), int(answer.span)
        wanted = [self.tables.answer(request, v) for v in range(low, high + 1)] or [self.tables.answer(request)]
        for status, address, span in wanted:
            if got[0] == status and (status != XlateStatus.OK or got[1:] == (address, span)):
                return
        raise AssertionError(f"{request} answered {got}, wanted one of {wanted}")


@rule("R-MR-1", "R-MR-2", "R-MR-4", "R-MR-5", "R-MR-6", "8.1#7")
@pytest.mark.parametrize("config,seed", [("tiny", 1), ("tiny", 2), ("gigabit", 3), ("hundred", 4)])
def test_random_regions_against_the_model(config, seed):
    bench = Bench(CONFIGS[config].replace(num_mrs=16, num_qps=16), seed)
    rng, tables, p = bench.rng, bench.tables, bench.p
    regions = [rng.randrange(p.num_mrs) for _ in range(5)] + [p.num_mrs - 1]
    rings = [rng.randrange(p.num_mrs, p.tpt_entries) for _ in range(3)] + [p.tpt_entries - 1]
    programmed = False

    async def setup_then(ctx, run):
        while not programmed:
            await ctx.tick()
        await run(ctx)

    async def program(ctx):
        nonlocal programmed
        for index in sorted({*regions, *rings}):
            words = tables.new(index, **tables.random_entry(levels=index % 3))
            await bench.write(ctx, index, words)
        programmed = True

    def requests(indices, ring, count):
        return [lambda: tables.random_request(rng.choice(indices), ring) for _ in range(count)]

    runs = [bench.client("gather", requests(regions, 0, 90)), bench.client("place", requests(regions, 0, 90)),
            bench.client("ring", requests(rings, 1, 60))]
    simulate(bench.dut, program, bench.host(lambda: rng.choice([0, 3, 30]), 0.3),
             *(lambda ctx, run=run: setup_then(ctx, run) for run in runs), limit=12000)
    assert bench.hits and bench.misses


def _one_region(bench, **entry):
    """Directed: an MR at index 1 and a function that runs requests one after the other."""
    fields = {"levels": 0, "variant": 0x5A, "rights": 15, "log_page": 12, "pd": 7, "base": 0x1000, "length": 0x1000,
              "table_addr": 0x7000} | entry  # fmt: skip
    words = bench.tables.new(1, **fields)

    def request(va, length, **changes):
        return {"ring": 0, "key": 0x15A, "pd": 7, "rights": 1, "va": va, "length": length} | changes
    return words, request


def _run(bench, words, requests, name="gather", latency=5, **stalls):
    async def program(ctx):
        await bench.write(ctx, 1, words)
        await bench.client(name, requests, **stalls)(ctx)
    bench.done = len(bench.clients) - 1
    simulate(bench.dut, program, bench.host(lambda: latency, 0.0), limit=20000)


@rule("R-MR-2")
def test_bounds_do_not_wrap():
    """C60 (CVE-2016-8636): the end of the access is never computed modulo 2^64."""
    bench = Bench(CONFIGS["tiny"], 0)
    words, request = _one_region(bench)
    cases = [
        (request(0xFFFF_FFFF_FFFF_F000, 0x2000), XlateStatus.BOUNDS),
        (request(0x1FFF, 2), XlateStatus.BOUNDS),
        (request(0x1000, 0x1001), XlateStatus.BOUNDS),
        (request(0xFFF, 1), XlateStatus.BOUNDS),
        (request(0x2000, 1), XlateStatus.BOUNDS),
        (request(0x1FFF, 1), XlateStatus.OK),
        (request(0x1000, 0x1000), XlateStatus.OK),
    ]
    for case, status in cases:
        assert bench.tables.answer(case)[0] == status  # the model agrees with the case's text
    _run(bench, words, [case for case, _ in cases])


@rule("R-MR-6")
@pytest.mark.parametrize("length", [1 << 32, (1 << 32) + 4096])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_regions_of_4_gib_and_more(length, levels):
    """C76: the length is 64 bits everywhere."""
    bench = Bench(CONFIGS["tiny"], 0)
    base = 0x1234_5678_9000
    words, request = _one_region(bench, length=length, base=base, levels=levels, table_addr=1 << 44)
    cases = [(request(base + length - 1, 1), XlateStatus.OK), (request(base + length - 1, 2), XlateStatus.BOUNDS),
             (request(base + length, 1), XlateStatus.BOUNDS), (request(base, 1 << 31), XlateStatus.OK)]
    for case, status in cases:
        assert bench.tables.answer(case)[0] == status
    _run(bench, words, [case for case, _ in cases])


@rule("8.1#7", "R-MR-4")
def test_order_of_checks():
    bench = Bench(CONFIGS["tiny"], 0)
    words, request = _one_region(bench, rights=Access.LOCAL_WRITE)
    bad = {"key": 0x15B, "pd": 8, "rights": 2, "va": 0}
    wanted = [XlateStatus.KEY, XlateStatus.PD, XlateStatus.RIGHTS, XlateStatus.BOUNDS, XlateStatus.OK]
    requests = []
    for status in wanted:
        requests.append(request(0x1000, 4) | bad)
        assert bench.tables.answer(requests[-1])[0] == status
        if bad:
            bad.pop(next(iter(bad)))
    _run(bench, words, requests)


@rule("R-MR-1")
def test_keys_out_of_range():
    """A user's key reaches no ring entry; a ring number past the table reaches nothing (R-MR-1)."""
    bench = Bench(CONFIGS["tiny"], 0)
    p = bench.p
    words, request = _one_region(bench)
    keys = [(p.num_mrs << 8) | 0x5A, (p.num_mrs + 1) << 8 | 0x5A, 0xFFFF_FF5A, 1 << 31 | 0x15A]
    requests = [request(0x1000, 4, key=key) for key in keys]
    requests += [request(0x1000, 4, key=key, ring=1) for key in (p.tpt_entries, 1 << 31 | 1, (1 << 32) - 1)]
    for item in requests:
        assert bench.tables.answer(item)[0] == XlateStatus.KEY
    _run(bench, words, requests + [request(0x1000, 4), request(0x1000, 4, key=1, ring=1, pd=9, rights=255)])


@pytest.mark.parametrize("levels", [1, 2])
def test_unreadable_page_table(levels):
    """Neither level's read error fills the cache; the next page is served."""
    bench = Bench(CONFIGS["tiny"], 0)
    words, request = _one_region(bench, levels=levels, length=1 << 23, table_addr=1 << 44)
    first, second = request(0x1000, 4), request(0x1000 + (1 << 22), 4)
    for item in (first, second):
        assert bench.tables.answer(item)[0] == XlateStatus.OK
    bench.tables.broken.add(1 << 44)
    assert bench.tables.answer(first)[0] == XlateStatus.HOST_BUS
    if levels == 1:
        assert bench.tables.answer(second)[0] == XlateStatus.OK
    _run(bench, words, [first, first, second, second, first], latency=2)
    assert len([a for a in bench.reads if a == 1 << 44]) >= 3


def test_latency_and_rate_of_hits():
    """One client alone: 11 cycles, then an answer every cycle."""
    bench = Bench(CONFIGS["gigabit"], 0)
    words, request = _one_region(bench)
    port = bench.dut.place
    times = []

    async def run(ctx):
        await bench.write(ctx, 1, words)
        ctx.set(port.response.ready, 1)
        ctx.set(port.request.valid, 1)
        ctx.set(port.request.payload, request(0x1004, 4) | {"tag": 1})
        await ctx.tick()  # the turn comes to this client
        for cycle in range(80):
            _, _, ready, valid, answer = await ctx.tick().sample(
                port.request.ready, port.response.valid, port.response.payload)
            assert ready, "the pipe stopped"
            if valid:
                assert answer.address == 0x7004 and answer.span == 4
                times.append(cycle)
    simulate(bench.dut, run)
    assert times == list(range(11, 80))


def test_clients_share_the_pipe():
    """Three clients that always ask get a third each, and no cycle is lost."""
    bench = Bench(CONFIGS["gigabit"], 0)
    words, request = _one_region(bench)
    ports = [getattr(bench.dut, name) for name, _ in CLIENTS]
    taken = [0] * len(ports)

    async def run(ctx):
        await bench.write(ctx, 1, words)
        for port in ports:
            ctx.set(port.response.ready, 1)
            ctx.set(port.request.valid, 1)
            ctx.set(port.request.payload, request(0x1004, 4))
        for _ in range(90):
            sampled = await ctx.tick().sample(*(port.request.ready for port in ports))
            for i, ready in enumerate(sampled[2:]):
                taken[i] += ready
    simulate(bench.dut, run)
    assert sum(taken) == 90 and max(taken) - min(taken) <= 2  # the turn stands somewhere at the start


def test_hits_pass_walks_and_stalled_clients():
    """All walk slots and the way to one client blocked: another client's hits keep coming."""
    bench = Bench(CONFIGS["tiny"], 0)
    rng, tables, dut = bench.rng, bench.tables, bench.dut
    paged = tables.random_entry(levels=1, big=False) | {"log_page": 12, "base": 0, "length": 1 << 20}
    flat = tables.random_entry(levels=0) | {"rights": 15}
    miss = {"ring": 0, "key": 2 << 8 | paged["variant"], "pd": paged["pd"], "rights": 0, "length": 8}
    words2, words1 = tables.new(2, **paged), tables.new(1, **flat)
    good = {"ring": 0, "key": 1 << 8 | flat["variant"], "pd": flat["pd"], "rights": 0, "va": flat["base"], "length": 1}
    finished = 0

    async def run(ctx):
        nonlocal finished
        await bench.write(ctx, 2, words2)
        await bench.write(ctx, 1, words1)
        # 8 misses: the host never answers. `ring` gets hits and never takes an answer.
        for tag in range(8):
            ctx.set(dut.place.request.payload, miss | {"tag": tag, "va": tag << 12})
            ctx.set(dut.place.request.valid, 1)
            await ctx.tick().until(dut.place.request.ready)
        ctx.set(dut.place.request.valid, 0)
        ctx.set(dut.ring.request.payload, good | {"tag": 0})
        ctx.set(dut.ring.request.valid, 1)
        taken = 0
        for _ in range(3 * RESPONSES):
            _, _, ready = await ctx.tick().sample(dut.ring.request.ready)
            taken += ready
        assert taken == RESPONSES
        ctx.set(dut.gather.response.ready, 1)
        ctx.set(dut.gather.request.payload, good | {"tag": 3})
        ctx.set(dut.gather.request.valid, 1)
        for _ in range(100):
            _, _, valid, answer = await ctx.tick().sample(dut.gather.response.valid, dut.gather.response.payload)
            if valid:
                assert (answer.status, answer.tag, answer.address) == (XlateStatus.OK, 3, flat["table_addr"])
                finished += 1
        ctx.set(dut.gather.request.valid, 0)
        # Now the host answers: all misses come to their end with a two-entry cache and one slot.
        ctx.set(dut.place.response.ready, 1)
        ctx.set(dut.walk.command.ready, 1)
        answers = {}
        pending = []
        for _ in range(600):
            if pending:
                ctx.set(dut.walk.word.payload, {"data": tables.memory[pending[0]][0], "first": 0, "count": 8, "last": 1})
            ctx.set(dut.walk.word.valid, bool(pending))
            _, _, valid, answer, asked, command, ready = await ctx.tick().sample(
                dut.place.response.valid, dut.place.response.payload, dut.walk.command.valid, dut.walk.command.payload,
                dut.walk.word.ready)
            if ready and pending:
                pending.pop(0)
            if asked:
                tables.answer(miss | {"va": int(command.address - paged["table_addr"]) // 8 << 12})
                pending.append(int(command.address))
            if valid:
                answers[int(answer.tag)] = int(answer.address)
        assert answers == {tag: tables.answer(miss | {"va": tag << 12})[1] for tag in range(8)}

    simulate(bench.dut, run, limit=3000)
    assert finished >= 88
    assert rng


@pytest.mark.parametrize("config,seed", [("tiny", 5), ("tiny", 6), ("gigabit", 7), ("gigabit", 8)])
def test_invalidation_races(config, seed):
    """Regions die and come back under running traffic: an answer given to a request made after the end of the command never
    comes from the old region, and no page table is read after its region is gone."""
    bench = Bench(CONFIGS[config].replace(num_mrs=4, num_qps=4, num_cqs=4, tlb_entries=8 if config == "gigabit" else 2), seed)
    rng, tables = bench.rng, bench.tables
    stop = 0
    indices = [0, 1, 2]

    def small():
        return tables.random_entry(levels=rng.choice([0, 1, 1, 2]), big=False) | {"variant": 0x11, "pd": 5, "rights": 15,
                                                                                  "base": 0x4000, "log_page": 12,
                                                                                  "length": 0x4000}

    def request():
        return {"ring": 0, "key": rng.choice(indices) << 8 | 0x11, "pd": 5, "rights": 1, "va": 0x4000 + rng.randrange(0x4000),
                "length": 1}

    async def writer(ctx):
        nonlocal stop
        for _ in range(18):
            index = rng.choice(indices)
            words = tables.new(index) if tables.entries[index][-1] else tables.new(index, **small())
            await bench.write(ctx, index, words)
            for _ in range(rng.randrange(30)):
                await ctx.tick()
        stop = 1

    def client_until(name):
        one = bench.client

        async def run(ctx):
            while not stop:
                await one(name, [request for _ in range(12)], p_idle=0.1, counts=False)(ctx)
            bench.done += 1
        return run

    def known(index, version):
        """All page-table entries of all versions exist before the hardware may look at them."""
        for page in range(4):
            tables.answer({"ring": 0, "key": index << 8 | 0x11, "pd": 5, "rights": 1, "va": 0x4000 + (page << 12), "length": 1},
                          version)

    original = tables.new

    def new(index, **fields):
        words = original(index, **fields)
        known(index, len(tables.entries[index]) - 1)
        return words
    tables.new = new
    simulate(bench.dut, writer, bench.host(lambda: rng.choice([0, 10, 40]), 0.2),
             *(client_until(name) for name in ("gather", "place", "ring")), limit=20000)
    assert bench.misses and bench.hits


@rule("R-MR-1")
@pytest.mark.parametrize("config", ["tiny", "gigabit"])
def test_answers_at_once_and_ends_of_keys(config):
    """`hit_only`: MISS at once while all walks are under way, an error as ever, the address once the page is in the cache.
    `invalidate`: only with the right; then the key is none, in the cache neither."""
    bench = Bench(CONFIGS[config], 3)
    tables, dut = bench.tables, bench.dut
    ends = int(Access.REMOTE_INVALIDATE)
    paged = tables.random_entry(levels=1, big=False) | {"log_page": 12, "base": 0, "length": 1 << 20, "rights": ends}
    kept = tables.random_entry(levels=0) | {"rights": 15}
    words2, words1 = tables.new(2, **paged), tables.new(1, **kept)
    quick = {"ring": 0, "key": 2 << 8 | paged["variant"], "pd": paged["pd"], "rights": 0, "va": 64, "length": 8, "hit_only": 1}
    end = quick | {"rights": ends, "va": 1 << 40, "hit_only": 0, "invalidate": 1}
    ports = {"place": dut.place, "ring": dut.ring}

    async def ask(ctx, name, request, limit=60):
        """Offers a request, returns its answer and the cycles it took; the host answers page-table reads when it may."""
        port = ports[name]
        ctx.set(port.request.payload, request)
        ctx.set(port.request.valid, 1)
        await ctx.tick().until(port.request.ready)
        ctx.set(port.request.valid, 0)
        ctx.set(port.response.ready, 1)
        for cycle in range(limit):
            _, _, valid, answer = await ctx.tick().sample(port.response.valid, port.response.payload)
            if valid:
                return answer.status, int(answer.address), cycle
        raise TimeoutError(request)

    async def run(ctx):
        await bench.write(ctx, 2, words2)
        await bench.write(ctx, 1, words1)
        for tag in range(2 * bench.p.walks):  # walks that get no answer yet
            ctx.set(dut.gather.request.payload, quick | {"tag": tag, "va": (1 + tag) << 12, "hit_only": 0})
            ctx.set(dut.gather.request.valid, 1)
            await ctx.tick().until(dut.gather.request.ready)
        ctx.set(dut.gather.request.valid, 0)
        for _ in range(3):
            status, _, cycles = await ask(ctx, "place", quick | {"tag": 1})
            assert status == XlateStatus.MISS and cycles <= 14
        assert (await ask(ctx, "place", quick | {"tag": 2, "rights": 1}))[0] == XlateStatus.RIGHTS
        assert (await ask(ctx, "place", quick | {"tag": 2, "va": 1 << 20}))[0] == XlateStatus.BOUNDS
        # The host answers; the page is walked for `ring` at last.
        ctx.set(dut.gather.response.ready, 1)
        ctx.set(dut.walk.command.ready, 1)
        ctx.set(dut.ring.request.payload, quick | {"tag": 3, "hit_only": 0})
        ctx.set(dut.ring.request.valid, 1)
        ctx.set(dut.ring.response.ready, 1)
        pending, found = [], 0
        for _ in range(400):
            if pending:
                lane = pending[0] % bench.p.lanes
                ctx.set(dut.walk.word.payload, {"data": tables.memory[pending[0]][0] << 8 * lane, "first": lane, "count": 8,
                                                "last": 1})
            ctx.set(dut.walk.word.valid, bool(pending))
            _, _, asked, command, ready, taken, valid, answer = await ctx.tick().sample(
                dut.walk.command.valid, dut.walk.command.payload, dut.walk.word.ready, dut.ring.request.ready,
                dut.ring.response.valid, dut.ring.response.payload)
            if ready and pending:
                pending.pop(0)
            if asked:
                tables.answer(quick | {"va": int(command.address - paged["table_addr"]) // 8 << 12})
                pending.append(int(command.address))
            if taken:
                ctx.set(dut.ring.request.valid, 0)
            if valid:
                found = int(answer.address)
        assert found == tables.answer(quick)[1]
        assert (await ask(ctx, "place", quick | {"tag": 4}))[:2] == (XlateStatus.OK, found)
        # Ends.
        flat = end | {"key": 1 << 8 | kept["variant"], "pd": kept["pd"], "tag": 5}
        assert (await ask(ctx, "place", flat))[0] == XlateStatus.RIGHTS
        assert (await ask(ctx, "place", end | {"tag": 5, "pd": paged["pd"] ^ 1}))[0] == XlateStatus.PD
        assert (await ask(ctx, "place", quick | {"tag": 5}))[:2] == (XlateStatus.OK, found)
        assert (await ask(ctx, "place", end | {"tag": 6}, 400))[0] == XlateStatus.OK
        for request in (quick, end, quick | {"hit_only": 0}):
            assert (await ask(ctx, "place", request | {"tag": 7}))[0] == XlateStatus.KEY
        flat |= {"rights": 1, "invalidate": 0, "va": kept["base"], "length": 1}
        assert (await ask(ctx, "place", flat))[0] == XlateStatus.OK

    simulate(dut, run, limit=4000)


def test_write_of_entry_without_pages_needs_no_sweep():
    bench = Bench(CONFIGS["hundred"].replace(num_mrs=4, num_qps=4, num_cqs=4), 0)
    words, _ = _one_region(bench)
    cycles = 0

    async def run(ctx):
        nonlocal cycles
        cycles = await bench.write(ctx, 1, words)
    simulate(bench.dut, run)
    assert cycles <= 20


def test_refuses_bad_clients():
    p = Params(CONFIGS["tiny"])
    for clients in ([], [("a", 1), ("a", 2)]):
        with pytest.raises(ValueError, match="client names"):
            Translate(p, clients)
