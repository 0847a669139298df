"""cocotbext-axi models on the RNIC's ports: register access, host memory, random pauses."""

import random
from typing import Any

from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam, AxiSlave

from .streams import pattern

__all__ = ["Registers", "host_memory", "host_ram", "pause"]


def pause(models: Any, kind: str, rng: random.Random) -> None:
    """Pauses on each channel of a cocotbext-axi model (`streams.pattern`; independent of each other)."""
    for half in (models.write_if, models.read_if):
        for name in ("aw_channel", "w_channel", "b_channel", "ar_channel", "r_channel"):
            channel = getattr(half, name, None)
            if channel is not None and (pauses := pattern(kind, rng)) is not None:
                channel.set_pause_generator(pauses)


def host_ram(dut: Any, prefix: str, size: int) -> AxiRam:
    """Memory of ``size`` bytes behind an AXI4 port; addresses are taken modulo ``size``."""
    return AxiRam(AxiBus.from_prefix(dut, prefix), dut.clk, dut.rst, size=size)


def host_memory(dut: Any, prefix: str, target: Any) -> AxiSlave:
    """An AXI4 port that reads and writes ``target`` (``async read(address, length)``, ``async write(address, data)``); what
    it raises becomes SLVERR."""
    return AxiSlave(AxiBus.from_prefix(dut, prefix), dut.clk, dut.rst, target=target)


class Registers:
    """32-bit registers over AXI4-Lite; every access must be answered OKAY."""

    def __init__(self, dut: Any, prefix: str):
        self.master = AxiLiteMaster(AxiLiteBus.from_prefix(dut, prefix), dut.clk, dut.rst)

    async def read(self, address: int) -> int:
        answer = await self.master.read(address, 4)
        assert int(answer.resp) == 0, f"read of register {address:#x} answered {answer.resp}"
        return int.from_bytes(answer.data, "little")

    async def write(self, address: int, value: int) -> None:
        await self.write_bytes(address, value.to_bytes(4, "little"))

    async def write_bytes(self, address: int, data: bytes) -> None:
        """A write of fewer bytes than a word, at any of its bytes."""
        answer = await self.master.write(address, data)
        assert int(answer.resp) == 0, f"write of register {address:#x} answered {answer.resp}"
