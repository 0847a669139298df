"""Receive side ICRC at one beat per cycle, IP length against frame length, IPv4 header checksum."""

from amaranth import *
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from rnic.rx.capture import index_limit
from rnic.rx.header import VARIANTS, FrameInfo
from rnic.stream.beat import Beat
from rnic.stream.crc32 import data_masks, multiply, state_masks, step_zeros
from rnic.wire import headers as h
from rnic.wire.icrc import ICRC_RESIDUE

__all__ = ["IcrcCheck", "IpChecksum"]


class IpChecksum(wiring.Component):
    """IPv4 header checksum of the frame whose beats pass (R-FRM-5).

    Timing: two cycles behind ``valid``; ``ok`` is right from the beat on that ends the header.

    Parameters: ``width`` of the bus in bits. Members: ``valid``, ``data``, ``index``, ``vlan`` in; ``ok``.
    """

    def __init__(self, width: int):
        self.width = width
        super().__init__({
            "valid": In(1), "data": In(width), "index": In(range(index_limit(width) + 1)), "vlan": In(1), "ok": Out(1),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        lanes = self.width // 8
        starts = [v.ip for v in VARIANTS if not v.ipv6]  # without and with VLAN tag
        first, last = starts[0] // lanes, (starts[1] + h.IPV4.size_bytes - 1) // lanes

        def word(position: int) -> Value:
            at = position % lanes
            return Cat(self.data.word_select(at + 1, 8), self.data.word_select(at, 8))

        # The header words of this beat: word k of the header, if it is here, from one of its two places.
        terms = []
        slots = min(h.IPV4.size_bytes, lanes) // 2
        for slot in range(slots):
            term = Signal(16, name=f"term_{slot}")
            for vlan, start in enumerate(starts):
                for k in range(slot, h.IPV4.size_bytes // 2, slots):
                    position = start + 2 * k
                    with m.If((self.index == position // lanes) & (self.vlan == vlan)):
                        m.d.comb += term.eq(word(position))
            terms.append(term)

        # At most three partial sums, then one: two adders in a row at most in each stage.
        for level in range(2):
            terms = [sum(terms[i : i + 2], Const(0, 16)) for i in range(0, len(terms), 2)]
            del level
        partial = [Signal(18, name=f"partial_{n}") for n in range(len(terms))]
        later, starts_here = Signal(), Signal()
        m.d.sync += [signal.eq(term) for signal, term in zip(partial, terms, strict=True)]
        m.d.sync += [
            later.eq(self.valid & (self.index <= last)),
            starts_here.eq(self.index == first),
        ]
        total = Signal(20)  # ten words
        with m.If(later):
            m.d.sync += total.eq(Mux(starts_here, 0, total) + sum(partial, Const(0, 18)))
        # One's complement sum 0xFFFF: the low half plus the carries (at most 9) must be 0xFFFF.
        m.d.comb += self.ok.eq(total[4:16].all() & (~total[:4] == total[16:]))
        return m


class IcrcCheck(wiring.Component):
    """Masks the frame, cuts it at the end of the IP datagram, and computes the CRC over whole bus words.

    The CRC is linear: the Ethernet header counts as zero bytes, which a start value stepped backwards over as many zeros
    makes up for (R-ICRC-6: the register behind the LRH stand-in is a constant); the last word is filled with zeros, and
    the residue is compared with the constant for as many zeros. The datagram ends 2 mod 4 (R-PAD-1), so there is one
    constant for each 4 bytes of the bus.

    Timing: one beat per cycle, no back-pressure. ``o_data``, ``short`` two cycles, ``good`` ``latency`` cycles behind
    ``valid``: 3 for a bus of 256 bits and more (register step and compare in one cycle, about 6 LUT6 levels), 4 below.

    Parameters: ``width`` of the bus in bits.
    Members: ``valid``, ``beat``, ``index``, ``info`` (FrameInfo as of the beat) in; ``valid_2``, ``beat_2``, the same one
    cycle later; ``o_data``, the beat with masked
    header fields all ones and everything outside the datagram zero; ``short``, the beat ends the frame before the
    datagram ends (R-FRM-1); ``good``, the ICRC of the frame is right (meaningful for a last beat that is not short).
    """

    def __init__(self, width: int):
        self.width = width
        self.lanes = width // 8
        self.latency = 3 if width >= 256 else 4
        super().__init__({
            "valid": In(1),
            "beat": In(Beat(width)),
            "index": In(range(index_limit(width) + 1)),
            "info": In(FrameInfo),
            "valid_2": Out(1),
            "beat_2": Out(Beat(width)),
            "o_data": Out(width),
            "short": Out(1),
            "good": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        lane_bits = (self.lanes - 1).bit_length()

        # Stage 1: bytes of the datagram from the start of this beat on.
        load_index = max(v.ip + (5 if v.ipv6 else 3) for v in VARIANTS) // self.lanes  # the IP length is known
        base = Signal(signed(8))
        with m.Switch(Cat(self.info.ipv6, self.info.vlan)):
            for variant in VARIANTS:
                with m.Case(variant.vlan << 1 | variant.ipv6):
                    m.d.comb += base.eq(variant.length_base - load_index * self.lanes)
        left, left_at_load = Signal(17), Signal(17)
        full = Signal()  # this beat lies inside the datagram: left >= lanes, kept as a register because it is wide
        load = Signal()
        valid_2, index_2, info_2, load_2 = self.valid_2, Signal.like(self.index), Signal(FrameInfo), Signal()
        count, count_2 = Signal(lane_bits + 1), Signal(lane_bits + 1)
        m.d.comb += [load.eq(self.index == load_index), left_at_load.eq(base + self.info.ip_length)]  # R-FRM-1
        for bit in range(lane_bits + 1):  # thermometer to binary: bit b counts the multiples of 2^b, modulo 2
            step = 1 << bit
            m.d.comb += count[bit].eq(Cat(self.beat.keep[k - 1] for k in range(step, self.lanes + 1, step)).xor())
        m.d.sync += valid_2.eq(self.valid)
        with m.If(self.valid):
            m.d.sync += [
                index_2.eq(self.index), info_2.eq(self.info), self.beat_2.eq(self.beat), count_2.eq(count),
                load_2.eq(load),
            ]  # fmt: skip
            with m.If(load):
                m.d.sync += [left.eq(left_at_load), full.eq(left_at_load[lane_bits:].any())]
            with m.Elif(self.index < load_index):
                m.d.sync += full.eq(1)  # the datagram has not begun or its length is not known: do not cut
            with m.Else():
                m.d.sync += [left.eq(Mux(full, left - self.lanes, 0)), full.eq(left[lane_bits + 1 :].any())]

        # Stage 2: mask.
        masked = Signal(self.width)
        self._mask(m, masked, self.beat_2.data, index_2, info_2)
        groups = self.lanes // 4
        keep_group = Signal(groups + 1)  # group g is lanes 4g-2 to 4g+1
        m.d.comb += keep_group[0].eq(full | left[:lane_bits].any())
        for group in range(1, groups):
            m.d.comb += keep_group[group].eq(full | (left[2:lane_bits] >= group))
        m.d.comb += keep_group[groups].eq(full)
        cut = Signal(self.width)
        for lane in range(self.lanes):
            keep = keep_group[(lane + 2) // 4]
            m.d.comb += cut.word_select(lane, 8).eq(masked.word_select(lane, 8) & keep.replicate(8))
        valid_3, index_3, vlan_3, inside_3 = Signal(), Signal.like(self.index), Signal(), Signal()
        end = Signal(lane_bits - 2)  # 4-byte units of the datagram's end within its beat
        m.d.sync += valid_3.eq(valid_2)
        with m.If(valid_2):
            m.d.sync += [
                self.o_data.eq(cut), index_3.eq(index_2), vlan_3.eq(info_2.vlan),
                inside_3.eq(full | left[:lane_bits].any()),
                self.short.eq(self.beat_2.last & (left[lane_bits + 1 :].any() | (left[: lane_bits + 1] > count_2))),  # R-FRM-1
            ]  # fmt: skip
            with m.If(load_2):
                m.d.sync += end.eq(left[2:lane_bits])

        # Stage 3: the data's part of the CRC.
        data_part = Signal(32)
        valid_4, start_4, vlan_4, inside_4 = Signal(), Signal(), Signal(), Signal()
        residue = Signal(32)
        start_index = (VARIANTS[0].ip - 1) // self.lanes  # the beat of the last Ethernet byte
        multiply(m, data_part, self.o_data, data_masks(self.lanes), "sync")
        m.d.sync += [
            valid_4.eq(valid_3), start_4.eq(index_3 == start_index), vlan_4.eq(vlan_3), inside_4.eq(inside_3),
        ]  # fmt: skip
        with m.Switch(end):
            for unit in range(1 << len(end)):
                with m.Case(unit):
                    zeros = self.lanes - 2 - 4 * unit
                    m.d.sync += residue.eq(step_zeros(ICRC_RESIDUE, zeros))  # R-ICRC-6

        # Stage 4: the register, and the compare here or one cycle later.
        state, stepped, state_next = Signal(32), Signal(32), Signal(32)
        # Two halves, so that the choice and the data's part join them in one LUT.
        halves = Signal(32), Signal(32)
        for half, part in zip(halves, (0xFFFF, 0xFFFF0000), strict=True):
            multiply(m, half, state, [mask & part for mask in state_masks(self.lanes)])
        m.d.comb += stepped.eq(halves[0] ^ halves[1])
        start_values = [step_zeros(ICRC_RESIDUE, self.lanes - (v.ip - start_index * self.lanes)) for v in VARIANTS[::2]]
        before = Signal(32)
        m.d.comb += [
            before.eq(Mux(start_4, Mux(vlan_4, start_values[1], start_values[0]), stepped)),
            state_next.eq(Mux(inside_4, before ^ data_part, state)),  # R-ICRC-1
        ]
        with m.If(valid_4 & inside_4):
            m.d.sync += state.eq(before ^ data_part)
        if self.latency == 3:
            m.d.comb += self.good.eq(state_next == residue)
        else:
            residue_5 = Signal(32)
            m.d.sync += residue_5.eq(residue)
            m.d.comb += self.good.eq(state == residue_5)
        return m

    def _mask(self, m, out, word, index, info) -> None:
        """Variant fields to ones (R-ICRC-3), Ethernet header and VLAN tag to zeros (R-ICRC-2, R-FRM-7)."""
        ones, zeros = Signal(self.width), Signal(self.width)
        for variant in VARIANTS:
            byte_masks = self._variant_bytes(variant)
            with m.If((info.vlan == int(variant.vlan)) & (info.ipv6 == int(variant.ipv6))):
                for number in range(max(byte_masks) // self.lanes + 1):
                    inside = range(number * self.lanes, (number + 1) * self.lanes)
                    with m.If(index == number):
                        m.d.comb += [
                            ones.eq(sum(byte_masks.get(p, 0) << 8 * (p % self.lanes) for p in inside)),
                            zeros.eq(sum(0xFF << 8 * (p % self.lanes) for p in inside if p < variant.ip)),
                        ]
        m.d.comb += out.eq((word | ones) & ~zeros)  # R-ICRC-2, R-ICRC-3

    @staticmethod
    def _variant_bytes(variant) -> dict[int, int]:
        """Frame position to the mask of bits that count as ones."""
        if variant.ipv6:  # traffic class, flow label, hop limit
            out = {0: 0x0F, 1: 0xFF, 2: 0xFF, 3: 0xFF, 7: 0xFF}  # R-ICRC-3
        else:  # TOS, TTL, header checksum
            out = {1: 0xFF, 8: 0xFF, 10: 0xFF, 11: 0xFF}  # R-ICRC-3
        out = {variant.ip + at: mask for at, mask in out.items()}
        return out | {variant.udp + 6: 0xFF, variant.udp + 7: 0xFF, variant.bth + 4: 0xFF}  # R-ICRC-3
