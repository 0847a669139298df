"""READ response packets: whatever becomes of them, each is counted for its QP, and nothing follows a failed one."""

import itertools

import pytest

from rnic.abi import Access
from rnic.config import CONFIGS, Params
from rnic.records import XlateStatus
from rnic.responder.read_response import ReadResponse
from tests.rules import rule
from tests.unit.streams import packet_of, seeded, send, shared, simulate

BAD_KEY = 0xBAD
DEPTH = 16


class World:
    """The blocks around a `ReadResponse`. A packet is {qpn, psn, length, rkey}; a `BAD_KEY` has no translation.

    The payload of a packet of virtual address ``psn << 16`` is made of its own number; ``gone`` are the cycles in which a
    packet has left, failed or been dropped.
    """

    def __init__(self, packets, rng, p_stall=0.0, delay=6):
        self.p = Params(CONFIGS["tiny"].replace(data_width=64))
        self.dut = shared(ReadResponse, self.p, DEPTH)
        self.packets, self.rng, self.p_stall, self.delay = packets, rng, p_stall, delay
        self.headers, self.payloads, self.failures, self.gone, self.counts = [], [], [], [], {}
        self.cycle = 0

    def content(self, psn, length):
        return bytes((psn * 37 + at) & 255 for at in range(length))

    async def feed(self, ctx):
        items = [{**packet, "va": packet["psn"] << 16} for packet in self.packets]
        await send(ctx, self.dut.i, items, self.rng, self.p_stall)

    async def translate(self, ctx):
        waiting, port = [], self.dut.xlate
        ctx.set(port.request.ready, 1)
        while True:
            ripe = bool(waiting) and waiting[0][0] <= self.cycle
            ctx.set(port.response.valid, ripe)
            if ripe:
                ctx.set(port.response.payload, waiting.pop(0)[1])
            _, _, valid, request = await ctx.tick().sample(port.request.valid, port.request.payload)
            if valid:
                assert request.rights == int(Access.REMOTE_READ)
                good = request.key != BAD_KEY
                waiting.append((self.cycle + self.delay, {
                    "tag": int(request.tag), "status": XlateStatus.OK if good else XlateStatus.KEY,
                    "address": int(request.va) if good else 0, "span": int(request.length) if good else 0}))

    async def memory(self, ctx):
        port, lanes, words = self.dut.read, self.p.lanes, []
        ctx.set(port.command.ready, 1)
        offered = False
        while True:
            if not offered:
                offered = bool(words) and words[0][0] <= self.cycle and self.rng.random() >= self.p_stall
                ctx.set(port.word.valid, offered)
                if offered:
                    ctx.set(port.word.payload, words[0][1])
            _, _, valid, command, ready = await ctx.tick().sample(
                port.command.valid, port.command.payload, port.word.ready)
            if offered and ready:
                words.pop(0)
                offered = False
            if valid:
                raw = self.content(int(command.address) >> 16, int(command.length))
                words += [(self.cycle + 2 * self.delay, {
                    "data": int.from_bytes(raw[at : at + lanes], "little"), "first": 0, "count": len(raw[at : at + lanes]),
                    "last": int(at + lanes >= len(raw)), "err": 0}) for at in range(0, len(raw), lanes)]  # fmt: skip

    async def drain(self, ctx):
        dut, beats = self.dut, []
        while True:
            for port in (dut.header, dut.payload, dut.failure):
                ctx.set(port.ready, self.rng.random() >= self.p_stall)
            sample = await ctx.tick().sample(*(signal for port in (dut.header, dut.payload, dut.failure)
                                               for signal in (port.valid, port.ready, port.payload)))
            (header_valid, header_ready, header, valid, ready, beat, fails, heard, failure) = sample[2:]
            if header_valid and header_ready:
                self.headers.append((int(header.qpn), int(header.psn), int(header.length)))
            if valid and ready:
                beats.append(beat)
                if beat.last:
                    self.payloads.append(packet_of(beats))
                    beats = []
            if fails and heard:
                self.failures.append((int(failure.qpn), int(failure.psn), int(failure.quiet), int(failure.bus)))

    async def watch(self, ctx):
        while len(self.gone) < len(self.packets):
            _, _, gone = await ctx.tick().sample(self.dut.gone)
            if gone:
                self.gone.append(self.cycle)
            self.cycle += 1
        await ctx.tick().repeat(3)
        for qpn in {packet["qpn"] for packet in self.packets}:
            ctx.set(self.dut.count_addr, qpn)
            await ctx.tick().repeat(2)
            self.counts[qpn] = int(ctx.get(self.dut.count))

    def run(self, limit=20000):
        simulate(self.dut, self.feed, self.watch, background=(self.translate, self.memory, self.drain), limit=limit)
        qpns = {packet["qpn"] for packet in self.packets}
        of = {qpn: [packet for packet in self.packets if packet["qpn"] == qpn] for qpn in qpns}
        assert self.counts == {qpn: len(packets) for qpn, packets in of.items()}
        sent = {qpn: [header for header in self.headers if header[0] == qpn] for qpn in qpns}  # QPs may overtake
        for qpn, packets in of.items():
            bad = [at for at, one in enumerate(packets) if one["length"] and one["rkey"] == BAD_KEY][:1]
            first_bad = bad[0] if bad else len(packets)
            assert sent[qpn] == [(qpn, one["psn"], one["length"]) for one in packets[:first_bad]]
            assert [failure for failure in self.failures if failure[0] == qpn] == [
                (qpn, packets[at]["psn"], packets[at]["quiet"], 0) for at in bad]
        assert self.payloads == [self.content(psn, length) for _, psn, length in self.headers if length]


def packet(qpn, psn, length, rkey=1, quiet=0):
    return {"qpn": qpn, "psn": psn, "length": length, "rkey": rkey, "quiet": quiet}


@rule("R-ERR-8")
@pytest.mark.parametrize("quiet", [0, 1])
def test_dropped_packets_that_go_in_neighbouring_cycles_are_counted(quiet):
    """Behind a failed packet one is read and dropped; the next has nothing to drop and goes a cycle later."""
    packets = [packet(1, 0, 16, BAD_KEY, quiet), packet(1, 1, 256), packet(1, 2, 8, BAD_KEY), packet(2, 3, 256),
               packet(1, 4, 8, BAD_KEY), packet(1, 5, 64), packet(1, 6, 0), packet(2, 7, 8)]  # fmt: skip
    world = World(packets, seeded(quiet))
    world.run()
    neighbours = [at for at, (a, b) in enumerate(itertools.pairwise(world.gone)) if b == a + 1]
    assert {1, 3, 5} <= set(neighbours), "the packets did not go one behind the other: the test shows nothing"


@rule("R-ERR-8")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("p_stall", [0.0, 0.3])
def test_packets_of_several_qps(seed, p_stall):
    rng = seeded(seed)
    qpns = range(1, 4)
    packets = [packet(rng.choice(qpns), psn, rng.choice((0, 1, 8, 63, 64, 200)), BAD_KEY if rng.random() < 0.12 else 1,
                      rng.getrandbits(1)) for psn in range(80)]  # fmt: skip
    World(packets, rng, p_stall, delay=rng.choice((1, 6, 25))).run()
