"""A context table whose records are read and written half by half."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from ..abi import CtxTable
from ..abi.fields import Struct
from ..config import Params
from ..records import CtxBus

__all__ = ["HalvedTable"]


class HalvedTable(wiring.Component):
    """``depth`` records of an `abi.Struct` in a memory with two rows a record: half as wide as that of a `ContextTable`, for a
    reader that has two cycles.

    Ports: ``ctx`` the command engine's bus. ``read_index``, ``read_second``: the half named by the latter is on ``first`` or
    ``second`` (fields of the other half are 0) 2 cycles later, for one cycle; the memory's output and the port are registered; a
    write in the cycle of the index is seen, a later one not. ``write_en``, ``write_index``, ``write_second``, ``write_words``
    (one bit per 32-bit word of the record) and ``write_data``: the engine writes one half; it always wins, the bus waits.

    Parameters: ``table`` number on the bus; ``seconds``, the words in the second half, as many as in the first (ValueError).
    """

    def __init__(self, p: Params, table: CtxTable, struct: Struct, depth: int, seconds: tuple[int, ...]):
        self.words = struct.size // 4
        self.halves = tuple(word for word in range(self.words) if word not in seconds), seconds
        if struct.size % 4 or len(self.halves[0]) != len(seconds):
            raise ValueError(f"{struct.name} has {struct.size} bytes, {len(seconds)} words are no half of it")
        self.table, self.struct, self.depth = table, struct, depth
        self.index_bits = max(1, (depth - 1).bit_length())
        super().__init__({
            "ctx": In(CtxBus(p)),
            "read_index": In(self.index_bits), "read_second": In(1),
            "first": Out(struct.layout), "second": Out(struct.layout),
            "write_en": In(1), "write_index": In(self.index_bits), "write_second": In(1), "write_words": In(self.words),
            "write_data": In(struct.layout),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        width = 16 * self.words
        m.submodules.mem = mem = memory.Memory(shape=unsigned(width), depth=2 * self.depth, init=[])
        write = mem.write_port(granularity=8)
        read = mem.read_port(transparent_for=(write,))
        bus = self.ctx.payload
        found = Signal(width)
        mine, bus_write = Signal(), Signal()
        m.d.sync += found.eq(read.data)
        m.d.comb += [
            read.addr.eq(Cat(self.read_second, self.read_index)),
            mine.eq(bus.table == self.table),
            self.ctx.ready.eq(~mine | ~self.write_en),
            bus_write.eq(self.ctx.valid & mine & ~self.write_en),
            write.addr.eq(Cat(Cat(bus.word == word for word in self.halves[1]).any(), bus.index[: self.index_bits])),
            write.data.eq(bus.data.replicate(self.words // 2)),
        ]
        for record, words in zip((self.first, self.second), self.halves, strict=True):
            for place, word in enumerate(words):
                m.d.comb += record.as_value()[32 * word : 32 * word + 32].eq(found[32 * place : 32 * place + 32])
                with m.If(bus_write & (bus.word == word)):
                    m.d.comb += write.en[4 * place : 4 * place + 4].eq(bus.bytes)
        with m.If(self.write_en):
            m.d.comb += write.addr.eq(Cat(self.write_second, self.write_index))
            for place, (first, second) in enumerate(zip(*self.halves, strict=True)):
                data = self.write_data.as_value()
                m.d.comb += [
                    write.data[32 * place : 32 * place + 32].eq(
                        Mux(self.write_second, data[32 * second : 32 * second + 32], data[32 * first : 32 * first + 32])),
                    write.en[4 * place : 4 * place + 4].eq(
                        Mux(self.write_second, self.write_words[second], self.write_words[first]).replicate(4)),
                ]
        with m.If(bus_write):
            m.d.sync += Assert(bus.index < self.depth, Format("context index {} out of {}", bus.index, self.depth))
            m.d.sync += Assert(bus.word < self.words, Format("context word {} out of {}", bus.word, self.words))
        return m
