"""Payload fetch against a Python memory: random translations, latencies, errors; order, poison, reads hidden."""

import pytest

from rnic.abi import CtxTable, VendorError, WcStatus
from rnic.config import CONFIGS, Params
from rnic.records import ProbeEvent, XlateStatus
from rnic.tx.gather import Gather
from tests.rules import rule
from tests.unit.streams import beats_of, packet_of, recv, seeded, send, shared, simulate

PAGE = 4096
SPACE = 1 << 44  # virtual and physical addresses of the model


def params(width, **changes):
    return Params(CONFIGS["tiny"].replace(data_width=width, **changes))


class Host:
    """Pages of memory made up when looked at: page number of a virtual address to a page-aligned physical address, and the
    bytes there. ``bad_keys``: lkey to XlateStatus; ``bad_pages``: virtual pages whose read fails."""

    def __init__(self, rng, bad_keys=None, bad_pages=()):
        self.rng = rng
        self.bad_keys = bad_keys or {}
        self.bad_pages = set(bad_pages)
        self.physical = {}
        self.virtual = {}
        self.bytes = {}

    def translate(self, va):
        page = va // PAGE
        if page not in self.physical:
            where = self.rng.randrange(SPACE // PAGE)
            while where in self.virtual:
                where = self.rng.randrange(SPACE // PAGE)
            self.physical[page], self.virtual[where] = where, page
            self.bytes[page] = self.rng.randbytes(PAGE)
        return self.physical[page] * PAGE + va % PAGE

    def read(self, va, length):
        """Bytes of a virtual range."""
        out = b""
        while len(out) < length:
            at = va + len(out)
            self.translate(at)
            out += self.bytes[at // PAGE][at % PAGE : at % PAGE + min(PAGE, length - len(out))]
        return out

    def read_physical(self, address, length):
        """Bytes of a physical range and whether the read fails; it must not leave the page."""
        assert address % PAGE + length <= PAGE, f"read of {length} bytes at {address:#x} crosses a page"
        page = self.virtual[address // PAGE]
        return self.bytes[page][address % PAGE : address % PAGE + length], page in self.bad_pages


class World:
    """The blocks around a gather. A packet is {qpn, psn, wqe_index, pd, segments [(va, lkey, length)], inline bytes or None}.

    ``xlate_delay`` and ``read_delay``: functions giving the cycles of an access. Results: ``sent`` (psn, qpn, payload, err),
    ``failures`` (qpn, wqe_index, status, vendor_err), ``commands`` cycles, ``cycles`` of the last payload beats.
    """

    def __init__(self, p, host, packets, rng, *, p_stall=0.0, xlate_delay=lambda: 8, read_delay=lambda: 30, expect=None,
                 failures=0):  # fmt: skip
        self.p, self.host, self.packets, self.rng, self.p_stall = p, host, packets, rng, p_stall
        self.xlate_delay, self.read_delay = xlate_delay, read_delay
        self.dut = shared(Gather, p)
        self.expect = len(packets) if expect is None else expect
        self.want_failures = failures
        self.headers, self.payloads, self.failures = [], [], []
        self.commands, self.asked, self.probes, self.beat_cycles = [], [], [], []
        self.cycle = 0

    def done(self):
        return len(self.headers) >= self.expect and len(self.failures) >= self.want_failures and (
            len(self.payloads) >= sum(bool(h["length"]) for h in self.headers))

    def size(self, packet):
        return len(packet["inline"]) if packet["inline"] is not None else sum(s[2] for s in packet["segments"])

    def content(self, packet):
        if packet["inline"] is not None:
            return packet["inline"]
        return b"".join(self.host.read(va, length) for va, _, length in packet["segments"])

    async def feed_jobs(self, ctx):
        jobs = [{"header": {"qpn": k["qpn"], "psn": k["psn"], "length": self.size(k), "rkey": k["psn"] ^ 0x55},
                 "pd": k["pd"], "wqe_index": k["wqe_index"], "inline": int(k["inline"] is not None)} for k in self.packets]
        await send(ctx, self.dut.job, jobs, self.rng, self.p_stall)

    async def feed_segments(self, ctx):
        for packet in self.packets:
            if packet["inline"] is None and self.size(packet):
                items = [{"va": va, "lkey": lkey, "length": length, "last": int(at == len(packet["segments"]) - 1)}
                         for at, (va, lkey, length) in enumerate(packet["segments"])]  # fmt: skip
                await send(ctx, self.dut.segment, items, self.rng, self.p_stall)

    async def feed_inline(self, ctx):
        for packet in self.packets:
            if packet["inline"]:
                await send(ctx, self.dut.inline, beats_of(packet["inline"], self.p.data_width), self.rng, self.p_stall)

    async def translate(self, ctx):
        """Answers out of order, each after its own delay."""
        waiting = []
        port = self.dut.xlate
        tags = set()
        while not self.done():
            ready = not self.rng.random() < self.p_stall
            ctx.set(port.request.ready, ready)
            ripe = [item for item in waiting if item[0] <= self.cycle]
            if ripe and self.rng.random() >= self.p_stall:
                item = self.rng.choice(ripe)
                waiting.remove(item)
                tags.remove(item[1]["tag"])
                ctx.set(port.response.payload, item[1])
                ctx.set(port.response.valid, 1)
            else:
                ctx.set(port.response.valid, 0)
            _, _, valid, request, taken = await ctx.tick().sample(
                port.request.valid, port.request.payload, port.response.ready)
            assert taken, "the gather must always take answers"
            if valid and ready:
                assert request.rights == 0 and request.ring == 0 and request.length
                tag, key = int(request.tag), int(request.key)
                assert tag not in tags, "tag used twice at once"
                tags.add(tag)
                self.asked.append((key, int(request.pd), int(request.va), int(request.length)))
                va, length = int(request.va), int(request.length)
                status = self.host.bad_keys.get(key, XlateStatus.OK)
                answer = {"tag": tag, "status": status, "address": 0, "span": 0}
                if status == XlateStatus.OK:
                    answer |= {"address": self.host.translate(va), "span": min(length, PAGE - va % PAGE)}
                waiting.append((self.cycle + self.xlate_delay(), answer))
        ctx.set(port.response.valid, 0)

    async def memory(self, ctx):
        """Words in order of the commands, each access after its own delay."""
        queue = []
        port = self.dut.read
        lanes = self.p.lanes
        taken = True
        while not self.done():
            ready = len(queue) < 4000 and not self.rng.random() < self.p_stall
            ctx.set(port.command.ready, ready)
            if taken:
                offer = bool(queue) and queue[0][0] <= self.cycle and self.rng.random() >= self.p_stall
                ctx.set(port.word.valid, offer)
                if offer:
                    ctx.set(port.word.payload, queue[0][1])
            _, _, valid, command, word_ready = await ctx.tick().sample(
                port.command.valid, port.command.payload, port.word.ready)
            if offer and word_ready:
                queue.pop(0)
            taken = not offer or word_ready
            if valid and ready:
                self.commands.append(self.cycle)
                due = self.cycle + self.read_delay()
                raw, bad = self.host.read_physical(int(command.address), int(command.length))
                at, first = 0, int(command.address) % lanes
                while at < len(raw):
                    part = raw[at : at + lanes - first]
                    last = at + len(part) == len(raw)
                    noise = self.rng.getrandbits(8) if first else 0
                    queue.append((due, {"data": int.from_bytes(bytes(first) + part, "little") | noise, "first": first,
                                        "count": len(part), "last": int(last), "err": int(bad and last)}))
                    at, first = at + len(part), 0
        ctx.set(port.word.valid, 0)

    async def drain_headers(self, ctx):
        while len(self.headers) < self.expect:
            (header,) = await recv(ctx, self.dut.header, 1, self.rng, self.p_stall)
            self.headers.append({name: int(header[name]) for name in ("qpn", "psn", "length", "rkey")})

    async def drain_payload(self, ctx):
        beats = []
        port = self.dut.payload
        while not self.done():
            ready = self.rng.random() >= self.p_stall
            ctx.set(port.ready, ready)
            _, _, valid, beat = await ctx.tick().sample(port.valid, port.payload)
            if valid and ready:
                beats.append(beat)
                if beat.last:
                    self.payloads.append((packet_of(beats), int(beat.err)))
                    beats = []

    async def drain_failures(self, ctx):
        while len(self.failures) < self.want_failures:
            (item,) = await recv(ctx, self.dut.failure, 1, self.rng, self.p_stall)
            self.failures.append((int(item.qpn), int(item.wqe_index), item.status, item.vendor_err))

    async def watch(self, ctx):
        dut = self.dut
        while not self.done():
            sample = await ctx.tick().sample(dut.probe_translated, dut.probe_read, dut.probe_arrived, dut.payload.valid,
                                             dut.payload.ready)
            for probe in sample[2:5]:
                if probe.valid:
                    self.probes.append((self.cycle, probe.event, int(probe.qpn), int(probe.psn), int(probe.length)))
            if sample[5] and sample[6]:
                self.beat_cycles.append(self.cycle)
            self.cycle += 1

    def run(self, *more, limit=12000, settle=0):
        async def rest(ctx):
            while not self.done():
                await ctx.tick()
            await ctx.tick().repeat(1 + settle)

        simulate(self.dut, self.feed_jobs, self.feed_segments, self.feed_inline, self.translate, self.memory,
                 self.drain_headers, self.drain_payload, self.drain_failures, self.watch, rest, *more, limit=limit)
        return self.check()

    def check(self):
        """Headers and payloads belong together and are right; returns [(qpn, psn, err)] in order of leaving."""
        by_psn = {packet["psn"]: packet for packet in self.packets}
        payloads = iter(self.payloads)
        sent = []
        for header in self.headers:
            packet = by_psn[header["psn"]]
            assert header["qpn"] == packet["qpn"] and header["rkey"] == header["psn"] ^ 0x55
            err = 0
            if header["length"]:
                payload, err = next(payloads)
                assert err or payload == self.content(packet), f"payload of PSN {header['psn']}"
            sent.append((header["qpn"], header["psn"], err))
        for qpn in {packet["qpn"] for packet in self.packets}:
            psns = [psn for q, psn, _ in sent if q == qpn]
            assert psns == [packet["psn"] for packet in self.packets if packet["qpn"] == qpn][: len(psns)], "order of a QP"
        return sent


def drawn_packets(rng, p, count, qpns=8, max_size=600, inline=True):
    """Random packets, PSN = number: none, one or many segments, some of length 0, many across a page border."""
    packets = []
    for psn in range(count):
        kind = rng.random()
        packet = {"qpn": rng.randrange(qpns), "psn": psn, "wqe_index": rng.getrandbits(16), "pd": rng.getrandbits(24),
                  "segments": [], "inline": None}
        if inline and kind < 0.15:
            packet["inline"] = rng.randbytes(rng.randint(0, 96))
        elif kind < 0.85:
            for _ in range(rng.randint(1, p.max_sge)):
                length = rng.choice((0, 1, 7, 8, 9, 63, 64, 65, rng.randint(1, max_size)))
                va = rng.randrange(4) * PAGE + PAGE - rng.randrange(0, 200) if rng.random() < 0.5 else rng.randrange(8 * PAGE)
                packet["segments"].append((va, rng.getrandbits(16), length))
            if not sum(length for _, _, length in packet["segments"]):
                packet["segments"] = []
        packets.append(packet)
    return packets


@rule("R-WQ-4", "R-WQ-5")
@pytest.mark.parametrize("width", [64, 128, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.3])
def test_random_packets(width, p_stall):
    rng = seeded(width)
    p = params(width, desc_depth=8 if p_stall else 2)
    packets = drawn_packets(rng, p, 40)
    world = World(p, Host(rng), packets, rng, p_stall=p_stall, xlate_delay=lambda: rng.choice((1, 5, 60)),
                  read_delay=lambda: rng.choice((1, 20, 80)))  # fmt: skip
    assert len(world.run()) == 40
    read = [packet for packet in packets if packet["inline"] is None and packet["segments"]]
    segments = sorted((psn, length) for _, event, _, psn, length in world.probes if event == ProbeEvent.LOCAL_TRANSLATED)
    assert segments == sorted((k["psn"], length) for k in read for _, _, length in k["segments"] if length)
    arrived = [psn for _, event, _, psn, _ in world.probes if event == ProbeEvent.PAYLOAD_ARRIVED]
    assert sorted(arrived) == [packet["psn"] for packet in read]
    bytes_read = {packet["psn"]: 0 for packet in read}
    for cycle, event, _, psn, length in world.probes:
        if event == ProbeEvent.PAYLOAD_READ:
            bytes_read[psn] += length
            # Translated as a whole before its first read.
            assert not [c for c, e, _, q, _ in world.probes if e == ProbeEvent.LOCAL_TRANSLATED and q == psn and c >= cycle]
    assert bytes_read == {packet["psn"]: world.size(packet) for packet in read}


def test_requests_name_key_domain_and_range():
    """One request per segment, one more for what the first answer left over."""
    rng = seeded(3)
    p = params(64)
    packet = {"qpn": 1, "psn": 0, "wqe_index": 4, "pd": 0x123456, "inline": None,
              "segments": [(5 * PAGE - 100, 0xAB, 300), (0xFFFF_FFFF_F000 - 1, 0xCD, 2), (64, 0xEF, 10)]}
    world = World(p, Host(rng), [packet], rng)
    world.run()
    assert sorted(world.asked) == sorted([
        (0xAB, 0x123456, 5 * PAGE - 100, 300), (0xAB, 0x123456, 5 * PAGE, 200), (0xCD, 0x123456, 0xFFFF_FFFF_EFFF, 2),
        (0xCD, 0x123456, 0xFFFF_FFFF_F000, 1), (0xEF, 0x123456, 64, 10),
    ])  # fmt: skip
    assert len(world.commands) == 5


@rule("R-ERR-7")
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("status", [XlateStatus.KEY, XlateStatus.PD, XlateStatus.RIGHTS, XlateStatus.BOUNDS,
                                    XlateStatus.HOST_BUS])  # fmt: skip
def test_translation_error(width, status):
    """What is before leaves, the failing packet and the rest of its QP do not, other QPs are not touched; one failure."""
    rng = seeded(width)
    p = params(width, desc_depth=4)
    packets = [dict(packet, qpn=packet["psn"] % 3) for packet in drawn_packets(rng, p, 30)]
    packets[13] |= {"inline": None, "segments": [(100, 1, 70), (200, 0xBAD, 30), (300, 1, 10)]}
    packets[16] |= {"inline": None, "segments": [(100, 0xBAD, 70)]}  # same QP: reported once
    world = World(p, Host(rng, bad_keys={0xBAD: status}), packets, rng, p_stall=0.1, failures=1,
                  xlate_delay=lambda: rng.choice((1, 40)), expect=20 + 4)
    sent = world.run(settle=60)
    assert sorted(psn for _, psn, _ in sent) == [k["psn"] for k in packets if k["qpn"] != 1 or k["psn"] < 13]
    assert not any(err for _, _, err in sent)
    assert world.failures == [(1, packets[13]["wqe_index"], WcStatus.LOC_PROT_ERR, VendorError(status.value + 2))]
    assert not [1 for _, event, _, psn, _ in world.probes if event == ProbeEvent.PAYLOAD_READ and psn in (13, 16)]


@rule("R-ERR-7")
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("bad_piece", [0, 1])
def test_read_error(width, bad_piece):
    """The packet leaves with err, the failure says host bus, later packets of the QP (already read) are dropped."""
    rng = seeded(7)
    p = params(width, desc_depth=8)
    packets = [{"qpn": (psn + 1) // 2 % 2, "psn": psn, "wqe_index": 1000 + psn, "pd": 1, "inline": None,
                "segments": [(psn * 4 * PAGE - 50, 1, 60), (psn * 4 * PAGE + 64, 1, 90)]} for psn in range(1, 13)]
    packets.append({"qpn": 1, "psn": 13, "wqe_index": 5, "pd": 1, "inline": b"later", "segments": []})
    packets.append({"qpn": 0, "psn": 14, "wqe_index": 5, "pd": 1, "inline": b"other", "segments": []})
    host = Host(rng, bad_pages=[5 * 4 - 1 + bad_piece])
    world = World(p, host, packets, rng, failures=1, expect=10)
    sent = world.run(settle=60)
    assert sorted(sent) == [(0, psn, 0) for psn in (3, 4, 7, 8, 11, 12, 14)] + [(1, 1, 0), (1, 2, 0), (1, 5, 1)]
    assert world.failures == [(1, 1005, WcStatus.LOC_QP_OP_ERR, VendorError.HOST_BUS)]


def test_context_write_clears_the_poison():
    rng = seeded(8)
    p = params(64)
    bad = {"qpn": 3, "psn": 0, "wqe_index": 9, "pd": 1, "inline": None, "segments": [(0, 0xBAD, 8)]}
    lost = [{**bad, "psn": psn, "segments": [(0, 1, 8)]} for psn in (1, 2)]
    good = [{**bad, "psn": psn, "segments": [(0, 1, 8)]} for psn in (3, 4)]
    world = World(p, Host(rng, bad_keys={0xBAD: XlateStatus.KEY}), [bad], rng, failures=1, expect=2)

    async def more(ctx, packet):
        """One more packet: its job is taken some time after its segment."""
        dut = world.dut
        header = {"qpn": 3, "psn": packet["psn"], "length": 8, "rkey": packet["psn"] ^ 0x55}
        ctx.set(dut.job.payload, {"header": header, "wqe_index": packet["wqe_index"]})
        ctx.set(dut.job.valid, 1)
        await send(ctx, dut.segment, [{"va": 0, "lkey": packet["segments"][0][1], "length": 8, "last": 1}])
        while not ctx.get(dut.job.ready):
            await ctx.tick()
        await ctx.tick()
        ctx.set(dut.job.valid, 0)

    async def idle(ctx):
        await ctx.tick()

    async def reset(ctx):
        await ctx.tick().repeat(150)
        assert world.failures and not world.headers
        for table, word, packet in ((CtxTable.REQUESTER_HOT, 1, lost[0]), (CtxTable.COMPLETER_HOT, 0, lost[1]),
                                    (CtxTable.REQUESTER_HOT, 0, good[0])):  # fmt: skip
            await send(ctx, world.dut.ctx, [{"table": table, "index": 3, "word": word, "bytes": 7, "data": 0}])
            await more(ctx, packet)
            await ctx.tick().repeat(100)
            assert len(world.headers) == (packet is good[0])
        await more(ctx, good[1])

    world.packets = good
    world.feed_jobs, world.feed_segments = (lambda ctx: more(ctx, bad)), idle
    assert world.run(reset) == [(3, 3, 0), (3, 4, 0)]


@pytest.mark.parametrize("width, size", [(64, 64), (512, 64), (512, 1024)])
def test_latency_of_memory_is_hidden(width, size):
    """L = 250 cycles: with room for 2 * desc_depth packets under way the rate is packets / L or the bus."""
    rng = seeded(9)
    p = params(width, desc_depth=32)
    count = 160 if size == 64 else 60
    packets = [{"qpn": psn % 4, "psn": psn, "wqe_index": 0, "pd": 1, "inline": None,
                "segments": [(PAGE * psn, 1, size)]} for psn in range(count)]
    world = World(p, Host(rng), packets, rng, xlate_delay=lambda: 11, read_delay=lambda: 250)
    world.run(limit=20000)
    beats = -(-size // p.lanes)
    per_packet = max(beats + 1, 3, (250 + 30) / (2 * 32))
    cycles = world.beat_cycles[-1] - world.beat_cycles[0]
    print("cycles per packet", cycles / count, "job to command", world.commands[0])
    assert cycles <= 1.05 * per_packet * count
    assert world.commands[0] <= 11 + 12


def test_a_miss_parks_only_its_qp():
    """One QP's translations take 400 cycles: the others pass."""
    rng = seeded(10)
    p = params(512, desc_depth=8)
    packets = [{"qpn": int(psn in (2, 3)), "psn": psn, "wqe_index": 0, "pd": 1, "inline": None,
                "segments": [(PAGE * psn, 7 if psn in (2, 3) else 1, 64)]} for psn in range(30)]
    slow = iter(range(1000))
    world = World(p, Host(rng), packets, rng, xlate_delay=lambda: 400 if next(slow) in (2, 3) else 8)
    sent = world.run()
    assert [psn for _, psn, _ in sent][-2:] == [2, 3]
    others = [cycle for cycle, event, _, psn, _ in world.probes if event == ProbeEvent.PAYLOAD_ARRIVED and psn not in (2, 3)]
    assert others[-1] < 300


def test_segments_must_add_up():
    p = params(64)
    dut = Gather(p)

    async def bench(ctx):
        ctx.set(dut.xlate.request.ready, 1)
        ctx.set(dut.job.payload, {"header": {"length": 100}})
        ctx.set(dut.job.valid, 1)
        await send(ctx, dut.segment, [{"va": 0, "length": 99, "last": 1}])
        await ctx.tick().repeat(3)

    with pytest.raises(AssertionError, match="99 bytes of segments, length 100"):
        simulate(dut, bench)
