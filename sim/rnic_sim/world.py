"""A world of NICs in lock step: hosts, wires, time. Everything that drives a simulation starts here."""

import ctypes
import json
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from . import native
from .hostmem import PageAllocator
from .link import Frame, Wire
from .native import AssertionFailed, CsrError, EventKind, MemoryFault, Port, ProtocolViolation, SimError, Stop, Timeout

__all__ = ["Event", "Host", "ProbeRecord", "World"]

_EVENT = struct.Struct("<QHHIQQ")
_FRAME = struct.Struct("<QQIIII")
_PROBE = struct.Struct("<QII")
_DEFAULT_PATIENCE = 100_000  # cycles a register access may take


class Event(NamedTuple):
    """One port event. ``id`` is an AXI id, a frame number or an interrupt; ``address`` an AXI or register address, or
    the bytes of a frame; ``aux`` beats, response or datum."""

    cycle: int
    kind: EventKind
    nic: int
    id: int
    address: int
    aux: int


class ProbeRecord(NamedTuple):
    """One record of the NIC's probe port; ``bits`` is the whole slot, its bit 0 the valid that was 1."""

    cycle: int
    nic: int
    slot: int
    bits: int


class Host:
    """The computer around one NIC: registers, memory, interrupts, and the frames at its ports.

    Register accesses and waits move the time of the whole world.
    """

    def __init__(self, world: "World", index: int, seed: int, link_latency: int):
        self._world, self._index, self._lib = world, index, world._lib
        self._pages = PageAllocator(seed)
        self._axi = native.AxiConfig(read_latency=64, write_latency=16, max_reads=256, max_writes=256, read_rate=65536,
                                     write_rate=65536)
        self.wire = Wire(self._lib, world._live, index, link_latency)
        self._inbox: dict[Port, deque[Frame]] = {port: deque() for port in Port}

    @property
    def name(self) -> str:
        """Prefix of this NIC in waves and messages."""
        return chr(ord("a") + self._index)

    # Registers

    def csr_read(self, address: int) -> int:
        """Reads a 32-bit register. Raises CsrError, Timeout."""
        return self._csr(False, address, 0)

    def csr_write(self, address: int, value: int) -> None:
        """Writes a 32-bit register and waits for its answer. Raises CsrError, Timeout."""
        self._csr(True, address, value)

    def csr_post(self, address: int, value: int) -> None:
        """Queues a register write and returns at once; several are under way at a time, in order."""
        self._lib.rnic_csr(self._world._live(), self._index, 1, address, value & 0xFFFFFFFF, 1)

    @property
    def csr_posted_errors(self) -> int:
        """Posted writes that were answered with an error."""
        return self._lib.rnic_csr_posted_errors(self._world._live(), self._index)

    def _csr(self, write: bool, address: int, value: int) -> int:
        handle, result = self._world._live(), native.CsrResult()
        ticket = self._lib.rnic_csr(handle, self._index, int(write), address, value & 0xFFFFFFFF, 0)
        end = self._world.cycle + _DEFAULT_PATIENCE
        while not self._lib.rnic_csr_take(handle, self._index, ticket, result):
            if self._world.cycle >= end:
                raise Timeout(f"nic {self.name}: register {address:#x} did not answer", self._world.cycle)
            self._world.step(end - self._world.cycle, until=Stop.CSR)
        if result.response:
            raise CsrError(f"nic {self.name}: {'write' if write else 'read'} of register {address:#x} got AXI response "
                           f"{result.response} in cycle {self._world.cycle}")
        return result.data

    # Memory

    def mem_read(self, address: int, length: int) -> bytes:
        """Bytes of host memory as the processor sees them now. Raises MemoryFault."""
        data = ctypes.create_string_buffer(length)
        if not self._lib.rnic_peek(self._world._live(), self._index, address, data, length):
            raise MemoryFault(f"nic {self.name}: read of {length} bytes at {address:#x} leaves allocated memory")
        return data.raw

    def mem_write(self, address: int, data: bytes) -> None:
        """Writes host memory at once. Raises MemoryFault."""
        if not self._lib.rnic_poke(self._world._live(), self._index, address, bytes(data), len(data)):
            raise MemoryFault(f"nic {self.name}: write of {len(data)} bytes at {address:#x} leaves allocated memory")

    def alloc_pages(self, count: int, page_size: int = 4096) -> list[int]:
        """Physical addresses of ``count`` zeroed pages, scattered; DMA outside what was allocated gets DECERR."""
        return [self.alloc(page_size, page_size) for _ in range(count)]

    def alloc(self, length: int, align: int = 4096) -> int:
        """Physical address of ``length`` contiguous bytes, whole 4 KiB pages."""
        length = -(-length // 4096) * 4096
        base = self._pages.take(length, max(align, 4096))
        self._lib.rnic_map(self._world._live(), self._index, base, length)
        return base

    def free_pages(self, pages: list[int]) -> None:
        """Gives pages back. Their content is gone and DMA to them is an error from now on."""
        for base in pages:
            self._pages.release(base)
            self._lib.rnic_unmap(self._world._live(), self._index, base)

    def wait_write(self, address: int, length: int, max_cycles: int) -> None:
        """Lets time pass until the NIC's DMA wrote into a range. Raises Timeout."""
        self._lib.rnic_watch(self._world._live(), self._index, address, address + length)
        try:
            if not self._world.step(max_cycles, until=Stop.WATCH) & Stop.WATCH:
                raise Timeout(f"nic {self.name}: no DMA write to {address:#x}", self._world.cycle)
        finally:
            self._lib.rnic_watch(self._world._handle, self._index, 0, 0)

    # Host bus

    def bus(self, **settings: int | float | bool) -> None:
        """Changes the host bus, keeps what is not named.

        Cycles: ``read_latency`` (AR to first R), ``read_jitter``, ``write_latency`` (last W to B), ``write_jitter``.
        Bursts: ``max_reads``, ``max_writes``. Beats per cycle in (0, 1]: ``read_rate``, ``write_rate``. Switches:
        ``reorder`` (responses of different IDs pass each other), ``interleave`` (R beats of different IDs mix).
        Probability of a held cycle: ``ar_stall``, ``r_stall``, ``aw_stall``, ``w_stall``, ``b_stall``.
        """
        stalls = ("ar_stall", "r_stall", "aw_stall", "w_stall", "b_stall")
        for name, value in settings.items():
            if name in stalls:
                self._axi.stall[stalls.index(name)] = native.probability(value)
            elif name in ("read_rate", "write_rate"):
                if not 0 < value <= 1:
                    raise ValueError(f"{name} is {value}, must be in (0, 1] beats per cycle")
                setattr(self._axi, name, max(1, round(value * 65536)))
            elif name in ("read_latency", "write_latency", "max_reads", "max_writes") and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")
            elif name in dict(native.AxiConfig._fields_):
                setattr(self._axi, name, int(value))
            else:
                raise TypeError(f"the host bus has no setting {name}")
        self._lib.rnic_axi_config(self._world._live(), self._index, self._axi)

    def bus_error(self, address: int, length: int, *, reads: int = 0, writes: int = 0, count: int = -1) -> None:
        """Answers bursts that touch a range with an AXI response (2 SLVERR, 3 DECERR; 0 for no error), ``count`` times."""
        area = native.ErrorRange(first=address, end=address + length, read_response=reads, write_response=writes,
                                 remaining=count)
        self._lib.rnic_axi_error(self._world._live(), self._index, area)

    def clear_bus_errors(self) -> None:
        """Ends what `bus_error` began."""
        self._lib.rnic_axi_error(self._world._live(), self._index, None)

    @property
    def bus_counters(self) -> dict[str, int]:
        """Bursts, beats and errors of the host bus; ``unmapped`` counts DMA outside allocated memory."""
        counters = native.AxiCounters()
        self._lib.rnic_axi_counters(self._world._live(), self._index, counters)
        return {field[0]: getattr(counters, field[0]) for field in native.AxiCounters._fields_}

    # Interrupts and frames

    def irq(self, index: int = 0) -> bool:
        """Level of an interrupt in the last cycle that was simulated."""
        return bool(self._lib.rnic_irq(self._world._live(), self._index, index))

    def wait_irq(self, max_cycles: int = _DEFAULT_PATIENCE, index: int = 0) -> None:
        """Lets time pass until the interrupt is high; returns at once if it is. Raises Timeout."""
        end = self._world.cycle + max_cycles
        while not self.irq(index):
            if self._world.cycle >= end:
                raise Timeout(f"nic {self.name}: interrupt {index} did not rise", self._world.cycle)
            self._world.step(end - self._world.cycle, until=Stop.IRQ)

    def inject(self, data: bytes, *, port: Port = Port.NET_RX, error: bool = False) -> None:
        """Queues a frame for ``net_rx`` (from the wire, between its frames) or ``eth_tx`` (from the host side)."""
        if port not in (Port.NET_RX, Port.ETH_TX) or not data:
            raise ValueError(f"cannot inject {len(data)} bytes at {port.name}")
        self._lib.rnic_inject(self._world._live(), self._index, port, bytes(data), len(data), int(error))

    def receive(self, port: Port = Port.NET_TX) -> Frame | None:
        """The oldest frame this NIC sent at ``port`` (``NET_TX`` or ``ETH_RX``) that was not received yet."""
        self._world._collect()
        return self._inbox[port].popleft() if self._inbox[port] else None

    def wait_frame(self, max_cycles: int = _DEFAULT_PATIENCE, port: Port = Port.NET_TX) -> Frame:
        """Lets time pass until `receive` has a frame. Raises Timeout."""
        end = self._world.cycle + max_cycles
        while (frame := self.receive(port)) is None:
            if self._world.cycle >= end:
                raise Timeout(f"nic {self.name}: no frame at {port.name}", self._world.cycle)
            self._world.step(end - self._world.cycle, until=Stop.FRAME)
        return frame

    @property
    def frames(self) -> list[Frame]:
        """Every frame captured at the ports of this NIC, in the order they ended."""
        return [frame for frame in self._world.frames if frame.nic == self._index]


class World:
    """``nics`` NICs of one model, two and two joined by a wire, each with its host.

    Parameters: ``model`` is the directory `build_model` returned; ``seed`` sets page addresses, stalls and faults;
    ``host_latency``, ``write_latency`` and ``link_latency`` are cycles (AR to first R, last W to B, one way of the wire);
    ``reset_cycles`` long the reset lasts. Same model, seed and calls: same cycles, same bytes. Use as a context manager
    or call `close`. After ProtocolViolation or AssertionFailed the world is dead: every step raises it again.
    """

    def __init__(self, model: str | Path, nics: int = 2, seed: int = 0, *, host_latency: int = 64, write_latency: int = 16,
                 link_latency: int = 1, reset_cycles: int = 8):
        if not 1 <= nics <= 26:
            raise ValueError(f"nics is {nics}, must be 1..26")
        self.model = Path(model)
        self.manifest = json.loads((self.model / "manifest.json").read_text())
        self._lib = native.load(self.model / "librnic.so")
        self._handle = self._lib.rnic_create(nics, seed & 0xFFFFFFFFFFFFFFFF)
        if not self._handle:
            raise SimError(self._lib.rnic_last_error().decode())
        self._frames: list[Frame] = []
        self._probe_bytes = self.manifest["probe_width"] + 63 >> 6 << 3
        self.nic = [Host(self, index, seed * 257 + index, link_latency) for index in range(nics)]
        for host in self.nic:
            host.bus(read_latency=host_latency, write_latency=write_latency)
        self.monitor()
        self.reset(reset_cycles)

    def close(self) -> None:
        """Ends the world and closes its waves."""
        if self._handle:
            self._lib.rnic_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def _live(self) -> int:
        if not self._handle:
            raise SimError("the world is closed")
        return self._handle

    # Time

    @property
    def cycle(self) -> int:
        """Rising edges so far, those of resets included."""
        return self._lib.rnic_cycle(self._live())

    @property
    def clock_hz(self) -> int:
        """Clock rate the model stands for."""
        return self.manifest["clock_hz"]

    def step(self, cycles: int = 1, *, until: Stop = Stop(0)) -> Stop:  # noqa: B008 (a constant of an enum)
        """Simulates ``cycles`` cycles, fewer when one of the reasons in ``until`` comes up; returns what came up.

        Raises ProtocolViolation, AssertionFailed, SimError.
        """
        reason = ctypes.c_uint32()
        self._lib.rnic_step(self._live(), cycles, until, reason)
        self._check()
        return Stop(reason.value)

    def run_until(self, predicate: Callable[[], bool], max_cycles: int, *, every: int = 16) -> int:
        """Steps until ``predicate()`` holds, asked every ``every`` cycles; returns the cycle. Raises Timeout."""
        end = self.cycle + max_cycles
        while not predicate():
            if self.cycle >= end:
                raise Timeout("the condition did not come true", self.cycle)
            self.step(min(every, end - self.cycle))
        return self.cycle

    def reset(self, cycles: int = 8) -> None:
        """Resets every NIC and empties buses, queues and wires; host memory and settings stay."""
        self._lib.rnic_reset(self._live(), cycles)
        self._check()

    def _check(self) -> None:
        text = ctypes.c_char_p()
        kind = self._lib.rnic_failure(self._handle, text)
        if kind:
            error = {1: ProtocolViolation, 2: AssertionFailed}.get(kind, SimError)
            raise error((text.value or b"").decode(errors="replace"))

    def connect(self, first: int, second: int | None) -> None:
        """Joins the wires of two NICs; with ``second=None`` the far end of ``first`` is Python alone.

        Its frames then come from `Host.receive` and go in through `Host.inject`: the place for a socket or a TAP.
        """
        for index in {first} if second is None else {first, second}:
            self._lib.rnic_peer(self._live(), index, -1)
        if second is not None:
            self._lib.rnic_peer(self._handle, first, second)
            self._lib.rnic_peer(self._handle, second, first)

    # Monitors

    def monitor(self, *, events: bool = False, probes: bool = True,
                frames: tuple[Port, ...] = (Port.NET_TX, Port.ETH_RX)) -> None:
        """Chooses what is written down: port events, probe records, the frames of which ports."""
        mask = sum(1 << port for port in set(frames))
        self._lib.rnic_monitor(self._live(), int(events), int(probes), mask)

    def _fetch(self, function: str) -> bytes:
        data = ctypes.c_void_p()
        size = getattr(self._lib, function)(self._live(), data)
        return ctypes.string_at(data.value, size) if size and data.value else b""

    def events(self) -> list[Event]:
        """Port events since the last call, in the order they were seen."""
        return [Event(cycle, EventKind(kind), nic, ident, address, aux)
                for cycle, kind, nic, ident, address, aux in _EVENT.iter_unpack(self._fetch("rnic_events"))]

    def probe_events(self) -> list[ProbeRecord]:
        """Probe records since the last call, by cycle, then NIC, then slot."""
        raw, size = self._fetch("rnic_probes"), self._probe_bytes
        records = []
        for at in range(0, len(raw), _PROBE.size + size):
            cycle, nic, slot = _PROBE.unpack_from(raw, at)
            start = at + _PROBE.size
            records.append(ProbeRecord(cycle, nic, slot, int.from_bytes(raw[start:start + size], "little")))
        return records

    @property
    def frames(self) -> list[Frame]:
        """Every frame captured so far, in the order they ended."""
        self._collect()
        return self._frames

    def _collect(self) -> None:
        raw, at = self._fetch("rnic_frames"), 0
        while at < len(raw):
            first, last, nic, port, length, user = _FRAME.unpack_from(raw, at)
            at += _FRAME.size
            frame = Frame(nic, Port(port), first, last, raw[at:at + length], bool(user))
            at += length + 7 & ~7
            self._frames.append(frame)
            self.nic[nic]._inbox[frame.port].append(frame)

    def log(self) -> str:
        """What the model printed (``Print`` in the hardware) since the last call."""
        return self._lib.rnic_log(self._live()).decode(errors="replace")

    # Waves

    def waves_on(self, path: str | Path) -> None:
        """Begins to write all signals of all NICs to the FST file ``path``."""
        if not self._lib.rnic_trace_open(self._live(), str(path).encode()):
            raise SimError(self._lib.rnic_last_error().decode())

    def waves_off(self) -> None:
        """Closes the wave file."""
        self._lib.rnic_trace_close(self._live())
