"""Fast stream models: one task a side, a beat a Python integer, asleep while nothing moves.

They drive and sample at the rising edge of a clock that cocotb drives, like any synchronous logic. A port is a
`PackedPort` (an Amaranth stream: valid, ready, one payload vector) or an `AxisPort` (AXI4-Stream). `FrameSource` and
`FrameSink` move whole frames of bytes, `ItemSource` and `ItemSink` single payloads.

``gaps`` and ``stalls`` are what `pattern` returns: an endless iterator, true for a cycle without valid or without ready.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cocotb
from cocotb.triggers import Event, RisingEdge

from rnic.stream.beat import Beat, keep_of_count

__all__ = ["AxisPort", "FrameSink", "FrameSource", "ItemSink", "ItemSource", "PATTERNS", "PackedPort", "pattern"]

PATTERNS = ("none", "half", "bursts", "rare")


def pattern(kind: str, rng: random.Random) -> Iterator[bool] | None:
    """When to pause. ``none``: never; ``half``: every other cycle on average; ``bursts``: runs of 1 to 40 cycles of either
    kind; ``rare``: one cycle in sixteen."""
    if kind == "none":
        return None
    if kind == "bursts":
        lengths = (rng.randint(1, 40) for _ in itertools.count())
        return itertools.chain.from_iterable([bool(n % 2)] * length for n, length in enumerate(lengths))
    chance = {"half": 0.5, "rare": 1 / 16}[kind]
    return (rng.random() < chance for _ in itertools.count())


class PackedPort:
    """The signals ``<name>_valid``, ``<name>_ready``, ``<name>_payload``. A beat of a frame is a `Beat` of ``width`` bits."""

    def __init__(self, dut: Any, name: str, width: int | None = None):
        self.name = name
        self.valid, self.ready = getattr(dut, f"{name}_valid"), getattr(dut, f"{name}_ready")
        self._payload = getattr(dut, f"{name}_payload")
        self.lanes = width // 8 if width else 0
        if width:
            fields = {key: field.offset for key, field in Beat(width)}
            assert len(self._payload) == Beat(width).size
            self._keep, self._last, self._err = fields["keep"], fields["last"], fields["err"]

    def put(self, item: int) -> None:
        self._payload.value = item

    def get(self) -> int:
        return int(self._payload.value)

    def join(self, chunk: bytes, last: bool, err: bool) -> int:
        """The payload of one beat."""
        keep = keep_of_count(len(chunk), self.lanes)
        return int.from_bytes(chunk, "little") | keep << self._keep | last << self._last | err << self._err

    def split(self, item: int) -> tuple[bytes, bool, bool]:
        """(bytes, last, err) of one beat."""
        keep = item >> self._keep & (1 << self.lanes) - 1
        data = (item & (1 << 8 * self.lanes) - 1).to_bytes(self.lanes, "little")
        return _checked(self, data, keep, bool(item >> self._last & 1), bool(item >> self._err & 1))


class AxisPort:
    """The signals ``<name>_tdata``, ``_tkeep``, ``_tlast``, ``_tuser``, ``_tvalid``, ``_tready``."""

    def __init__(self, dut: Any, name: str):
        self.name = name
        part = lambda signal: getattr(dut, f"{name}_{signal}")  # noqa: E731
        self.valid, self.ready = part("tvalid"), part("tready")
        self._data, self._keep, self._last, self._user = part("tdata"), part("tkeep"), part("tlast"), part("tuser")
        self.lanes = len(self._keep)

    def put(self, item: tuple[int, int, bool, bool]) -> None:
        for signal, value in zip((self._data, self._keep, self._last, self._user), item, strict=True):
            signal.value = int(value)

    def get(self) -> tuple[int, int, bool, bool]:
        return int(self._data.value), int(self._keep.value), bool(self._last.value), bool(self._user.value)

    def join(self, chunk: bytes, last: bool, err: bool) -> tuple[int, int, bool, bool]:
        return int.from_bytes(chunk, "little"), keep_of_count(len(chunk), self.lanes), last, err

    def split(self, item: tuple[int, int, bool, bool]) -> tuple[bytes, bool, bool]:
        data, keep, last, user = item
        return _checked(self, data.to_bytes(self.lanes, "little"), keep, last, user)


def _checked(port: Any, data: bytes, keep: int, last: bool, err: bool) -> tuple[bytes, bool, bool]:
    count = keep.bit_count()
    assert keep == keep_of_count(count, port.lanes), f"{port.name}: keep {keep:#x} is not contiguous from bit 0"
    assert last or count == port.lanes, f"{port.name}: keep {keep:#x} before the last beat"
    return data[:count], last, err


class ItemSource:
    """Offers what `send` was given, in order."""

    def __init__(self, port: Any, clock: Any, gaps: Iterator[bool] | None = None):
        self.port, self.gaps = port, gaps
        self.queue: deque[Any] = deque()
        self.taken = 0
        self._edge, self._wake = RisingEdge(clock), Event()
        port.valid.value = 0
        cocotb.start_soon(self._run())

    def send(self, item: Any) -> None:
        """Queue one payload."""
        self.queue.append(item)
        self._wake.set()

    async def _run(self) -> None:
        port, edge, queue = self.port, self._edge, self.queue
        await edge
        while True:
            if not queue:
                self._wake.clear()
                await self._wake.wait()
                await edge
            while self.gaps is not None and next(self.gaps):
                await edge
            port.put(queue[0])
            port.valid.value = 1
            await edge
            while not port.ready.value:
                await edge
            queue.popleft()
            self.taken += 1
            port.valid.value = 0


class FrameSource(ItemSource):
    """Sends frames of bytes; ``err`` marks the last beat."""

    def send(self, item: bytes, err: bool = False) -> None:
        """Queue one frame."""
        lanes = self.port.lanes
        for at in range(0, max(1, len(item)), lanes):
            last = at + lanes >= len(item)
            super().send(self.port.join(item[at : at + lanes], last, last and err))

    @property
    def idle(self) -> bool:
        return not self.queue


class ItemSink:
    """Takes payloads; checks that an offer stays as it is until it is taken. ``received`` holds what nobody asked for yet."""

    def __init__(self, port: Any, clock: Any, stalls: Iterator[bool] | None = None,
                 on_item: Callable[[Any], None] | None = None):  # fmt: skip
        self.port, self.stalls = port, stalls
        self.received: deque[Any] = deque()
        self.on_item = on_item
        self._edge, self._arrived = RisingEdge(clock), Event()
        port.ready.value = int(stalls is None)
        cocotb.start_soon(self._run())

    async def receive(self) -> Any:
        """The oldest item (frame); waits for one."""
        while not self.received:
            self._arrived.clear()
            await self._arrived.wait()
        return self.received.popleft()

    def _take(self, item: Any) -> None:
        self._deliver(item)

    def _deliver(self, item: Any) -> None:
        if self.on_item is not None:
            self.on_item(item)
        else:
            self.received.append(item)
            self._arrived.set()

    async def _run(self) -> None:
        port, edge, offered = self.port, self._edge, None
        begins = RisingEdge(port.valid)
        await edge
        while True:
            if not port.valid.value:
                assert offered is None, f"{port.name}: valid fell before ready"
                await begins
                await edge
                continue
            item = port.get()
            assert offered is None or item == offered, f"{port.name}: the payload changed before ready"
            if port.ready.value:
                self._take(item)
                offered = None
            else:
                offered = item
            if self.stalls is not None:
                port.ready.value = int(not next(self.stalls))
            await edge


class FrameSink(ItemSink):
    """Takes whole frames: ``(bytes, err)``."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._frame = bytearray()
        super().__init__(*args, **kwargs)

    def _take(self, item: Any) -> None:
        chunk, last, err = self.port.split(item)
        self._frame += chunk
        if last:
            self._deliver((bytes(self._frame), err))
            self._frame.clear()
