"""Packet arbiter, ACK sender and frame merge: order, urgency, shares of bytes, no bubbles."""

import pytest
from amaranth import *
from amaranth.lib import wiring

from rnic.config import CONFIGS, Params
from rnic.tx.ack import AckSender
from rnic.tx.arbiter import OVERHEAD_BYTES, QUANTUM_BYTES, TxArbiter
from rnic.tx.build import Builder
from rnic.tx.eth_merge import ROCE_FRAMES_IN_A_ROW, EthMerge
from rnic.wire.opcode import Opcode
from tests.rules import rule
from tests.unit.streams import beats_of, collect, packet_of, recv, recv_packet, seeded, send, send_packets, simulate


def params(width):
    return Params(CONFIGS["tiny"].replace(data_width=width))


def run_arbiter(width, packets, rng=None, p_stall=0.0, n=3, delays=None, limit=6000):
    """``packets``: per source a list of payloads. Returns the output order as (source, number) and the bench's cycle of each
    payload beat. ``delays``: cycles before a source begins to send payload, and before "headers"."""
    dut = TxArbiter(params(width), n)
    total = sum(map(len, packets))
    with_payload = sum(bool(payload) for source in packets for payload in source)
    order, payloads, cycles = [], [], []

    def feed(source):
        async def headers(ctx):
            await ctx.tick().repeat(1 + (delays or {}).get("headers", 0))
            for number, payload in enumerate(packets[source]):
                await send(ctx, dut.header_i[source], [{"psn": number, "qpn": source, "length": len(payload)}], rng, p_stall)

        async def beats(ctx):
            await ctx.tick().repeat(1 + (delays or {}).get(source, 0))
            for payload in packets[source]:
                if payload:
                    await send(ctx, dut.payload_i[source], beats_of(payload, width), rng, p_stall)

        return [headers, beats] if source else [headers]

    async def drain_headers(ctx):
        for header in await recv(ctx, dut.header, total, rng, p_stall):
            order.append((int(header.qpn), int(header.psn), int(header.length)))

    async def drain_payload(ctx):
        for _ in range(with_payload):
            payloads.append((await recv_packet(ctx, dut.payload, rng, p_stall))[0])

    async def watch(ctx):
        cycle = 0
        while len(payloads) < with_payload:
            _, _, valid, ready = await ctx.tick().sample(dut.payload.valid, dut.payload.ready)
            if valid and ready:
                cycles.append(cycle)
            cycle += 1

    simulate(dut, *(bench for source in range(n) for bench in feed(source)), drain_headers, drain_payload, watch, limit=limit)
    # The payload of the k-th header with payload is the k-th payload packet.
    assert payloads == [packets[source][number] for source, number, length in order if length]
    assert all(length == len(packets[source][number]) for source, number, length in order)
    for source in range(n):
        assert [number for s, number, _ in order if s == source] == list(range(len(packets[source])))
    return [(source, number) for source, number, _ in order], cycles


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.3])
def test_packets_stay_whole_and_in_order(width, p_stall):
    rng = seeded(width)
    packets = [[b""] * 12] + [[rng.randbytes(rng.choice((0, 1, 8, 63, 64, 65, 200))) for _ in range(25)] for _ in range(2)]
    run_arbiter(width, packets, rng, p_stall)


@pytest.mark.parametrize("width", [64, 512])
def test_no_bubble_between_packets(width):
    lanes = width // 8
    rng = seeded(1)
    packets = [[], [rng.randbytes(4 * lanes) for _ in range(8)], [rng.randbytes(3 * lanes) for _ in range(8)]]
    _, cycles = run_arbiter(width, packets, delays={"headers": 8})
    # The list of grants fills up during the first packet (its latency is 3 cycles behind another item).
    assert cycles[3:] == list(range(cycles[3], cycles[3] + 8 * 7 - 3))
    assert cycles[3] - cycles[0] <= 4


