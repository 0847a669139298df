"""Cuts the payload out of a frame and puts its byte 0 into lane 0."""

from amaranth import *
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from rnic.rx.capture import index_limit
from rnic.rx.header import VARIANTS, FrameInfo
from rnic.stream.beat import Beat
from rnic.wire import headers as h
from rnic.wire.opcode import decode

__all__ = ["MAX_PAYLOAD", "PayloadAlign", "PayloadGeometry", "PayloadWord"]

MAX_PAYLOAD = max(h.MTU_BYTES.values())
"""Largest payload a frame may carry; a larger one is a length error (R-MTU-1)."""


class PayloadWord(data.StructLayout):
    """An aligned payload word: ``count_less_1`` + 1 valid bytes from lane 0; ``last`` ends the frame's payload.

    Parameters: ``width`` of the bus in bits.
    """

    def __init__(self, width: int):
        super().__init__({"data": width, "count_less_1": range(Beat(width)["keep"].width), "last": 1})


class PayloadGeometry(wiring.Component):
    """Where the payload of the frame begins and how long it is, from its `FrameInfo` (R-FRM-3).

    Timing: outputs two cycles behind ``info``.

    Members: ``info`` in; ``start`` of the payload in 4-byte units (byte 2 + 4 start of the frame); ``length`` in bytes,
    meaningful if ``fits``; ``known`` opcode; ``fits``: the opcode is known, IP and UDP length agree (R-FRM-2), the packet
    has a whole number of 4-byte words (R-PAD-1), and headers, pad and ICRC leave 0..4096 payload bytes; ``bad_length``:
    one of these fails (an unknown opcode alone is none).
    """

    def __init__(self):
        super().__init__({
            "info": In(FrameInfo), "start": Out(5), "length": Out(13), "known": Out(1), "fits": Out(1),
            "bad_length": Out(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        flags = decode(m, self.info.opcode)
        words, known, taken, pad = Signal(4), Signal(), Signal(17), Signal(2)
        bth = Signal(5)
        ip_payload, udp_length, small, odd = Signal(16), Signal(16), Signal(), Signal()
        with m.Switch(Cat(self.info.ipv6, self.info.vlan)):
            for variant in VARIANTS:
                with m.Case(variant.vlan << 1 | variant.ipv6):
                    m.d.sync += bth.eq((variant.bth - 2) // 4)
        ip_header = Mux(self.info.ipv6, 0, h.IPV4.size_bytes)
        length = self.info.udp_length
        m.d.sync += [
            words.eq(flags.header_words), known.eq(flags.known), pad.eq(self.info.pad),
            taken.eq(length - (h.UDP.size_bytes + h.ICRC_BYTES)),
            ip_payload.eq(self.info.ip_length - ip_header), udp_length.eq(length),
            small.eq(length < h.UDP.size_bytes + h.BTH.size_bytes + h.ICRC_BYTES), odd.eq(length[:2] != 0),  # R-PAD-1
        ]  # fmt: skip
        # 4 * words + pad is a concatenation: pad is less than 4.
        rest, agree, known_3, bad = Signal(signed(18)), Signal(), Signal(), Signal()
        m.d.sync += [
            rest.eq(taken.as_signed() - Cat(pad, words)),  # R-FRM-3, R-PAD-3
            self.start.eq(bth + words),
            agree.eq(ip_payload == udp_length),  # R-FRM-2
            bad.eq(small | odd),
            known_3.eq(known),
        ]
        in_range = Signal()
        m.d.comb += [
            in_range.eq((rest[12:] == 0) | ((rest[12:] == 1) & (rest[:12] == 0))),  # R-FRM-3, R-MTU-1
            self.known.eq(known_3),
            self.length.eq(rest),
            self.fits.eq(known_3 & agree & ~bad & in_range),  # R-FRM-3
            self.bad_length.eq(~agree | bad | (known_3 & ~in_range)),
        ]
        return m


class PayloadAlign(wiring.Component):
    """Rotates the beats so that the payload starts in lane 0, joins neighbours and cuts behind the last payload byte.

    A frame that ends before its payload ends is closed with ``last`` at the frame's end.

    Timing: a beat per cycle, no back-pressure: ``o_valid`` one cycle behind the beat that follows a word's first bytes, or
    two behind the frame's last beat. ``has_payload`` one cycle behind the last beat: this frame makes at least one word.

    Parameters: ``width`` of the bus in bits.
    Members: ``valid``, ``data``, ``last``, ``index``, ``enable`` (the frame has a payload to deliver), ``start`` and
    ``length`` as in `PayloadGeometry` in; ``o_valid``, ``o``, ``has_payload``.
    """

    def __init__(self, width: int):
        self.width = width
        super().__init__({
            "valid": In(1), "data": In(width), "last": In(1), "index": In(range(index_limit(width) + 1)),
            "enable": In(1), "start": In(5), "length": In(13),
            "o_valid": Out(1), "o": Out(PayloadWord(width)), "has_payload": Out(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        lane_bits = (lanes - 1).bit_length()
        unit_bits = lane_bits - 2
        units = lanes // 4
        unit = self.start[:unit_bits]  # the payload starts at lane 2 + 4 unit of beat start >> unit_bits

        word = self.data.rotate_right(16)
        for bit in range(unit_bits):
            rotated = Signal(self.width, name=f"rotated_{bit}")
            m.d.comb += rotated.eq(Mux(unit[bit], word.rotate_right(32 << bit), word))
            word = rotated

        turned = Signal(self.width)
        old_groups = Signal(units)  # group g (lanes 4g-2 to 4g+1) comes from the beat before
        starts, ends, valid = Signal(), Signal(), Signal()
        length_less_1 = Signal(13)
        m.d.sync += [
            valid.eq(self.valid),
            starts.eq(self.valid & self.enable & (self.index == self.start >> unit_bits)),
            ends.eq(self.valid & self.last),
            turned.eq(word),
            length_less_1.eq(self.length - 1),
        ]
        for group in range(units):
            m.d.sync += old_groups[group].eq(1 if group == 0 else unit <= units - 1 - group)

        held, held_groups = Signal(self.width), Signal(units)
        waiting = Signal()  # `held` begins a word that is not complete
        flush = Signal()  # the frame has ended: `held` goes out alone
        left_less_1 = Signal(13)  # payload bytes from the beginning of `held`, less 1
        seen = Signal()
        whole = Signal()
        join = Signal()
        m.d.comb += [
            whole.eq(left_less_1[lane_bits:] == 0),
            join.eq(waiting & valid & ~flush),
            self.o_valid.eq(waiting & (valid | flush)),
            self.o.count_less_1.eq(Mux(whole, left_less_1[:lane_bits], lanes - 1)),  # R-PAD-3
            self.o.last.eq(whole | flush),
            self.has_payload.eq(starts | seen),
        ]
        for lane in range(lanes):
            group = (lane + 2) // 4
            old = held.word_select(lane, 8)
            new = turned.word_select(lane, 8)
            m.d.comb += self.o.data.word_select(lane, 8).eq(Mux(held_groups[group], old, new) if group < units else new)
        with m.If(valid):
            m.d.sync += [held.eq(turned), held_groups.eq(old_groups), seen.eq((starts | seen) & ~ends)]
        m.d.sync += flush.eq(0)
        with m.If(starts):
            m.d.sync += [waiting.eq(1), flush.eq(ends), left_less_1.eq(length_less_1)]
        with m.Elif(join):
            m.d.sync += [waiting.eq(~whole), flush.eq(~whole & ends), left_less_1.eq(left_less_1 - lanes)]
        with m.Elif(flush):
            m.d.sync += waiting.eq(0)
        return m
