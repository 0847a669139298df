"""The port's tables: own addresses, P_Keys, path MTU."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from ..abi import GID_ENTRY, PORT_CFG, CtxTable
from ..config import Params
from ..records import CtxBus
from .microcode import RESET_MTU

__all__ = ["PortTable"]

DEFAULT_PKEY = 0xFFFF


class PortTable(wiring.Component):
    """Registers written over the context bus and read by many: at most 16 GIDs and 16 P_Keys.

    Ports: ``ctx`` (tables GID and PORT, always ready); ``gids``, ``pkeys`` arrays and ``mtu``, the path MTU code. After reset no
    GID is valid, P_Key 0 is 0xFFFF (the others 0, which matches nothing) and the MTU is 4096 bytes.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "ctx": In(CtxBus(p)),
            "gids": Out(data.ArrayLayout(GID_ENTRY.layout, p.num_gids)),
            "pkeys": Out(data.ArrayLayout(16, p.num_pkeys), init=[DEFAULT_PKEY] + [0] * (p.num_pkeys - 1)),
            "mtu": Out(3, init=RESET_MTU),
        })

    def elaborate(self, platform):
        m = Module()
        bus = self.ctx.payload
        m.d.comb += self.ctx.ready.eq(1)

        def write(index, word, target):
            """The bytes of ``word`` of table entry ``index`` into ``target`` (up to 32 bits)."""
            with m.If((bus.index == index) & (bus.word == word)):
                for byte in range((len(target) + 7) // 8):
                    with m.If(bus.bytes[byte]):
                        part = target[8 * byte : 8 * byte + 8]
                        m.d.sync += part.eq(bus.data[8 * byte : 8 * byte + 8])

        with m.If(self.ctx.valid & (bus.table == CtxTable.GID)):
            m.d.sync += Assert(bus.index < self.p.num_gids, Format("GID index {}", bus.index))
            for index in range(self.p.num_gids):
                entry = self.gids[index].as_value()
                for word in range(GID_ENTRY.size // 4):
                    write(index, word, entry[32 * word : 32 * word + 32])
        with m.If(self.ctx.valid & (bus.table == CtxTable.PORT)):
            write(0, PORT_CFG.fields["mtu"].offset // 32, self.mtu)
            for index in range(self.p.num_pkeys):
                write(0, PORT_CFG.fields[f"pkey{index}"].offset // 32, self.pkeys[index])
        return m
