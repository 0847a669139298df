"""Cuts a host access into bus bursts."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.memory.axi import BOUNDARY, MAX_BEATS
from rnic.records import DmaCommand

__all__ = ["BurstCommand", "BurstSplitter", "max_block"]


def max_block(width: int) -> int:
    """Bytes of the largest aligned address block one burst may cover on a bus of ``width`` bits."""
    return min(BOUNDARY, MAX_BEATS * width // 8)


class BurstCommand(data.StructLayout):
    """One burst: word-aligned ``address``, ``len`` beats less one (AxLEN); ``last`` of its access; ``tag`` of the
    access.

    Parameters: ``tag_width`` in bits.
    """

    def __init__(self, tag_width: int = 0):
        super().__init__({"address": 64, "len": 8, "last": 1, "tag": tag_width})


class BurstSplitter(wiring.Component):
    """Cuts each access at every multiple of ``block`` bytes of address.

    Timing: latency 1 cycle, one burst per cycle, also from one access to the next; ``o`` is computed from registers
    within the cycle (the taker has a register), ``i.ready`` follows ``o.ready`` combinationally.

    Parameters: ``width`` of the bus in bits; ``block``, a power of two of at least one word and at most 4 KiB or 256
    words; ``tag_width`` in bits. Raises ValueError.
    Members: ``i``, stream of ``DmaCommand`` (length 1..65535, Assert); ``tag``, goes with the payload of ``i``; ``o``,
    stream of ``BurstCommand``; ``busy``, an access is inside.
    """

    def __init__(self, width: int, block: int, tag_width: int = 0):
        if block < width // 8 or block & (block - 1) or block > max_block(width):
            raise ValueError(f"block is {block}, must be a power of two {width // 8}..{max_block(width)}")
        self.width = width
        self.block = block
        self.tag_width = tag_width
        super().__init__({
            "i": In(stream.Signature(DmaCommand())),
            "tag": In(tag_width),
            "o": Out(stream.Signature(BurstCommand(tag_width))),
            "busy": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        lane_bits = (self.width // 8 - 1).bit_length()
        block_bits = (self.block - 1).bit_length()

        active = Signal()  # the registers below hold what is left of an access
        block = Signal(64 - block_bits)
        offset = Signal(block_bits)
        end_byte = Signal(range(self.block + (1 << 16)))  # number of the last byte, counted from `block`
        tag = Signal(self.tag_width)

        final = Signal()  # end_byte lies in `block`
        behind = Signal(range(self.block + (1 << 16) + 1))  # number of the byte behind a new access
        first_word = Signal(block_bits - lane_bits)
        last_word = Signal(block_bits - lane_bits)
        step = Signal()
        m.d.comb += [
            behind.eq(self.i.payload.address[:block_bits] + self.i.payload.length),
            first_word.eq(offset >> lane_bits),
            last_word.eq(Mux(final, end_byte[lane_bits:block_bits], (1 << (block_bits - lane_bits)) - 1)),
            self.o.valid.eq(active),
            self.o.payload.address.eq(Cat(C(0, lane_bits), first_word, block)),
            self.o.payload.len.eq(last_word - first_word),
            self.o.payload.last.eq(final),
            self.o.payload.tag.eq(tag),
            step.eq(active & self.o.ready),
            self.i.ready.eq(~active | (self.o.ready & final)),
            self.busy.eq(active),
        ]
        with m.If(self.i.ready):
            m.d.sync += [
                active.eq(self.i.valid),
                Cat(offset, block).eq(self.i.payload.address),
                end_byte.eq(self.i.payload.address[:block_bits] + self.i.payload.length - 1),
                final.eq((behind >> block_bits == 0) | (behind == self.block)),
                tag.eq(self.tag),
            ]
        with m.Elif(step):
            m.d.sync += [
                block.eq(block + 1),
                offset.eq(0),
                end_byte.eq(end_byte - self.block),
                final.eq(end_byte >> block_bits == 1),
            ]
        m.d.sync += Assert(~active | (final == (end_byte >> block_bits == 0)), "BurstSplitter: end and its flag differ")
        m.d.sync += Assert(~self.i.valid | (self.i.payload.length != 0),
                           Format("BurstSplitter: access of zero bytes at {:#x}", self.i.payload.address))
        return m
