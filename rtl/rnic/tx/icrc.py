"""ICRC (and IPv4 checksum) insertion into a stream of frame beats."""

import functools

from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..stream.beat import Beat
from ..stream.check import watch
from ..stream.crc32 import multiply, state_masks, step_bytes, step_zeros
from ..stream.fifo import StreamFifo
from ..wire.icrc import ICRC_RESIDUE
from .headers import hidden_bytes

__all__ = ["BodyBeat", "IcrcEngine", "IcrcInsert", "icrc_start"]

ENGINE_CYCLES = 2  # from a word at the engine to the ICRC that includes it
DEPTH = 8  # beats on their way past the engine; more than ENGINE_CYCLES + the FIFO's own way
_SKEW = 2  # the engine's state lags 2 zero bytes: packets end 2 bytes into a 4-byte word


def icrc_start(vlan: bool, ipv6: bool) -> int:
    """CRC register before the first byte of a frame whose `hidden_bytes` are fed as zeros.

    The register behind the stand-in LRH (R-ICRC-6) and the hidden values' share, stepped back to the frame's first byte.
    """
    seen = hidden_bytes(vlan, ipv6)
    ethernet = 18 if vlan else 14
    template = bytes(seen.get(at, 0) for at in range(ethernet, max(seen) + 1))
    return step_zeros(step_bytes(ICRC_RESIDUE, template), -(ethernet + len(template)))


@functools.cache
def _data_masks(lanes: int) -> list[int]:
    """For each CRC bit the mask of the word's bits, ``_SKEW`` zero bytes before the word's end."""
    columns = [step_zeros(1 << bit, lanes - lane - _SKEW) for lane in range(lanes) for bit in range(8)]
    return [sum((column >> bit & 1) << index for index, column in enumerate(columns)) for bit in range(32)]


