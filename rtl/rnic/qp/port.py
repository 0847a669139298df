"""The port's tables: own addresses, P_Keys, path MTU."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi import GID_ENTRY, PORT_CFG, CtxTable
from ..config import Params
from ..records import CtxBus
from .microcode import RESET_MTU

__all__ = ["PortTable"]

DEFAULT_PKEY = 0xFFFF


class PortTable(wiring.Component):
    """Written over the context bus, read by two: at most 16 GIDs in a memory, 16 P_Keys in registers.

    Ports: ``ctx`` (tables GID and PORT, always ready); ``gid_0``, ``gid_1`` follow ``gid_index_0``, ``gid_index_1`` in the same
    cycle; ``pkeys`` array and ``mtu``, the path MTU code. After reset no GID is valid, P_Key 0 is 0xFFFF (the others 0, which
    matches nothing) and the MTU is 4096 bytes.
    """

    READERS = 2

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "ctx": In(CtxBus(p)),
            **{f"gid_index_{i}": In(p.gid_bits) for i in range(self.READERS)},
            **{f"gid_{i}": Out(GID_ENTRY.layout) for i in range(self.READERS)},
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

        words = GID_ENTRY.size // 4
        m.submodules.gids = gids = memory.Memory(shape=unsigned(32 * words), depth=self.p.num_gids, init=[])
        gid_write = gids.write_port(granularity=8)
        valid = Signal(self.p.num_gids)  # a memory keeps its contents over a reset
        at = GID_ENTRY.fields["valid"].offset
        m.d.comb += [gid_write.addr.eq(bus.index), gid_write.data.eq(bus.data.replicate(words))]
        with m.If(self.ctx.valid & (bus.table == CtxTable.GID)):
            m.d.sync += Assert(bus.index < self.p.num_gids, Format("GID index {}", bus.index))
            for word in range(words):
                with m.If(bus.word == word):
                    m.d.comb += gid_write.en[4 * word : 4 * word + 4].eq(bus.bytes)
            with m.If((bus.word == at // 32) & bus.bytes[at % 32 // 8]):
                m.d.sync += valid.bit_select(bus.index[: self.p.gid_bits], 1).eq(bus.data[at % 32])
        for i in range(self.READERS):
            index, entry, port = getattr(self, f"gid_index_{i}"), getattr(self, f"gid_{i}"), gids.read_port(domain="comb")
            m.d.comb += [
                port.addr.eq(index),
                entry.as_value().eq(port.data),
                entry.valid.eq(valid.bit_select(index, 1)),
            ]
        with m.If(self.ctx.valid & (bus.table == CtxTable.PORT)):
            write(0, PORT_CFG.fields["mtu"].offset // 32, self.mtu)
            for index in range(self.p.num_pkeys):
                write(0, PORT_CFG.fields[f"pkey{index}"].offset // 32, self.pkeys[index])
        return m
