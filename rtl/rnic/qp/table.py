"""A context table: one record per object, in memory, written by its engine and by the command engine."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi import CtxTable
from ..abi.fields import Struct
from ..config import Params
from ..records import CtxBus

__all__ = ["ContextTable"]


_FEW = 16  # rows that fit in the smallest memory of logic cells


class ContextTable(wiring.Component):
    """``depth`` records of an `abi.Struct`, in block memory, zero after power-up.

    Ports: ``ctx`` the command engine's bus; ``read_index_<i>`` / ``read_<i>``: a read takes 2 cycles (index in cycle t,
    record stable in cycle t+2; both the memory's output and the port are registered), one per cycle; a write in the cycle of
    the index is seen when the table is ``transparent``, a later one is not. With ``engine_writes``: ``write_en``,
    ``write_index``, ``write_words`` (one bit per 32-bit word) and ``write_data``; the engine always wins, the bus waits.
    With ``exclusive`` the owner holds ``ctx.valid`` back while it writes (asserted), and the table is always ready: no path from
    the engine's decision to the bus.

    The bus is broadcast: a table is ready for writes to other tables. Out-of-range indices must not come (asserted).

    Parameters: ``table`` number on the bus, or None for a table the bus does not reach.
    """

    def __init__(self, p: Params, table: CtxTable | None, struct: Struct, depth: int, *, read_ports: int = 1,
                 engine_writes: bool = False, exclusive: bool = False,
                 transparent: bool = False):  # fmt: skip
        if struct.size % 4:
            raise ValueError(f"{struct.name} has {struct.size} bytes, must be a multiple of 4")
        self.table, self.struct, self.depth = table, struct, depth
        self.read_ports, self.engine_writes = read_ports, engine_writes
        self.exclusive, self.transparent = exclusive, transparent
        self.words = struct.size // 4
        self.index_bits = max(1, (depth - 1).bit_length())
        ports: dict = {"ctx": In(CtxBus(p))}
        for i in range(read_ports):
            ports[f"read_index_{i}"] = In(self.index_bits)
            ports[f"read_{i}"] = Out(struct.layout)
        if engine_writes:
            ports |= {
                "write_en": In(1), "write_index": In(self.index_bits), "write_words": In(self.words),
                "write_data": In(struct.layout),
            }  # fmt: skip
        super().__init__(ports)

    def read(self, i: int):
        """Index and record signals of read port ``i``."""
        return getattr(self, f"read_index_{i}"), getattr(self, f"read_{i}")

    def elaborate(self, platform):
        m = Module()
        width = 32 * self.words
        # A few rows above a power of two would double a block memory: they get a memory of logic cells.
        main = 1 << (self.depth.bit_length() - 1)
        few = self.depth - main if self.depth - main <= _FEW else 0
        m.submodules.mem = mem = memory.Memory(shape=unsigned(width), depth=self.depth - few, init=[])
        write = mem.write_port(granularity=8)
        bus = self.ctx.payload
        address, enable = Signal(self.index_bits), Signal(4 * self.words)  # of the write
        m.d.comb += write.addr.eq(address)
        mine = Signal()
        bus_write = Signal()
        engine = Signal()
        if self.engine_writes:
            m.d.comb += engine.eq(self.write_en)
        if self.table is not None:
            m.d.comb += mine.eq(bus.table == self.table)
        if self.exclusive:
            m.d.sync += Assert(~(bus_write & engine), Format("{} table: written from two sides", self.struct.name))
        m.d.comb += [
            self.ctx.ready.eq(1 if self.exclusive else ~mine | ~engine),
            bus_write.eq(self.ctx.valid & mine & (1 if self.exclusive else ~engine)),
            address.eq(bus.index),
            write.data.eq(bus.data.replicate(self.words)),
        ]
        for word in range(self.words):
            with m.If(bus_write & (bus.word == word)):
                m.d.comb += enable[4 * word : 4 * word + 4].eq(bus.bytes)
        if self.engine_writes:
            with m.If(engine):
                m.d.comb += [
                    address.eq(self.write_index),
                    write.data.eq(self.write_data.as_value()),
                ]
                for word in range(self.words):
                    m.d.comb += enable[4 * word : 4 * word + 4].eq(self.write_words[word].replicate(4))
        if few:
            m.submodules.rest = rest = memory.Memory(shape=unsigned(width), depth=few, init=[])
            rest_write = rest.write_port(granularity=8)
            m.d.comb += [
                rest_write.addr.eq(address), rest_write.data.eq(write.data),
                write.en.eq(Mux(address[-1], 0, enable)), rest_write.en.eq(Mux(address[-1], enable, 0)),
            ]  # fmt: skip
        else:
            m.d.comb += write.en.eq(enable)
        for i in range(self.read_ports):
            index, record = self.read(i)
            port = mem.read_port(transparent_for=(write,) if self.transparent else ())
            found = Signal(width, name=f"found_{i}")
            m.d.comb += [port.addr.eq(index), found.eq(port.data)]
            if few:
                rest_port = rest.read_port(domain="comb")
                asked = Signal(self.index_bits, name=f"asked_{i}")
                m.d.sync += asked.eq(index)
                m.d.comb += rest_port.addr.eq(asked)
                with m.If(asked[-1]):
                    m.d.comb += found.eq(rest_port.data)
            m.d.sync += record.as_value().eq(found)
        with m.If(bus_write):
            m.d.sync += Assert(bus.index < self.depth, Format("context index {} out of {}", bus.index, self.depth))
            m.d.sync += Assert(bus.word < self.words, Format("context word {} out of {}", bus.word, self.words))
        return m
