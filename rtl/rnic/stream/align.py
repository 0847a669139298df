"""Between bus words at any byte offset and packets that begin in lane 0."""

from amaranth import *
from amaranth.hdl import Assert, Format
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from rnic.stream.beat import Beat
from rnic.stream.buffer import SkidBuffer, StreamRegister
from rnic.stream.check import watch

__all__ = ["BusWord", "Packer", "RawWord", "Scatter", "ScatterCommand", "lane_bits", "words_of"]

STAGES_PER_REGISTER = 3  # rotate stages (2:1 muxes) between two registers


def lane_bits(width: int) -> int:
    """Bits of a lane number on a bus of ``width`` bits; ValueError when the bus has no such width."""
    return (Beat(width)["data"].width // 8 - 1).bit_length()


def _above(value: Value, lane: int) -> Value:
    """``value > lane``; 0 where that cannot be, so that no comparison with the largest value is left for a linter."""
    return Const(0) if lane >= (1 << len(value)) - 1 else value > lane


class RawWord(data.StructLayout):
    """A bus word with ``count`` (0..lanes - first) valid bytes from lane ``first``; ``last`` ends a packet or request,
    ``err`` marks it as not delivered. ``count`` 0 only for a packet of zero bytes.

    Parameters: ``width`` of the bus in bits.
    """

    def __init__(self, width: int):
        bits = lane_bits(width)
        super().__init__({"data": width, "first": bits, "count": bits + 1, "last": 1, "err": 1})


class BusWord(data.StructLayout):
    """A word to memory: ``strb`` marks the bytes to write, ``last`` ends the command, ``block_last`` the command or the
    address block; ``tag`` is the command's.

    Parameters: ``width`` of the bus in bits; ``tag_width`` in bits.
    """

    def __init__(self, width: int, tag_width: int = 0):
        super().__init__({"data": width, "strb": width // 8, "last": 1, "block_last": 1, "tag": tag_width})


class ScatterCommand(data.StructLayout):
    """The bytes of a packet go to bytes ``start`` to ``end`` (both included) counted from the beginning of an address
    block; 1..65535 bytes. ``single``, ``double``: they lie in one bus word, in two. The one who makes the command knows all this
    early enough to have a register behind it (see `words_of`).

    Parameters: ``block`` in bytes, a power of two; ``tag_width`` in bits.
    """

    def __init__(self, block: int, tag_width: int = 0):
        super().__init__({
            "start": range(block), "end": range(block + (1 << 16)), "single": 1, "double": 1, "tag": tag_width,
        })  # fmt: skip


def words_of(lanes: int, first: Value, length: Value) -> tuple[Value, Value]:
    """Whether ``length`` > 0 bytes from lane ``first`` on lie in one bus word of ``lanes`` bytes, and whether in two; no
    carry runs through the whole length."""
    bits = (lanes - 1).bit_length()
    near = length[: bits + 2] + first
    single = (length[bits + 1 :] == 0) & (length[: bits + 1] + first <= lanes)
    double = (length[bits + 2 :] == 0) & (near > lanes) & (near <= 2 * lanes)
    return single, double


class _Rotate(wiring.Component):
    """Rotates ``data`` left by ``amount`` bytes in log stages with a register after every third; ``meta`` travels
    along.

    Timing: latency = number of registers (1 at 64 bits, 2 at 128 to 512), one item per cycle; ``i.ready`` follows
    ``o.ready`` combinationally.

    Parameters: ``width`` of the bus in bits; ``meta``, shape. Members: ``i`` {data, amount, meta}, ``o`` {data, meta}.
    """

    def __init__(self, width: int, meta):
        self.width = width
        self.bits = lane_bits(width)
        self.meta = meta
        super().__init__({
            "i": In(stream.Signature(data.StructLayout({"data": width, "amount": self.bits, "meta": meta}))),
            "o": Out(stream.Signature(data.StructLayout({"data": width, "meta": meta}))),
        })

    def elaborate(self, platform):
        m = Module()
        source = self.i
        for low in range(0, self.bits, STAGES_PER_REGISTER):
            high = min(low + STAGES_PER_REGISTER, self.bits)
            m.submodules[f"register_{low}"] = register = StreamRegister(source.payload.shape())
            word = source.payload.data
            for bit in range(low, high):
                rotated = Signal(self.width, name=f"rotated_{bit}")
                m.d.comb += rotated.eq(Mux(source.payload.amount[bit], word.rotate_left(8 << bit), word))
                word = rotated
            m.d.comb += [
                register.i.valid.eq(source.valid),
                register.i.payload.data.eq(word),
                register.i.payload.amount.eq(source.payload.amount),
                register.i.payload.meta.eq(source.payload.meta),
                source.ready.eq(register.i.ready),
            ]
            source = register.o
        m.d.comb += [
            self.o.valid.eq(source.valid),
            self.o.payload.data.eq(source.payload.data),
            self.o.payload.meta.eq(source.payload.meta),
            source.ready.eq(self.o.ready),
        ]
        return m


def _expand(mask: Value) -> Value:
    """Each bit of ``mask`` eight times."""
    return Cat(bit.replicate(8) for bit in mask)


class Packer(wiring.Component):
    """Joins raw bus words, each with its bytes at any lanes, into one gapless packet from lane 0.

    Between two words with ``last`` all bytes belong to one packet; its ``err`` is the OR of its words'. Unused lanes
    of the last beat are zero. A word without bytes is allowed only as the only word of its packet (Assert).

    Timing: latency 2 cycles at 64 bits, 3 above; one word per cycle and so, when words are full, one beat per cycle; a
    packet whose last word fills more than a beat takes one cycle more. ``i.ready`` depends on registers only.

    Parameters: ``width`` of the bus in bits. Members: ``i``, stream of ``RawWord``; ``o``, stream of ``Beat``.
    """

    def __init__(self, width: int):
        self.width = width
        super().__init__({
            "i": In(stream.Signature(RawWord(width))),
            "o": Out(stream.Signature(Beat(width))),
        })

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        bits = lane_bits(self.width)
        meta = data.StructLayout({
            "old": lanes,  # lanes that come from the residue
            "new": lanes,  # lanes that come from this word
            "emit": 1,
            "overflow": 1,  # the word's other bytes become the residue
            "last": 1,
            "err": 1,
        })
        m.submodules.rotate = rotate = _Rotate(self.width, meta)
        m.submodules.out = out = SkidBuffer(Beat(self.width))
        word = self.i.payload

        # Where the word's bytes go is known before they are rotated: `fill` bytes wait in the residue.
        fill = Signal(bits)
        room = Signal(bits + 1, init=lanes)  # lanes - fill
        flush = Signal()  # the word before ended its packet and overflowed: its rest goes out alone
        err = Signal()
        inside = Signal()
        total = Signal(bits + 1)  # 0..2 lanes - 1
        rest = Signal(bits)  # room behind this word, 0 for all lanes
        step = Signal()
        m.d.comb += [
            total.eq(fill + word.count),  # while `flush` of no meaning
            rest.eq(room - word.count),
            rotate.i.valid.eq(self.i.valid | flush),
            self.i.ready.eq(rotate.i.ready & ~flush),
            step.eq(rotate.i.valid & rotate.i.ready),
            rotate.i.payload.data.eq(word.data),
            rotate.i.payload.amount.eq(fill - word.first),
        ]
        done = Signal()  # the packet's last beat leaves with this step
        split = Signal()  # the packet's last byte leaves with the step after this one
        whole = Signal()
        m.d.comb += [
            whole.eq(~flush & (word.count >= room)),
            split.eq(~flush & word.last & (word.count > room)),
            done.eq(flush | (word.last & (word.count <= room))),
            rotate.i.payload.meta.emit.eq(whole | done),
            rotate.i.payload.meta.overflow.eq(whole),
            rotate.i.payload.meta.last.eq(done),
            rotate.i.payload.meta.err.eq(err | (word.err & ~flush)),
        ]
        for lane in range(lanes):
            m.d.comb += [
                rotate.i.payload.meta.old[lane].eq(_above(fill, lane)),
                rotate.i.payload.meta.new[lane].eq(~flush & ~_above(fill, lane) & (total > lane)),
            ]
        with m.If(step):
            m.d.sync += [
                fill.eq(Mux(done, 0, total[:bits])),
                room.eq(Mux(done, lanes, Cat(rest, rest == 0))),
                Assert(room == lanes - fill, "Packer: room and fill differ"),
                flush.eq(split),
                err.eq(~done & (err | word.err)),
                inside.eq(~done),
            ]

        # Merge: the residue holds the bytes not yet sent, from lane 0.
        item = rotate.o.payload
        residue = Signal(self.width)
        merged = Signal(self.width)
        m.d.comb += [
            merged.eq((residue & _expand(item.meta.old)) | (item.data & _expand(item.meta.new))),
            out.i.valid.eq(rotate.o.valid & item.meta.emit),
            out.i.payload.data.eq(merged),
            out.i.payload.keep.eq(item.meta.old | item.meta.new),
            out.i.payload.last.eq(item.meta.last),
            out.i.payload.err.eq(item.meta.last & item.meta.err),
            rotate.o.ready.eq(out.i.ready),  # also for a word that gives no beat: a shorter path
        ]
        with m.If(rotate.o.valid & rotate.o.ready):
            m.d.sync += residue.eq(Mux(item.meta.overflow, item.data, merged))
        wiring.connect(m, out.o, wiring.flipped(self.o))

        watch(m, "i", self.i)
        watch(m, "o", self.o)
        with m.If(self.i.valid):
            m.d.sync += [
                Assert(word.first + word.count <= lanes,
                       Format("Packer: {} bytes from lane {}", word.count, word.first)),
                Assert((word.count != 0) | (word.last & (~inside | flush)),
                       Format("Packer: a word without bytes inside a packet")),
            ]
        return m


class Scatter(wiring.Component):
    """Spreads packets over memory-aligned words: byte 0 of the packet goes to byte ``start`` of an address block.

    One command a packet; the packet has exactly ``end - start + 1`` bytes (Assert). The first word begins at lane
    ``start`` mod lanes, ``strb`` marks the packet's bytes, others are zero in ``strb`` only. ``block_last`` marks the
    last word of the command and the last word of each ``block`` bytes of address (a bus burst must end there).

    Timing: latency 2 cycles at 64 bits, 3 above; one word per cycle, no cycle between commands. Command and first beat
    are waited for together; the command is taken with its last word. ``ready`` does not depend on ``o.ready``.

    Parameters: ``width`` of the bus in bits; ``block`` in bytes, a power of two of at least one word (None: one word);
    ``tag_width`` in bits. Raises ValueError.
    Members: ``command``, stream of ``ScatterCommand``; ``i``, stream of ``Beat``; ``o``, stream of ``BusWord``; ``tail``, the
    command's last beat has been taken, not yet the command (a register).
    """

    def __init__(self, width: int, *, block: int | None = None, tag_width: int = 0):
        lanes = 1 << lane_bits(width)
        block = lanes if block is None else block
        if block < lanes or block & (block - 1):
            raise ValueError(f"block is {block}, must be a power of two of at least {lanes} bytes")
        self.width = width
        self.block = block
        self.tag_width = tag_width
        super().__init__({
            "command": In(stream.Signature(ScatterCommand(block, tag_width))),
            "i": In(stream.Signature(Beat(width))),
            "o": Out(stream.Signature(BusWord(width, tag_width))),
            "tail": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        bits = lane_bits(self.width)
        words_per_block = self.block // lanes
        meta = data.StructLayout({
            "old": lanes,  # lanes that come from the beat before
            "strb": lanes,
            "last": 1,
            "block_last": 1,
            "tag": self.tag_width,
        })
        m.submodules.rotate = rotate = _Rotate(self.width, meta)
        m.submodules.out = out = SkidBuffer(BusWord(self.width, self.tag_width))
        command = self.command.payload

        # Word numbers count from the beginning of the address block the command starts in.
        start_lane = command.start[:bits]
        start_word = command.start >> bits
        index = Signal(range(words_per_block + (1 << 16) // lanes + 1))  # word number while not `first`
        first = Signal(init=1)
        word = Signal.like(index)
        final = Signal()  # the last word of the command
        left = Signal(range((1 << 16) // lanes + 2))  # words behind the present one, while not `first`
        ends = Signal()  # not `first`, and left == 0
        tail = self.tail  # no beat is left: the word holds only bytes of the beat before
        step = Signal()
        m.d.comb += [
            word.eq(Mux(first, start_word, index)),
            final.eq(Mux(first, command.single, ends)),
            rotate.i.valid.eq(self.command.valid & (self.i.valid | tail)),
            step.eq(rotate.i.valid & rotate.i.ready),
            self.i.ready.eq(self.command.valid & rotate.i.ready & ~tail),
            self.command.ready.eq(step & final),
            rotate.i.payload.data.eq(self.i.payload.data),
            rotate.i.payload.amount.eq(start_lane),
            rotate.i.payload.meta.last.eq(final),
            rotate.i.payload.meta.block_last.eq(final | ((word & (words_per_block - 1)) == words_per_block - 1)),
            rotate.i.payload.meta.tag.eq(command.tag),
        ]
        for lane in range(lanes):
            m.d.comb += [
                rotate.i.payload.meta.old[lane].eq(_above(start_lane, lane)),
                rotate.i.payload.meta.strb[lane].eq(
                    (~first | ~_above(start_lane, lane)) & (~final | (command.end[:bits] >= lane))),
            ]
        with m.If(step):
            m.d.sync += [
                index.eq(word + 1),
                left.eq(Mux(first, (command.end >> bits) - start_word, left) - 1),
                ends.eq(Mux(first, command.double, left == 1)),
                first.eq(final),
                tail.eq(~final & (tail | self.i.payload.last)),
            ]

        item = rotate.o.payload
        before = Signal(self.width)
        old = _expand(item.meta.old)
        m.d.comb += [
            out.i.valid.eq(rotate.o.valid),
            rotate.o.ready.eq(out.i.ready),
            out.i.payload.data.eq((before & old) | (item.data & ~old)),
            out.i.payload.strb.eq(item.meta.strb),
            out.i.payload.last.eq(item.meta.last),
            out.i.payload.block_last.eq(item.meta.block_last),
            out.i.payload.tag.eq(item.meta.tag),
        ]
        with m.If(rotate.o.valid & rotate.o.ready):
            m.d.sync += before.eq(item.data)
        wiring.connect(m, out.o, wiring.flipped(self.o))

        watch(m, "command", self.command)
        watch(m, "i", self.i)
        watch(m, "o", self.o)
        self._check_length(m, step & ~tail)
        return m

    def _check_length(self, m, taken):
        """The packet must have exactly the command's bytes."""
        lanes = self.width // 8
        bits = lane_bits(self.width)
        command = self.command.payload
        length = Signal(range(self.block + (1 << 16) + 1))
        words = Signal(range((1 << 16) // lanes + 2))
        m.d.comb += [length.eq(command.end - command.start + 1), words.eq((command.end >> bits) - (command.start >> bits))]
        beats = Signal(range((1 << 16) // lanes + 1))  # taken of this packet before the present one
        beats_less_1 = Signal.like(length)
        final_keep = Signal(lanes)
        m.d.comb += beats_less_1.eq((length - 1) >> bits)
        for lane in range(lanes):
            m.d.comb += final_keep[lane].eq((length - 1)[:bits] >= lane)
        with m.If(taken):
            m.d.sync += beats.eq(Mux(self.i.payload.last, 0, beats + 1))
            m.d.sync += [
                Assert(command.end >= command.start, "Scatter: command of zero bytes"),
                Assert((command.single == (words == 0)) & (command.double == (words == 1)), "Scatter: single or double is wrong"),
                Assert(self.i.payload.last == (beats == beats_less_1),
                       Format("Scatter: packet and command of {} bytes differ at beat {}", length, beats)),
                Assert(~self.i.payload.last | (self.i.payload.keep == final_keep),
                       Format("Scatter: keep {:#x} for a command of {} bytes", self.i.payload.keep, length)),
            ]
