"""Stream drivers of the unit tests (pysim): send, receive, run with a cycle limit.

Typical use::

    async def feed(ctx):
        await send(ctx, dut.i, items, rng, 0.3)

    async def drain(ctx):
        assert await recv(ctx, dut.o, len(items), rng, 0.3) == items

    simulate(dut, feed, drain)
"""

import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from amaranth.hdl import Value
from amaranth.sim import Simulator

__all__ = ["beats_of", "collect", "packet_of", "recv", "recv_packet", "seeded", "send", "send_packets", "simulate"]

PERIOD = 8e-9  # seconds; the ECP5 target's 125 MHz


def seeded(seed: int) -> random.Random:
    """A generator of its own for ``seed``; the seed is printed (pytest shows it when the test fails)."""
    print(f"seed {seed}")
    return random.Random(seed)


def simulate(dut, *benches: Callable[[Any], Awaitable[None]], limit: int = 2000, vcd: str | None = None) -> None:
    """Run ``benches`` on ``dut`` until all have returned. TimeoutError after ``limit`` cycles."""
    pending = len(benches)

    def counted(bench):
        async def run(ctx):
            nonlocal pending
            await bench(ctx)
            pending -= 1
        return run

    async def watchdog(ctx):
        for _ in range(limit):
            await ctx.tick()
            if not pending:
                return
        raise TimeoutError(f"{pending} of {len(benches)} benches still wait after {limit} cycles")

    sim = Simulator(dut)
    sim.add_clock(PERIOD)
    for bench in benches:
        sim.add_testbench(counted(bench))
    sim.add_testbench(watchdog)
    if vcd is None:
        sim.run()
    else:
        with sim.write_vcd(vcd):
            sim.run()


async def send(ctx, stream, items: Iterable[Any], rng: random.Random | None = None, p_stall: float = 0.0) -> None:
    """Send ``items`` (ints or dicts of a struct's fields); before each wait a cycle with probability ``p_stall``."""
    payload = Value.cast(stream.payload)
    for item in items:
        while rng is not None and rng.random() < p_stall:
            await ctx.tick()
        if isinstance(item, int):
            ctx.set(payload, item)
        else:
            ctx.set(stream.payload, item)
        ctx.set(stream.valid, 1)
        ready = False
        while not ready:
            _, _, ready = await ctx.tick().sample(stream.ready)
        ctx.set(stream.valid, 0)


async def recv(ctx, stream, count: int, rng: random.Random | None = None, p_stall: float = 0.0) -> list[Any]:
    """Receive ``count`` items (ints, or ``data.Const`` of a struct); not ready with probability ``p_stall``."""
    items = []
    while len(items) < count:
        while rng is not None and rng.random() < p_stall:
            await ctx.tick()
        ctx.set(stream.ready, 1)
        valid = False
        while not valid:
            _, _, valid, payload = await ctx.tick().sample(stream.valid, stream.payload)
        ctx.set(stream.ready, 0)
        items.append(payload)
    return items


async def collect(ctx, stream, cycles: int, rng: random.Random | None = None, p_stall: float = 0.0) -> list[Any]:
    """Receive whatever comes within ``cycles`` cycles: list of (cycle number from now, payload)."""
    items = []
    for cycle in range(cycles):
        ctx.set(stream.ready, rng is None or rng.random() >= p_stall)
        _, _, valid, ready, payload = await ctx.tick().sample(stream.valid, stream.ready, stream.payload)
        if valid and ready:
            items.append((cycle, payload))
    ctx.set(stream.ready, 0)
    return items


def beats_of(packet: bytes, width: int, err: int = 0) -> list[dict[str, int]]:
    """The beats (dicts of ``Beat`` fields) of one packet on a bus of ``width`` bits; zero bytes are one empty beat."""
    lanes = width // 8
    beats = []
    for at in range(0, max(len(packet), 1), lanes):
        part = packet[at : at + lanes]
        last = at + lanes >= len(packet)
        beats.append({"data": int.from_bytes(part, "little"), "keep": (1 << len(part)) - 1,
                      "last": int(last), "err": err if last else 0})
    return beats


def packet_of(beats: Iterable[Any]) -> bytes:
    """The kept bytes of ``beats`` (``data.Const`` of ``Beat``). AssertionError when a keep rule is broken."""
    out = bytearray()
    for beat in beats:
        lanes = len(beat.shape()["keep"].shape) if not isinstance(beat.shape()["keep"].shape, int) \
            else beat.shape()["keep"].shape
        count = int(beat.keep).bit_count()
        assert beat.keep == (1 << count) - 1, f"keep {beat.keep:#x} is not contiguous from lane 0"
        assert beat.last or count == lanes, f"keep {beat.keep:#x} is not full before the last beat"
        out += int(beat.data).to_bytes(lanes, "little")[:count]
    return bytes(out)


async def send_packets(ctx, stream, packets: Iterable[bytes], width: int, rng=None, p_stall: float = 0.0) -> None:
    """Send each packet as beats."""
    for packet in packets:
        await send(ctx, stream, beats_of(packet, width), rng, p_stall)


async def recv_packet(ctx, stream, rng=None, p_stall: float = 0.0) -> tuple[bytes, int]:
    """Receive one packet of beats; returns its bytes and the ``err`` of its last beat."""
    beats = []
    while True:
        beats += await recv(ctx, stream, 1, rng, p_stall)
        if beats[-1].last:
            return packet_of(beats), int(beats[-1].err)
