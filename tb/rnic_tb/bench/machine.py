"""The two ends of a NIC bench: the machine with the NIC under test, and the software endpoint on the other end of its wire.

The verbs API is synchronous: it runs in a thread (`cocotb.task.bridge`), and `BenchHost` lets simulated time pass for it
whenever it touches a register or waits.
"""

import random
from collections import Counter, deque
from typing import Any

import cocotb
from cocotb.simtime import get_sim_time
from cocotb.task import resume
from cocotb.triggers import ClockCycles

from rnic.wire.frame import FrameError, parse_frame
from rnic_sim.hostmem import PageAllocator
from rnic_tb.endpoint import Device, Faults

from .axi import Registers, host_memory, pause
from .clock import PERIOD_NS
from .streams import AxisPort, FrameSink, FrameSource, pattern

__all__ = ["BenchHost", "Wire"]

_PAGE = 4096
_MIN_FRAME = 60  # what a MAC pads to


class BenchHost:
    """The driver seam (`rnic_sim.seam.Host`) over AXI4-Lite and sparse memory behind AXI4. Its methods must be called from a
    bridge thread. ``faults`` lists DMA outside allocated pages; it is answered SLVERR."""

    def __init__(self, dut: Any, seed: int, pauses: str, rng: random.Random):
        self.dut = dut
        self.faults: list[str] = []
        self._registers = Registers(dut, "s_axil")
        self._axi = host_memory(dut, "m_axi", self)
        pause(self._axi, pauses, rng)
        self._allocator = PageAllocator(seed)
        self._pages: dict[int, bytearray] = {}
        dut.eth_tx_tvalid.value = 0
        dut.eth_rx_tready.value = 1

    # Registers and time

    def csr_read(self, addr: int) -> int:
        return resume(self._registers.read)(addr)

    def csr_write(self, addr: int, value: int) -> None:
        resume(self._registers.write)(addr, value)

    def relax(self, cycles: int) -> None:
        resume(self._wait)(cycles)

    async def _wait(self, cycles: int) -> None:
        await ClockCycles(self.dut.clk, cycles)

    def now(self) -> int:
        return int(get_sim_time("ns")) // PERIOD_NS

    # Memory as software sees it

    def alloc_pages(self, count: int, page_size: int = _PAGE) -> list[int]:
        found = [self._allocator.take(page_size, page_size) for _ in range(count)]
        for base in found:
            self._pages |= {page: bytearray(_PAGE) for page in range(base // _PAGE, (base + page_size) // _PAGE)}
        return found

    def free_pages(self, pages: list[int]) -> None:
        for base in pages:
            length = self._allocator.release(base)
            for page in range(base // _PAGE, (base + length) // _PAGE):
                del self._pages[page]

    def mem_read(self, addr: int, length: int) -> bytes:
        return b"".join(bytes(page[at : at + count]) for page, at, _, count in self._pieces(addr, length))

    def mem_write(self, addr: int, data: bytes) -> None:
        for page, at, done, count in self._pieces(addr, len(data)):
            page[at : at + count] = data[done : done + count]

    def _pieces(self, addr: int, length: int):
        done = 0
        while done < length:
            number, at = divmod(addr + done, _PAGE)
            count = min(length - done, _PAGE - at)
            if number not in self._pages:
                raise IndexError(f"{addr + done:#x} is not allocated")
            yield self._pages[number], at, done, count
            done += count

    # Memory as the bus sees it

    async def read(self, address: int, length: int) -> bytes:
        try:
            return self.mem_read(address, length)
        except IndexError as error:
            self.faults.append(f"read: {error}")
            raise

    async def write(self, address: int, data: bytes) -> None:
        try:
            self.mem_write(address, data)
        except IndexError as error:
            self.faults.append(f"write: {error}")
            raise


class Wire:
    """``net_tx`` and ``net_rx`` tied to a software endpoint; frames too short for Ethernet are padded, as by a MAC.

    ``gaps``, ``stalls``: `streams.pattern` kinds of net_rx and net_tx. ``faults`` strike each frame to the NIC; loss and
    duplication also each frame from it. ``log`` holds the last frames, for messages; ``struck`` counts faults.
    """

    EVERY = 8  # cycles between two looks for frames of the endpoint

    def __init__(self, dut: Any, device: Device, gaps: str, stalls: str, rng: random.Random, faults: Faults = Faults()):
        self.dut, self.device, self.faults, self.rng = dut, device, faults, rng
        self.struck: Counter[str] = Counter()
        self._held: bytes | None = None  # a frame that lets the next one pass
        self.log: deque[str] = deque(maxlen=40)
        self.from_nic: list[bytes] = []
        self.to_nic = FrameSource(AxisPort(dut, "net_rx"), dut.clk, pattern(gaps, rng))
        FrameSink(AxisPort(dut, "net_tx"), dut.clk, pattern(stalls, rng), self._receive)
        self._start = int(get_sim_time("ns"))
        cocotb.start_soon(self._run())

    def _now(self) -> int:
        return int(get_sim_time("ns")) - self._start

    def _receive(self, item: tuple[bytes, bool]) -> None:
        raw, err = item
        self._note("from the NIC", raw)
        assert not err, "the NIC aborted a frame"
        self.from_nic.append(raw)
        self.device.advance(self._now() - self.device.now)
        if self._strikes("loss"):
            return
        for _ in range(1 + self._strikes("duplicate")):
            self.device.receive(raw.ljust(_MIN_FRAME, b"\0"))

    def _strikes(self, fault: str) -> bool:
        hit = self.rng.random() < getattr(self.faults, fault)
        if hit:
            self.log.append(f"{self._now():>9} ns {fault}:")
            self.struck[fault] += 1
        return hit

    def _send(self, raw: bytes) -> None:
        """To the NIC, as good as the faults let it."""
        raw = raw.ljust(_MIN_FRAME, b"\0")
        lost, twice, corrupt = self._strikes("loss"), self._strikes("duplicate"), self._strikes("corrupt")
        self._note("to the NIC", raw)
        if lost:
            return
        if corrupt:
            flipped = bytearray(raw)
            flipped[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
            raw = bytes(flipped)
        if self._held is None and self._strikes("reorder"):
            self._held = raw
            return
        for _ in range(1 + twice):
            self.to_nic.send(raw)
        if self._held is not None:
            self.to_nic.send(self._held)
            self._held = None

    async def _run(self) -> None:
        device = self.device
        while True:
            await ClockCycles(self.dut.clk, self.EVERY)
            device.advance(self._now() - device.now)
            if len(self.to_nic.queue) < 64:  # beats
                for raw in device.poll_tx(1):
                    self._send(raw)

    def _note(self, direction: str, raw: bytes) -> None:
        try:
            frame = parse_frame(raw)
        except FrameError as error:
            self.log.append(f"{self._now():>9} ns {direction:12} {len(raw)} bytes, {error}: {raw.hex()}")
            return
        name = frame.info.opcode.name if frame.info else hex(frame.opcode)
        text = f"{self._now():>9} ns {direction:12} {name:18} QPN {frame.dest_qpn:#x} PSN {frame.psn:#x}"
        text += f" {len(frame.payload)} bytes" + " AckReq" * frame.ackreq
        if frame.info is not None and frame.info.has_aeth:
            text += f" syndrome {frame.syndrome:#04x} MSN {frame.msn}"
        self.log.append(text)
