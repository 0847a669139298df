"""PacketStore against a dictionary of packets."""

from collections import deque

import pytest

from rnic.stream.packet_store import PacketStore
from tests.unit.streams import beats_of, collect, recv, recv_packet, seeded, send, simulate


@pytest.mark.parametrize("width, cells, p_stall", [(64, 12, 0.0), (64, 12, 0.3), (512, 8, 0.0), (512, 8, 0.3)])
def test_random_order(width, cells, p_stall):
    """Store, abort, drop, read (freeing or keeping), free: contents and the count of free cells stay right."""
    rng = seeded(width + int(10 * p_stall))
    dut = PacketStore(width, cells)
    total = 60
    packets = [(rng.randbytes(rng.choice((0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 600, 900))),
                int(rng.random() < 0.2)) for _ in range(total)]
    patience = 0.99 if width == 64 else 0.97
    good = sum(1 - err for _, err in packets)
    stored, commands, expected, frees = [], deque(), deque(), deque()
    seen = {"dropped": 0, "read": 0, "kept": 0, "freed": 0}
    finished = [False]

    async def feed(ctx):
        for payload, err in packets:
            await send(ctx, dut.i, beats_of(payload, width, err), rng, p_stall)

    async def handles(ctx):
        for payload, err in packets:
            if err:
                continue
            (handle,) = await recv(ctx, dut.handle, 1, rng, p_stall)
            if handle.dropped:
                assert handle.length == 0
                seen["dropped"] += 1
                continue
            assert handle.length == len(payload)
            stored.append((int(handle.head), payload))

    async def use(ctx):
        """Decides what happens to which packet; waits now and then so that the store fills up."""
        done = 0
        while done + seen["dropped"] < good:
            if not stored or rng.random() < patience:
                await ctx.tick()
                continue
            for _ in range(rng.randint(1, len(stored))):
                head, payload = stored.pop(rng.randrange(len(stored)))
                done += 1
                action = rng.choice(("read", "kept", "freed")) if payload else "read"
                seen[action] += 1
                if action == "freed":
                    frees.append(head)
                else:
                    commands.append({"head": head, "length": len(payload), "keep": int(action == "kept")})
                    expected.append((head, payload, action))
        while commands or expected or frees:
            await ctx.tick()
        for _ in range(3 * cells):
            await ctx.tick()
        finished[0] = True
        assert ctx.get(dut.free_cells) == cells

    async def give(ctx, port, queue):
        while not finished[0]:
            if queue:
                await send(ctx, port, [queue[0]], rng, p_stall)
                queue.popleft()
            else:
                await ctx.tick()

    async def drain(ctx):
        while not finished[0]:
            if not expected:
                await ctx.tick()
                continue
            head, payload, action = expected[0]
            assert await recv_packet(ctx, dut.o, rng, p_stall) == (payload, 0)
            if action == "kept":
                frees.append(head)
            expected.popleft()

    async def give_commands(ctx):
        await give(ctx, dut.read, commands)

    async def give_frees(ctx):
        await give(ctx, dut.free, frees)

    simulate(dut, feed, handles, use, give_commands, give_frees, drain, limit=40000)
    assert all(seen.values()), seen


@pytest.mark.parametrize("width", [64, 512])
def test_rate_and_latency(width):
    """Back to back in and out; last beat to handle 2 cycles, read command to first beat 2 cycles."""
    rng = seeded(width)
    lanes = width // 8
    dut = PacketStore(width, 16)
    packets = [rng.randbytes(n) for n in (600, lanes, lanes, 256, 257, 1000)]
    beats = [beat for p in packets for beat in beats_of(p, width)]
    ends = [k for k, beat in enumerate(beats) if beat["last"]]
    heads = []

    async def feed(ctx):
        await send(ctx, dut.i, beats)

    async def handles(ctx):
        got = await collect(ctx, dut.handle, len(beats) + 4)
        assert [cycle for cycle, _ in got] == [end + 2 for end in ends]
        heads.extend(int(handle.head) for _, handle in got)
        await send(ctx, dut.read, [{"head": head, "length": len(p), "keep": 0}
                                   for head, p in zip(heads, packets, strict=True)])

    async def drain(ctx):
        while not heads:
            await ctx.tick()
        got = await collect(ctx, dut.o, len(beats) + 4)
        assert [cycle for cycle, _ in got] == list(range(2, 2 + len(beats)))
        assert [int(beat.data) for _, beat in got] == [beat["data"] for beat in beats]
        assert ctx.get(dut.free_cells) == 16

    simulate(dut, feed, handles, drain, limit=5000)