@pytest.mark.parametrize("width", [64, 512])
def test_arbiter_and_builder_fill_the_wire(width):
    """Frames of 64-byte and 300-byte payload from two sources, ACKs between: no bubble inside a frame, at most one idle cycle
    between two."""
    p = params(width)
    arbiter, builder = TxArbiter(p, 3), Builder(p)
    rng = seeded(width)
    packets = [[b""] * 4, [rng.randbytes(64) for _ in range(12)], [rng.randbytes(rng.choice((64, 300))) for _ in range(8)]]
    m = Module()
    m.submodules.arbiter, m.submodules.builder = arbiter, builder
    wiring.connect(m, arbiter.header, builder.header)
    wiring.connect(m, arbiter.payload, builder.payload)
    frames, cycles = [], []

    def feed(source):
        async def headers(ctx):
            opcode = (Opcode.RC_WRITE_ONLY if source else Opcode.RC_ACK).value
            await send(ctx, arbiter.header_i[source], [{"opcode": opcode, "length": len(x)} for x in packets[source]])

        async def beats(ctx):
            await send_packets(ctx, arbiter.payload_i[source], packets[source] if source else [], width)

        return headers, beats

    async def drain(ctx):
        for _ in range(24):
            frames.append((await recv_packet(ctx, builder.frame))[0])

    async def watch(ctx):
        cycle = 0
        while len(frames) < 24:
            frame = builder.frame
            _, _, valid, ready, beat = await ctx.tick().sample(frame.valid, frame.ready, frame.payload)
            if valid and ready:
                cycles.append((cycle, int(beat.last)))
            cycle += 1

    simulate(m, *feed(0), *feed(1), *feed(2), drain, watch)
    idle = [after - before - 1 for (before, last), (after, _) in zip(cycles, cycles[1:], strict=False) if last]
    inside = [after - before - 1 for (before, last), (after, _) in zip(cycles, cycles[1:], strict=False) if not last]
    assert sum(len(frame) for frame in frames) == sum(map(len, packets[1])) + sum(map(len, packets[2])) + 20 * 74 + 4 * 62
    assert len(idle) == 23 and max(idle) <= 1
    assert not any(inside)


def test_acks_first():
    """ACKs overtake waiting data packets: at most one packet is granted between two of them."""
    packets = [[b""] * 8, [bytes(64)] * 20, [bytes(64)] * 20]
    order, _ = run_arbiter(64, packets)
    places = [at for at, (source, _) in enumerate(order) if source == 0]
    assert places[-1] < 12


def test_a_header_without_payload_waits_alone():
    """Source 1 has a header but no payload yet: source 2 is not held up; ACKs neither."""
    packets = [[b""] * 2, [bytes(64)], [bytes(64)] * 10]
    order, _ = run_arbiter(64, packets, delays={1: 60})
    assert [source for source, _ in order][:6].count(2) >= 4
    assert order.index((1, 0)) > 4


