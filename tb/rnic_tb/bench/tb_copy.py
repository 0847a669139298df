"""DmaRead and DmaWrite behind one AXI4 port: memory copied between random places by two channels at once."""

import random
from typing import Any

import cocotb
from cocotb.triggers import ClockCycles

from .axi import host_ram, pause
from .clock import bench, start
from .harness import CopyCommand, CopyEngine
from .streams import PATTERNS, ItemSink, ItemSource, PackedPort, pattern

HALF = 1 << 17  # sources in the lower half of the memory, targets in the upper
PAGE = 4096
FILL = 0xA5


class Copies:
    """The model and what its memory must hold."""

    def __init__(self, dut: Any, rng: random.Random, pauses: str, gaps: str):
        self.dut, self.rng = dut, rng
        self.ram = host_ram(dut, "copy_m_axi", 2 * HALF)
        pause(self.ram, pauses, rng)
        self.commands = [ItemSource(PackedPort(dut, f"copy_command_{n}"), dut.clk, pattern(gaps, rng)) for n in range(2)]
        self.done = [ItemSink(PackedPort(dut, f"copy_done_{n}"), dut.clk, pattern(gaps, rng)) for n in range(2)]
        self.source = rng.randbytes(HALF)
        self.wanted = bytearray([FILL]) * HALF
        self._free = HALF

    def fill(self) -> None:
        self.ram.write(0, self.source)
        self.ram.write(HALF, bytes(self.wanted))

    def copy(self, channel: int, source: int, length: int, offset: int) -> None:
        """Copy to a place of its own, ``offset`` in its page, behind all places so far (written back to front)."""
        self._free = (self._free - length - PAGE) // PAGE * PAGE + offset
        assert self._free >= 0, "the memory is too small for this test"
        target, self._free = self._free, self._free
        self.wanted[target : target + length] = self.source[source : source + length]
        self.commands[channel].send(
            CopyCommand().const({"source": source, "target": HALF + target, "length": length}).as_value().value
        )

    async def check(self, counts: list[int]) -> None:
        for channel, count in enumerate(counts):
            for _ in range(count):
                assert await self.done[channel].receive() == 0
        assert self.ram.read(0, HALF) == self.source, "a source was written"
        got = bytes(self.ram.read(HALF, HALF) or b"")
        if got != self.wanted:
            wrong = [at for at in range(HALF) if got[at] != self.wanted[at]]
            raise AssertionError(f"{len(wrong)} bytes wrong, from {wrong[0]:#x} to {wrong[-1]:#x}")


@bench(60_000)
@cocotb.parametrize(pauses=PATTERNS, gaps=["none", "half"])
async def random_places(dut: Any, pauses: str, gaps: str) -> None:
    """Lengths from one byte to more than two pages, any alignment of source and target, both channels busy."""
    rng = random.Random(f"{cocotb.RANDOM_SEED} copy {pauses} {gaps}")
    copies = Copies(dut, rng, pauses, gaps)
    await start(dut, "copy")
    copies.fill()
    counts = [0, 0]
    for _ in range(10):
        channel = rng.randrange(2)
        length = rng.choice([rng.randint(1, 16), rng.randint(1, 200), rng.randint(200, 1500)])
        copies.copy(channel, rng.randrange(HALF - length), length, rng.randrange(PAGE - 1))
        counts[channel] += 1
    for channel in range(2):
        copies.copy(channel, rng.randrange(HALF - PAGE * 3), rng.randint(PAGE, CopyEngine.MAX_BYTES), rng.randrange(PAGE))
        counts[channel] += 1
    await copies.check(counts)


@bench(20_000)
async def page_ends(dut: Any) -> None:
    """Accesses that end at, before and behind a page's end, on either side."""
    rng = random.Random(f"{cocotb.RANDOM_SEED} ends")
    copies = Copies(dut, rng, "rare", "none")
    await start(dut, "ends")
    copies.fill()
    lanes = len(dut.copy_m_axi_wstrb)
    cases = [(PAGE - a, b, PAGE - c) for a in (1, lanes) for b in (1, 2, lanes + 1) for c in (1, lanes + 1)]
    for n, (source, length, offset) in enumerate(cases):
        copies.copy(n % 2, source, length, offset)
    await copies.check([len(cases) // 2, len(cases) // 2])
    await ClockCycles(dut.clk, 50)
    assert not dut.copy_done_0_valid.value and not dut.copy_done_1_valid.value