def test_bad_one_beat_packets_forever():
    """A one-beat packet every 2 cycles, all bad: the input never waits."""
    dut = PacketStore(64, 4)

    async def feed(ctx):
        for _ in range(100):
            ctx.set(dut.i.payload, beats_of(b"bad", 64, 1)[0])
            ctx.set(dut.i.valid, 1)
            _, _, ready, dropped = await ctx.tick().sample(dut.i.ready, dut.dropped)
            assert ready and not dropped
            ctx.set(dut.i.valid, 0)
            await ctx.tick()
        for _ in range(20):
            await ctx.tick()
        assert ctx.get(dut.free_cells) == 4

    simulate(dut, feed)


def test_full_store_never_jams():
    """Nobody takes packets: everything behind the last cell is dropped as a whole, and the chain begun is freed."""
    dut = PacketStore(64, 5)
    packet = bytes(range(256)) * 3  # 3 cells: the second packet finds two

    async def feed(ctx):
        for _ in range(3):
            for beat in beats_of(packet, 64):
                ctx.set(dut.i.payload, beat)
                ctx.set(dut.i.valid, 1)
                _, _, ready = await ctx.tick().sample(dut.i.ready)
                assert ready
        ctx.set(dut.i.valid, 0)
        for _ in range(12):
            await ctx.tick()
        assert ctx.get(dut.free_cells) == 2

    async def handles(ctx):
        got = await recv(ctx, dut.handle, 3)
        assert [int(handle.dropped) for handle in got] == [0, 1, 1]

    simulate(dut, feed, handles)


def test_double_free_is_caught():
    dut = PacketStore(64, 4)

    async def bench(ctx):
        await send(ctx, dut.i, beats_of(b"x", 64))
        (handle,) = await recv(ctx, dut.handle, 1)
        await send(ctx, dut.free, [int(handle.head)] * 2)
        for _ in range(12):
            await ctx.tick()

    with pytest.raises(AssertionError, match="cell 0 freed twice"):
        simulate(dut, bench)


@pytest.mark.parametrize("cells, cell_bytes, message", [(1, 256, "cells is 1"), (4, 4, "cell_bytes is 4"),
                                                        (4, 96, "cell_bytes is 96")])
def test_bad_sizes(cells, cell_bytes, message):
    with pytest.raises(ValueError, match=message):
        PacketStore(64, cells, cell_bytes)


@pytest.mark.parametrize("width", [64, 512])
def test_stall_drops_nothing(width):
    """With ``stall`` the input waits for cells: packets of three times the store come through a slow reader, whole and in order;
    aborted ones between them give their cells back."""
    rng = seeded(width)
    dut = PacketStore(width, 6, stall=True)
    packets = [(rng.randbytes(rng.choice((1, 256, 300, 800, 1200))), int(rng.random() < 0.3)) for _ in range(24)]
    good = [payload for payload, err in packets if not err]
    heads: deque = deque()

    async def feed(ctx):
        for payload, err in packets:
            await send(ctx, dut.i, beats_of(payload, width, err))

    async def handles(ctx):
        for payload in good:
            (handle,) = await recv(ctx, dut.handle, 1)
            assert (handle.dropped, handle.length) == (0, len(payload))
            heads.append(int(handle.head))

    async def read(ctx):
        for payload in good:
            while not heads:
                await ctx.tick()
            await ctx.tick().repeat(200)
            await send(ctx, dut.read, [{"head": heads.popleft(), "length": len(payload), "keep": 0}])

    async def drain(ctx):
        for payload in good:
            assert await recv_packet(ctx, dut.o) == (payload, 0)

    simulate(dut, feed, handles, read, drain, limit=12_000)
    assert len(good) < len(packets)
