"""Stream drivers of the unit tests (pysim): send, receive, run with a cycle limit, share an elaborated design.

Typical use::

    async def feed(ctx):
        await send(ctx, dut.i, items, rng, 0.3)

    async def drain(ctx):
        assert await recv(ctx, dut.o, len(items), rng, 0.3) == items

    simulate(dut, feed, drain)
"""

import contextlib
import functools
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from amaranth.hdl import Fragment, Value
from amaranth.sim import Simulator

from rnic.clash import ClashPlatform

__all__ = ["beats_of", "collect", "packet_of", "recv", "recv_packet", "seeded", "send", "send_packets", "shared", "simulate"]

PERIOD = 8e-9  # seconds; the ECP5 target's 125 MHz


def seeded(seed: int) -> random.Random:
    """A generator of its own for ``seed``; the seed is printed (pytest shows it when the test fails)."""
    print(f"seed {seed}")
    return random.Random(seed)


class _Design:
    """A design in a simulator, for run after run. Its benches are put into slots, which end with the run they are in."""

    def __init__(self, dut):
        self.dut = dut
        self.sim = Simulator(Fragment.get(dut, ClashPlatform()))
        self.sim.add_clock(PERIOD)
        self._benches: list[Callable[[Any], Awaitable[None]]] = []
        self._slots = 0
        self._waited = 0  # benches not to be cut off that still run
        self._inside: list[_Cut] = []  # benches that have not ended
        self._over = True

    @property
    def usable(self) -> bool:
        """Whether another run may start: nothing of the last one is left."""
        return self._over and not self._inside

    def run(self, benches, background) -> None:
        """From reset until all ``benches`` have returned; those of ``background`` are cut off then."""
        self._benches = [*background, *(self._counted(bench) for bench in benches)]
        self._waited, self._over = len(benches), False
        if self._slots:
            self.sim.reset()
        else:
            self.sim.add_testbench(self._end)
        while self._slots < len(self._benches):
            self.sim.add_testbench(functools.partial(self._slot, self._slots), background=True)
            self._slots += 1
        try:
            self.sim.run()
        except BaseException:
            for bench in self._inside:
                bench.end()
            raise

    def _counted(self, bench):
        async def run(ctx):
            await bench(ctx)
            self._waited -= 1
        return run

    async def _end(self, ctx):
        while self._waited:
            await ctx.tick()
        self._over = True
        await ctx.tick().repeat(2)

    async def _slot(self, number, ctx):
        if number < len(self._benches):
            bench = _Cut(self._benches[number](ctx), self)
            self._inside.append(bench)
            await bench
            self._inside.remove(bench)


class _Over(Exception):  # noqa: N818 (no error)
    """The run of a bench is over."""


class _Cut:
    """Awaits a bench step by step, as long as its run is not over."""

    def __init__(self, bench, design: _Design):
        self.bench, self.design = bench, design

    def __await__(self):
        try:
            while True:
                yield self.bench.send(None)
                if self.design._over:
                    self.end()
                    return
        except StopIteration:
            return

    def end(self) -> None:
        """Ends it where it waits. (`close` would leave the generators it waits in behind.)"""
        with contextlib.suppress(_Over, StopIteration, RuntimeError, ValueError):
            self.bench.throw(_Over())


_designs: OrderedDict[Any, _Design] = OrderedDict()  # newest last
KEPT = 4  # designs of a process


def shared(kind: Callable[..., Any], *arguments, **named):
    """``kind(*arguments, **named)``, made and elaborated once for many runs of `simulate`; each starts from reset.

    For tests that read and write ports only: what they change in the object itself the next test would see. Arguments are
    told apart by value, `Params` by its configuration.
    """
    key = (kind, *(getattr(argument, "config", argument) for argument in arguments), *sorted(named.items()))
    if key not in _designs:
        _designs[key] = _Design(kind(*arguments, **named))
        while len(_designs) > KEPT:
            _designs.popitem(last=False)
    _designs.move_to_end(key)
    return _designs[key].dut


def simulate(dut, *benches: Callable[[Any], Awaitable[None]], background=(), limit: int | None = 2000,
             vcd: str | None = None) -> None:
    """Run ``benches`` on ``dut`` until all have returned; ``background`` ones may go on. TimeoutError after ``limit`` cycles."""
    pending = len(benches)

    def counted(bench):
        async def run(ctx):
            nonlocal pending
            await bench(ctx)
            pending -= 1
        return run

    async def watchdog(ctx):
        for _ in range(limit or 0):
            await ctx.tick()
            if not pending:
                return
        if limit is not None:
            raise TimeoutError(f"{pending} of {len(benches)} benches still wait after {limit} cycles")

    key = next((key for key, design in _designs.items() if design.dut is dut), None)
    if key is None:
        sim = Simulator(Fragment.get(dut, ClashPlatform()))
        sim.add_clock(PERIOD)
        for bench in background:
            sim.add_testbench(bench, background=True)
        for bench in (*map(counted, benches), watchdog):
            sim.add_testbench(bench)
        with contextlib.nullcontext() if vcd is None else sim.write_vcd(vcd):
            sim.run()
        return
    design = _designs[key]
    try:
        design.run([*map(counted, benches), watchdog], background)
    finally:
        if not design.usable:  # a run that failed leaves it behind
            _designs.pop(key, None)


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