@pytest.mark.parametrize("small, large", [(64, 4096), (256, 1024), (1, 4096)])
def test_bytes_are_shared(small, large):
    """Two busy sources get the same number of bytes (headers included) within two turns."""
    n_small, n_large = (min(200, 4 * QUANTUM_BYTES // (size + OVERHEAD_BYTES)) for size in (small, large))
    packets = [[], [bytes(small)] * n_small, [bytes(large)] * n_large]
    order, _ = run_arbiter(512, packets, limit=20000)
    sent = {1: 0, 2: 0}
    left = {1: n_small, 2: n_large}
    for source, _ in order:
        sent[source] += len(packets[source][0]) + OVERHEAD_BYTES
        left[source] -= 1
        if not left[source]:
            break
        assert abs(sent[1] - sent[2]) <= 2 * QUANTUM_BYTES + OVERHEAD_BYTES
    assert min(sent.values()) > 2 * QUANTUM_BYTES


def test_arbiter_needs_two_sources():
    with pytest.raises(ValueError, match="number of sources is 1"):
        TxArbiter(params(64), 1)


def header_of(job):
    return {**job, "opcode": Opcode.RC_ACK.value}


def fields(header):
    return {name: int(header[name]) for name, _ in header.shape().members.items() if int(header[name])}


def ack_jobs(rng, count, qpns):
    """ACKs, and NAKs here and there."""
    return [{"qpn": rng.choice(qpns), "psn": rng.randrange(1, 1 << 24), "msn": rng.randrange(1, 1 << 24),
             "syndrome": rng.choice((0x1F, 0x1F, 0x1F, 0x60))} for _ in range(count)]  # fmt: skip


@rule("R-ACK-2")
@pytest.mark.parametrize("seed", range(3))
def test_ack_sender_at_rest_sends_every_job(seed):
    """A taker that is always ready leaves nothing to coalesce."""
    dut, rng = AckSender(params(64)), seeded(seed)
    jobs = ack_jobs(rng, 40, [2, 3, 4])

    async def feed(ctx):
        await send(ctx, dut.job, jobs, rng, 0.3)

    async def drain(ctx):
        for job in jobs:
            (header,) = await recv(ctx, dut.header, 1)
            assert fields(header) == {name: value for name, value in header_of(job).items() if value}

    simulate(dut, feed, drain)


@rule("R-ACK-2")
@pytest.mark.parametrize("seed", range(6))
def test_ack_sender_coalesces(seed):
    """Behind a slow taker: what goes missing is an ACK whose next job is an ACK of the same QP; all else is there, in order."""
    dut, rng = AckSender(params(64)), seeded(seed)
    jobs = ack_jobs(rng, 120, [2] if seed % 2 else [2, 3])
    got = []

    async def feed(ctx):
        await send(ctx, dut.job, jobs, rng, 0.1)

    async def drain(ctx):
        last = header_of(jobs[-1])
        while not got or got[-1] != last:
            (header,) = await recv(ctx, dut.header, 1, rng, 0.8)
            got.append(fields(header))

    simulate(dut, feed, drain)
    place, missing = 0, 0
    for job, following in zip(jobs, [*jobs[1:], None], strict=True):
        if place < len(got) and got[place] == header_of(job):
            place += 1
            continue
        missing += 1
        assert following and job["syndrome"] == following["syndrome"] == 0x1F and job["qpn"] == following["qpn"]
    assert place == len(got) and missing > 10


# ---------------------------------------------------------------------------------------------------------- EthMerge
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.3])
def test_merge_keeps_frames_whole(width, p_stall):
    dut = EthMerge(params(width))
    rng = seeded(width)
    roce = [b"r" + rng.randbytes(rng.randint(1, 200)) for _ in range(20)]
    eth = [b"e" + rng.randbytes(rng.randint(1, 200)) for _ in range(10)]
    got = []

    async def feed_roce(ctx):
        await send_packets(ctx, dut.roce, roce, width, rng, p_stall)

    async def feed_eth(ctx):
        await send_packets(ctx, dut.eth, eth, width, rng, p_stall)

    async def drain(ctx):
        for _ in range(30):
            got.append((await recv_packet(ctx, dut.o, rng, p_stall))[0])

    simulate(dut, feed_roce, feed_eth, drain, limit=6000)
    assert [frame for frame in got if frame[:1] == b"r"] == roce
    assert [frame for frame in got if frame[:1] == b"e"] == eth


def test_merge_urgency_and_rate():
    """RoCE goes first, a waiting host-side frame after a bounded number of RoCE frames; no idle cycle."""
    dut = EthMerge(params(64))
    rounds = 3
    roce = [b"r" + bytes(23)] * (ROCE_FRAMES_IN_A_ROW * rounds + 4)
    eth = [b"e" + bytes(15)] * rounds
    beats = []

    async def feed_roce(ctx):
        await send_packets(ctx, dut.roce, roce, 64)

    async def feed_eth(ctx):
        await send_packets(ctx, dut.eth, eth, 64)

    async def drain(ctx):
        beats.extend(await collect(ctx, dut.o, 3 * len(roce) + 2 * len(eth) + 4))

    simulate(dut, feed_roce, feed_eth, drain)
    cycles = [cycle for cycle, _ in beats]
    assert cycles == list(range(cycles[0], cycles[0] + 3 * len(roce) + 2 * len(eth)))
    kinds, frame = "", []
    for _, beat in beats:
        frame.append(beat)
        if beat.last:
            kinds += packet_of(frame)[:1].decode()
            frame = []
    runs = [len(run) for run in kinds.split("e")]
    assert runs[0] <= ROCE_FRAMES_IN_A_ROW + 1  # the host side comes a cycle later
    assert runs[1:-1] == [ROCE_FRAMES_IN_A_ROW] * (rounds - 1) and len(runs) == rounds + 1
