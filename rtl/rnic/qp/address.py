"""Addresses of QPs, for the two blocks at the wire."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi import ADDRESS_CTX, CtxTable
from ..config import Params
from ..records import CtxBus
from .table import ContextTable

__all__ = ["AddressTable"]

_FIRST = (0, 1, 3, 6, 8, 9)  # words in the first half: what only one reader needs is in the same rows of the memories
_SECOND = (2, 4, 5, 7, 10, 11)


class AddressTable(wiring.Component):
    """The table ADDRESS, written over the context bus and read by two.

    Where a frame takes long enough on the bus (``p.address_cycles`` 3) a record lies in two rows of a memory half as wide, read
    in turn.

    Ports: ``ctx`` (always ready); ``read_index_0``, ``read_index_1``: the record is on ``read_0``, ``read_1``
    ``p.address_cycles`` cycles after its index came and as long as that stays, which must be 2 cycles at least when it takes 3;
    it is also there in the cycle in which it is due if the index has changed after these two.
    """

    READERS = 2

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "ctx": In(CtxBus(p)),
            **{f"read_index_{i}": In(p.qpn_bits) for i in range(self.READERS)},
            **{f"read_{i}": Out(ADDRESS_CTX.layout) for i in range(self.READERS)},
        })

    def read(self, i: int):
        """Index and record signals of read port ``i``."""
        return getattr(self, f"read_index_{i}"), getattr(self, f"read_{i}")

    def elaborate(self, platform):
        m = Module()
        if self.p.address_cycles == 2:
            m.submodules.table = table = ContextTable(
                self.p, CtxTable.ADDRESS, ADDRESS_CTX, self.p.num_qps, read_ports=self.READERS)
            wiring.connect(m, wiring.flipped(self.ctx), table.ctx)
            for i in range(self.READERS):
                m.d.comb += [table.read(i)[0].eq(self.read(i)[0]), self.read(i)[1].eq(table.read(i)[1])]
            return m

        assert sorted(_FIRST + _SECOND) == list(range(ADDRESS_CTX.size // 4))
        width = 32 * len(_FIRST)
        m.submodules.mem = mem = memory.Memory(shape=unsigned(width), depth=2 * self.p.num_qps, init=[])
        write = mem.write_port(granularity=8)
        bus = self.ctx.payload
        mine = Signal()
        m.d.comb += [
            self.ctx.ready.eq(1),
            mine.eq(self.ctx.valid & (bus.table == CtxTable.ADDRESS)),
            write.addr.eq(Cat(Cat(bus.word == word for word in _SECOND).any(), bus.index[: self.p.qpn_bits])),
            write.data.eq(bus.data.replicate(len(_FIRST))),
        ]
        for place, words in enumerate(zip(_FIRST, _SECOND, strict=True)):
            with m.If(mine & Cat(bus.word == word for word in words).any()):
                m.d.comb += write.en[4 * place : 4 * place + 4].eq(bus.bytes)

        turn = Signal(2)  # the half asked for, that at the memories' outputs
        m.d.sync += turn.eq(Cat(~turn[0], turn[0]))
        for i in range(self.READERS):
            index, record = self.read(i)
            port = mem.read_port()
            m.d.comb += port.addr.eq(Cat(turn[0], index))
            for half, words in enumerate((_FIRST, _SECOND)):
                with m.If(turn[1] == half):
                    for place, word in enumerate(words):
                        m.d.sync += record.as_value()[32 * word : 32 * word + 32].eq(port.data[32 * place : 32 * place + 32])
        with m.If(mine):
            m.d.sync += [
                Assert(bus.index < self.p.num_qps, Format("context index {} out of {}", bus.index, self.p.num_qps)),
                Assert(bus.word < ADDRESS_CTX.size // 4, Format("context word {} out of range", bus.word)),
            ]
        return m