class BodyBeat(data.StructLayout):
    """A beat of a frame on its way to the ICRC: zero where ICRC and IPv4 checksum go, zero behind the frame.

    The frame's last byte is byte ``4 k + 1`` of the last beat (R-PAD-1). ``icrc``: the ICRC begins in this beat.
    """

    def __init__(self, width: int):
        super().__init__({
            "data": width,
            "keep": width // 8,
            "last": 1,
            "err": 1,  # with last: the frame is cut off here and has no ICRC
            "first": 1,
            "icrc": 1,
            "checksum": 1,  # holds the IPv4 checksum field
            "hide": width // 8,  # bytes fed to the ICRC as zero (headers.hidden_bytes)
            "spare": (width // 32 - 1).bit_length(),  # with icrc: whole 4-byte words behind the ICRC's first half
            "vlan": 1,
            "ipv6": 1,
        })  # fmt: skip


class IcrcEngine(wiring.Component):
    """The ICRC register (R-ICRC-1, R-ICRC-2), fed with whole bus words of frames that end 2 bytes into a 4-byte word.

    Timing: one word per cycle, no back-pressure; ``o_valid`` and ``o`` 2 cycles after the word with ``last``. The zero
    bytes behind the data are taken back two bits of ``spare`` at a time.

    Members: ``valid``; ``start``, first word of a frame; ``vlan``, ``ipv6``, its form (with start); ``last``, last word
    with data; ``spare``, 4-byte words of that word behind the data's end; ``data``, hidden bytes and bytes behind the end
    zero; ``o`` the ICRC.
    """

    def __init__(self, width: int):
        self.width = width
        self.spare_bits = (width // 32 - 1).bit_length()
        super().__init__({
            "valid": In(1), "start": In(1), "vlan": In(1), "ipv6": In(1), "last": In(1), "spare": In(self.spare_bits),
            "data": In(width), "o_valid": Out(1), "o": Out(32),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        share = Signal(32)  # the word's own part
        share_valid = Signal()
        share_last = Signal()
        share_spare = Signal(self.spare_bits)
        base = Signal(32)  # replaces the state with the first word
        share_start = Signal()
        multiply(m, share, self.data, _data_masks(lanes), "sync")
        m.d.sync += [
            share_valid.eq(self.valid),
            share_last.eq(self.last),
            share_start.eq(self.start),
            share_spare.eq(self.spare),
        ]
        with m.Switch(Cat(self.ipv6, self.vlan)):
            for vlan in (0, 1):
                for ipv6 in (0, 1):
                    with m.Case(vlan << 1 | ipv6):
                        m.d.sync += base.eq(step_zeros(icrc_start(bool(vlan), bool(ipv6)), lanes - _SKEW))  # R-ICRC-6

        state = Signal(32)
        stepped = Signal(32)
        state_spare = Signal(self.spare_bits)
        multiply(m, stepped, state, state_masks(lanes))
        m.d.sync += [self.o_valid.eq(share_valid & share_last), state_spare.eq(share_spare)]
        with m.If(share_valid):
            m.d.sync += state.eq(Mux(share_start, base, stepped) ^ share)  # R-ICRC-1, R-ICRC-2

        value = state
        for low in range(0, self.spare_bits, 2):
            digit = state_spare[low : low + 2]
            undone = Signal(32, name=f"undone_{low}")
            with m.Switch(digit):
                with m.Case(0):
                    m.d.comb += undone.eq(value)
                for count in range(1, 1 << len(digit)):
                    back = Signal(32, name=f"back_{low}_{count}")
                    multiply(m, back, value, state_masks(-4 * count << low))
                    with m.Case(count):
                        m.d.comb += undone.eq(back)
            value = undone
        m.d.comb += self.o.eq(~value)  # R-ICRC-1
        return m


class IcrcInsert(wiring.Component):
    """Puts ICRC and IPv4 checksum into frames.

    The ICRC goes out least significant byte first (R-ICRC-5) behind the pad bytes, which are part of it (R-ICRC-8).
    ``checksum``: one item per IPv4 frame, in order; ``first``: the beat on ``frame`` is its frame's first.

    Timing: latency 3 cycles, one beat per cycle, no bubble inside a frame; ``i.ready`` depends on registers only.

    Parameters: ``width`` of the bus in bits.
    """

    def __init__(self, width: int):
        self.width = width
        super().__init__({
            "i": In(stream.Signature(BodyBeat(width))),
            "checksum": In(stream.Signature(16)),
            "frame": Out(stream.Signature(Beat(width))),
            "first": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        width = self.width
        m.submodules.engine = engine = IcrcEngine(width)
        m.submodules.beats = beats = StreamFifo(BodyBeat(width), DEPTH)
        m.submodules.icrcs = icrcs = StreamFifo(32, DEPTH)
        beat_in = self.i.payload
        pushed = Signal()
        m.d.comb += [
            pushed.eq(self.i.valid & beats.i.ready),
            self.i.ready.eq(beats.i.ready),
            beats.i.valid.eq(self.i.valid),
            beats.i.payload.eq(beat_in),
            engine.valid.eq(pushed),
            engine.start.eq(beat_in.first),
            engine.vlan.eq(beat_in.vlan),
            engine.ipv6.eq(beat_in.ipv6),
            engine.last.eq(beat_in.icrc),
            engine.spare.eq(beat_in.spare),  # R-ICRC-8: pad bytes are data
            engine.data.eq(beat_in.data & ~Cat(bit.replicate(8) for bit in beat_in.hide)),  # R-ICRC-3
            icrcs.i.valid.eq(engine.o_valid),
            icrcs.i.payload.eq(engine.o),
        ]
        m.d.sync += Assert(~icrcs.i.valid | icrcs.i.ready, "IcrcInsert: more ICRCs than beats")

        # A beat may leave when the ICRC of a frame that ends with it would be there: no frame begins to leave earlier, so
        # none has a bubble before its last beat.
        passed = Signal(ENGINE_CYCLES)
        due = Signal(range(DEPTH + 1))
        any_due = Signal()
        leave = Signal()
        m.d.sync += [
            passed.eq(Cat(pushed, passed)),
            due.eq(due + passed[-1] - leave),
            any_due.eq(passed[-1] | (any_due & ~(leave & (due == 1)))),
            Assert(any_due == (due != 0), "IcrcInsert: flag and count differ"),
        ]

        beat = beats.o.payload
        icrc_tail = Signal()  # the beat before ended with the ICRC's first half
        ends_here = Signal()
        uses_icrc = Signal()
        m.d.comb += [
            ends_here.eq(beat.icrc & beat.last),
            uses_icrc.eq(beat.icrc | icrc_tail),
            self.frame.valid.eq(beats.o.valid & any_due & (~uses_icrc | icrcs.o.valid)
                                & (~beat.checksum | self.checksum.valid)),
            leave.eq(self.frame.valid & self.frame.ready),
            beats.o.ready.eq(leave),
            icrcs.o.ready.eq(leave & (ends_here | icrc_tail)),
            self.checksum.ready.eq(leave & beat.checksum),
            self.first.eq(beat.first),
        ]
        with m.If(leave):
            m.d.sync += icrc_tail.eq(beat.icrc & ~beat.last)

        m.d.comb += [
            self.frame.payload.keep.eq(beat.keep),
            self.frame.payload.last.eq(beat.last),
            self.frame.payload.err.eq(beat.err & beat.last),
            self.frame.payload.data.eq(beat.data | self._inserted(m, beat, icrcs.o.payload, icrc_tail)),
        ]
        # Inside a frame the ICRC is never late. Of a frame of one beat it may be, by a cycle, behind a stalled frame: it was
        # pushed 2 cycles after its beat, when the ICRC in front of it was about to leave.
        with m.If(beats.o.valid & (due != 0) & ~beat.first):
            m.d.sync += Assert(~uses_icrc | icrcs.o.valid, "IcrcInsert: the ICRC came late")
        watch(m, "i", self.i)
        watch(m, "frame", self.frame)
        return m

    def _inserted(self, m, beat, icrc, icrc_tail):
        """ICRC halves and checksum at their 16-bit places of the beat, zero elsewhere."""
        lanes = self.width // 8
        halves = Signal(self.width)
        checksum = self.checksum.payload
        places = [at % lanes for at in (24, 28)]  # bytes of the IPv4 checksum without and with VLAN tag
        before = icrc_tail
        for word in range(lanes // 4):
            begins = Signal(name=f"icrc_begins_{word}")
            # The ICRC's first half is followed by its second half and the end, or ends the beat.
            kept = beat.keep[4 * word + 2]
            full = beat.keep[4 * word + 6] if word < lanes // 4 - 1 else 0
            m.d.comb += begins.eq(beat.icrc & kept & ~full)
            low, high = halves[32 * word : 32 * word + 16], halves[32 * word + 16 : 32 * word + 32]
            sent = Const(0, 16)
            for place, tagged in zip(places, (0, 1), strict=True):
                if place == 4 * word:
                    here = beat.checksum & (beat.vlan == tagged)
                    sent = sent | (Cat(checksum[8:], checksum[:8]) & here.replicate(16))
            m.d.comb += [
                low.eq((icrc[16:] & before.replicate(16)) | sent),
                high.eq(icrc[:16] & begins.replicate(16)),  # R-ICRC-5
            ]
            before = begins
        return halves
