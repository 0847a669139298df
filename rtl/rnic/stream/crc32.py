"""CRC-32 (IEEE 802.3, reflected, as Ethernet FCS and RoCE ICRC use it) over whole bus words.

The CRC register is linear in state and data, so each output bit is one XOR over a constant set of input bits. A word
that is only partly data is fed with zeros behind the data; the surplus zero bytes are undone afterwards: zero bytes
multiply the state by an invertible matrix.
"""

import functools

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

__all__ = ["INIT", "POLY", "Crc32Unstep", "Crc32Word", "step_bytes", "step_zeros"]

POLY = 0xEDB88320  # reflected
INIT = 0xFFFFFFFF


def step_bytes(state: int, data: bytes) -> int:
    """Raw CRC register (before the final inversion) after ``data``. ``zlib.crc32(d) == ~step_bytes(INIT, d)``."""
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (POLY if state & 1 else 0)
    return state


def step_zeros(state: int, n: int) -> int:
    """Raw CRC register after ``n`` zero bytes; ``n`` may be negative: before them."""
    if n >= 0:
        return step_bytes(state, bytes(n))
    for _ in range(-8 * n):
        # POLY has bit 31 set, so bit 31 tells whether the forward step subtracted it.
        state = ((state ^ POLY) << 1 | 1) if state >> 31 else state << 1
    return state


def _rows(columns: list[int]) -> list[int]:
    """Transpose: for each of 32 output bits the mask of the input bits it is the XOR of."""
    return [sum((column >> bit & 1) << index for index, column in enumerate(columns)) for bit in range(32)]


@functools.cache
def state_masks(n: int) -> list[int]:
    """For each output bit the 32-bit mask of state bits, for ``n`` zero bytes (negative: backward)."""
    return _rows([step_zeros(1 << bit, n) for bit in range(32)])


@functools.cache
def data_masks(n: int) -> list[int]:
    """For each output bit the mask over ``8 n`` data bits (byte 0 in bits 7:0) of ``n`` bytes from state 0."""
    columns = []
    for index in range(n):
        for bit in range(8):
            # A data bit acts as the same state bit, followed by this byte's own eight shifts and those of all later
            # ones.
            columns.append(step_zeros(1 << bit, n - index))
    return _rows(columns)


def multiply(m: Module, out: Signal, value: Value, masks: list[int], domain: str = "comb") -> None:
    """Drive ``out`` (32 bits) with the product of ``value`` and the bit matrix ``masks``."""
    for bit, mask in enumerate(masks):
        m.d[domain] += out[bit].eq((value & mask).xor())


class Crc32Word(wiring.Component):
    """CRC register fed with one whole word per cycle.

    Timing: one word per cycle; ``state`` is that of a word two cycles after the word (the data's part of the XOR has a
    register of its own); ``done`` is ``valid`` two cycles later.

    Parameters: ``width`` in bits, a multiple of 8; ``init``, the raw register before the first word.
    Members: ``valid``; ``start``, this word is the first of a packet; ``data``; ``state``, the raw register (the CRC is
    its inversion); ``done``, a word has just been added.
    """

    def __init__(self, width: int, *, init: int = INIT):
        if width <= 0 or width % 8:
            raise ValueError(f"width is {width}, must be a positive multiple of 8")
        self.width = width
        self.init = init
        super().__init__({
            "valid": In(1), "start": In(1), "data": In(width),
            "state": Out(32, init=init), "done": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        data_part = Signal(32)
        part_valid = Signal()
        part_start = Signal()
        multiply(m, data_part, self.data, data_masks(lanes), "sync")
        m.d.sync += [part_valid.eq(self.valid), part_start.eq(self.start), self.done.eq(part_valid)]

        stepped = Signal(32)
        first = step_zeros(self.init, lanes)
        multiply(m, stepped, self.state, state_masks(lanes))
        with m.If(part_valid):
            m.d.sync += self.state.eq(Mux(part_start, first, stepped) ^ data_part)
        return m


class Crc32Unstep(wiring.Component):
    """Takes ``4 * count`` zero bytes back out of a raw CRC register.

    Timing: a pipeline without back-pressure, one state per cycle, latency ``stages`` cycles (1 at 64 bits, 4 at 512:
    one per bit of ``count``). ``tag`` travels along.

    Parameters: ``width`` of the bus in bits, a multiple of 32 from 64; ``tag_width`` in bits.
    Members: ``valid``, ``state``, ``count`` (0..width/32 - 1, in 4-byte units), ``tag``; ``o_valid``, ``o_state``,
    ``o_tag``.
    """

    def __init__(self, width: int, *, tag_width: int = 0):
        if width < 64 or width % 32:
            raise ValueError(f"width is {width}, must be a multiple of 32, at least 64")
        self.stages = (width // 32 - 1).bit_length()
        super().__init__({
            "valid": In(1), "state": In(32), "count": In(self.stages), "tag": In(tag_width),
            "o_valid": Out(1), "o_state": Out(32), "o_tag": Out(tag_width),
        })

    def elaborate(self, platform):
        m = Module()
        valid, state, count, tag = self.valid, self.state, self.count, self.tag
        for stage in range(self.stages):
            undone = Signal(32, name=f"undone_{stage}")
            multiply(m, undone, state, state_masks(-4 << stage))
            next_valid = Signal(name=f"valid_{stage}")
            next_state = Signal(32, name=f"state_{stage}")
            next_count = Signal.like(self.count, name=f"count_{stage}")
            next_tag = Signal.like(self.tag, name=f"tag_{stage}")
            m.d.sync += [
                next_valid.eq(valid),
                next_state.eq(Mux(count[stage], undone, state)),
                next_count.eq(count),
                next_tag.eq(tag),
            ]
            valid, state, count, tag = next_valid, next_state, next_count, next_tag
        m.d.comb += [self.o_valid.eq(valid), self.o_state.eq(state), self.o_tag.eq(tag)]
        return m
