"""Takes the header fields out of a frame as its beats pass."""

from amaranth import *
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from rnic.rx.header import HEADER_BYTES, VARIANTS, FrameInfo
from rnic.stream.beat import Beat
from rnic.wire import headers as h

__all__ = ["HeaderCapture", "RawHeader", "index_limit"]

RawHeader = data.StructLayout({
    "vlan": 1,
    "ipv6": 1,
    "vlan_tci": 16,
    "ecn": 2,
    "dst_mac": 48,
    "src_mac": 48,
    "src_ip": 128,
    "dst_ip": 128,
    "bth": h.BTH,
    "ext": 8 * h.MAX_EXT_HEADER_BYTES,
})  # fmt: skip
"""Header fields as they stand in the frame, big-endian numbers; of an IPv4 address only the low 32 bits are meaningful."""


def index_limit(width: int) -> int:
    """Where the beat number within a frame saturates: the first beat that can hold no header byte and start no payload."""
    return HEADER_BYTES // (width // 8) + 1


class HeaderCapture(wiring.Component):
    """Registers every header field when the beat that holds it passes.

    Each header byte has up to four places (VLAN tag or not, IPv4 or IPv6); the ethertype, seen in the same or an earlier
    beat, tells which.

    Timing: outputs are registers, one cycle behind ``valid``; a beat per cycle; no back-pressure.

    Parameters: ``width`` of the bus in bits.
    Members: ``valid``, ``beat`` in; ``o_valid``, ``o_beat``, ``o_index`` (beat number in its frame, saturating at
    `index_limit`) and ``info`` as of that beat; ``raw`` the header, complete when ``raw_done`` (once a frame: with the
    last beat that can hold a header byte, or the frame's last beat before that).
    """

    def __init__(self, width: int):
        self.width = width
        self.lanes = width // 8
        super().__init__({
            "valid": In(1),
            "beat": In(Beat(width)),
            "o_valid": Out(1),
            "o_beat": Out(Beat(width)),
            "o_index": Out(range(index_limit(width) + 1)),
            "info": Out(FrameInfo),
            "raw": Out(RawHeader),
            "raw_done": Out(1),
        })

    def elaborate(self, platform):
        m = Module()
        limit = index_limit(self.width)
        self._m = m
        index = Signal(range(limit + 1))
        # The same, one bit per number: the begin of all the long paths here.
        self._at = [Signal(name=f"at_beat_{number}", init=number == 0) for number in range(limit)]
        m.d.sync += self.o_valid.eq(self.valid)
        with m.If(self.valid):
            m.d.sync += [self.o_beat.eq(self.beat), self.o_index.eq(index)]
            m.d.sync += [at.eq(before & ~self.beat.last) for before, at in zip(self._at, self._at[1:], strict=False)]
            m.d.sync += self._at[0].eq(self.beat.last)
            with m.If(self.beat.last):
                m.d.sync += index.eq(0)
            with m.Elif(index != limit):
                m.d.sync += index.eq(index + 1)
        final_index = (HEADER_BYTES - 1) // self.lanes
        m.d.comb += self.raw_done.eq(
            self.o_valid & ((self.o_index == final_index) | (self.o_beat.last & (self.o_index < final_index)))
        )

        self._ethertype(m)
        self._ip(m)
        self._transport(m)
        return m

    def _byte(self, position: int) -> Value:
        """Frame byte ``position`` on the bus, meaningful in beat ``position // lanes``."""
        return self.beat.data.word_select(position % self.lanes, 8)

    def _here(self, variant, position: int) -> Value:
        """This beat holds byte ``position`` of a frame of ``variant``. Where the ethertype came in an earlier beat its
        register is asked: that keeps the path short."""
        number = position // self.lanes
        ethertype_at = variant.ip - 2
        now = ethertype_at // self.lanes == number
        is_vlan, is_ipv4, is_ipv6 = self._now if now else self._known
        return self._at[number] & (is_vlan == int(variant.vlan)) & (is_ipv6 if variant.ipv6 else is_ipv4)

    def _capture(self, targets: list[Value], places: dict) -> None:
        """Register consecutive frame bytes in ``targets`` (first byte first); ``places``: variant to first byte."""
        m = self._m
        with m.If(self.valid):
            for offset, target in enumerate(targets):
                for variant, position in places.items():
                    with m.If(self._here(variant, position + offset)):
                        m.d.sync += target.eq(self._byte(position + offset))

    def _flag(self, target: Value, places: dict, condition) -> None:
        """Register in ``target`` whether ``condition(variant, place)`` holds; 0 until the place's beat passes."""
        m = self._m
        with m.If(self.valid):
            with m.If(self._at[0]):
                m.d.sync += target.eq(0)
            for variant, position in places.items():
                with m.If(self._here(variant, position)):
                    m.d.sync += target.eq(condition(variant, position))

    @staticmethod
    def _bytes(value) -> list[Value]:
        """Bytes of a big-endian field, first on the wire first."""
        value = Value.cast(value)
        return [value.word_select(i, 8) for i in reversed(range(len(value) // 8))]

    def _ethertype(self, m) -> None:
        """Which variant: from the bus in the beat of the ethertype, from registers later."""

        def ethertype(position: int, value: int) -> Value:
            return Cat(self._byte(position + 1), self._byte(position)) == value

        vlan, ipv4, ipv6 = Signal(), Signal(), Signal()
        vlan_now, ipv4_now, ipv6_now = Signal(), Signal(), Signal()
        outer, inner = VARIANTS[0].ip - 2, VARIANTS[-1].ip - 2
        outer_here, inner_here = self._at[outer // self.lanes], self._at[inner // self.lanes]
        m.d.comb += [
            vlan_now.eq(Mux(outer_here, ethertype(outer, h.ETHERTYPE_VLAN), vlan)),
            ipv4_now.eq(Mux(inner_here & vlan_now, ethertype(inner, h.ETHERTYPE_IPV4),
                            Mux(outer_here, ethertype(outer, h.ETHERTYPE_IPV4), ipv4))),
            ipv6_now.eq(Mux(inner_here & vlan_now, ethertype(inner, h.ETHERTYPE_IPV6),
                            Mux(outer_here, ethertype(outer, h.ETHERTYPE_IPV6), ipv6))),
        ]  # fmt: skip
        with m.If(self.valid):
            m.d.sync += [vlan.eq(vlan_now), ipv4.eq(ipv4_now), ipv6.eq(ipv6_now)]
        self._now, self._known = (vlan_now, ipv4_now, ipv6_now), (vlan, ipv4, ipv6)
        m.d.comb += [
            self.info.vlan.eq(vlan), self.info.ipv6.eq(ipv6), self.raw.vlan.eq(vlan), self.raw.ipv6.eq(ipv6),
        ]  # fmt: skip
        with m.If(self.valid):
            for target, at in ((self.raw.dst_mac, 0), (self.raw.src_mac, 6)):
                for step, byte in enumerate(self._bytes(target)):
                    with m.If(self._at[(at + step) // self.lanes]):
                        m.d.sync += byte.eq(self._byte(at + step))
            tag = h.ETHERNET.size_bytes
            with m.If(self._at[tag // self.lanes]):
                m.d.sync += self.raw.vlan_tci.eq(Cat(self._byte(tag + 1), self._byte(tag)))

    def _ip(self, m) -> None:
        """Classification, lengths and addresses."""
        v4 = [v for v in VARIANTS if not v.ipv6]
        v6 = [v for v in VARIANTS if v.ipv6]

        def at(offset4: int | None, offset6: int | None) -> dict:
            places = {} if offset4 is None else {v: v.ip + offset4 for v in v4}
            return places | ({} if offset6 is None else {v: v.ip + offset6 for v in v6})

        udp_protocol, first_fragment, port, whole_udp = Signal(), Signal(), Signal(), Signal()
        bad_version, more_fragments = Signal(), Signal()

        def no_offset(variant, p):  # R-FRM-4: a later fragment has no UDP header, so it is not RoCEv2
            return Const(1) if variant.ipv6 else (self._byte(p)[:5] == 0) & (self._byte(p + 1) == 0)

        def wrong_version(variant, p):  # R-FRM-4
            return self._byte(p)[4:] != 6 if variant.ipv6 else self._byte(p) != 0x45

        self._flag(udp_protocol, at(9, 6), lambda _, p: self._byte(p) == h.PROTOCOL_UDP)
        self._flag(first_fragment, at(6, 6), no_offset)
        self._flag(more_fragments, at(6, None), lambda _, p: self._byte(p)[5])
        self._flag(bad_version, at(0, 0), wrong_version)
        self._flag(port, {v: v.udp + 2 for v in VARIANTS},  # R-FRM-6
                   lambda _, p: Cat(self._byte(p + 1), self._byte(p)) == h.ROCE_PORT)  # fmt: skip
        self._flag(whole_udp, {v: v.udp + 7 for v in VARIANTS}, lambda _, p: self.beat.keep[p % self.lanes])
        m.d.comb += [
            self.info.roce.eq(udp_protocol & first_fragment & port & whole_udp),
            self.info.bad_ip.eq(bad_version | more_fragments),
        ]
        self._capture(self._bytes(self.info.ip_length), at(2, 4))
        self._capture(self._bytes(self.info.udp_length), {v: v.udp + 4 for v in VARIANTS})
        self._capture(self._bytes(self.raw.src_ip)[12:], at(12, 8 + 12))
        self._capture(self._bytes(self.raw.dst_ip)[12:], at(16, 24 + 12))
        self._capture(self._bytes(self.raw.src_ip)[:12], at(None, 8))
        self._capture(self._bytes(self.raw.dst_ip)[:12], at(None, 24))
        with m.If(self.valid):
            for variant in VARIANTS:
                traffic_class = self._byte(variant.ip + 1)
                with m.If(self._here(variant, variant.ip + 1)):
                    m.d.sync += self.raw.ecn.eq(traffic_class[4:6] if variant.ipv6 else traffic_class[:2])

    def _transport(self, m) -> None:
        bth = {v: v.bth for v in VARIANTS}
        self._capture(self._bytes(self.raw.bth), bth)
        self._capture(self._bytes(self.raw.ext), {v: at + h.BTH.size_bytes for v, at in bth.items()})
        m.d.comb += [
            self.info.opcode.eq(self.raw.bth.opcode),
            self.info.pad.eq(self.raw.bth.pad),
            self.info.bad_tver.eq(self.raw.bth.tver != 0),
        ]
