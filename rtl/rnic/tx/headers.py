"""Headers of outgoing frames: Ethernet to extended headers as one vector, and the IPv4 header checksum."""

from amaranth import *
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from ..abi import ADDRESS_CTX, GID_ENTRY
from ..config import MAX_PMTU, Params
from ..records import TxHeader
from ..stream.check import watch
from ..wire import headers as h
from ..wire import opcode as opcodes
from ..wire.layout import swap_bytes

__all__ = ["HIDDEN_BYTES", "MAX_HEADER_BYTES", "FrameHeader", "HeaderAssembler", "Ipv4Checksum", "hidden_bytes"]

_ETH_BYTES = h.ETHERNET.size_bytes
_VLAN_BYTES = h.VLAN_TAG.size_bytes
_TRANSPORT_BYTES = h.UDP.size_bytes + h.BTH.size_bytes
MAX_HEADER_BYTES = _ETH_BYTES + _VLAN_BYTES + h.IPV6.size_bytes + _TRANSPORT_BYTES + h.MAX_EXT_HEADER_BYTES
HIDDEN_BYTES = _ETH_BYTES + _VLAN_BYTES + h.IPV6.size_bytes + h.UDP.size_bytes + 5
"""Bytes from the frame's first to the last one that the ICRC may not see as it is (BTH byte 4)."""
_WORDS_V4 = (_ETH_BYTES - 2 + h.IPV4.size_bytes + h.UDP.size_bytes) // 4
_WORDS_V6_MORE = (h.IPV6.size_bytes - h.IPV4.size_bytes) // 4
_UDP_WORDS = (h.UDP.size_bytes + h.ICRC_BYTES) // 4
_DONT_FRAGMENT = 0x4000


def hidden_bytes(vlan: bool, ipv6: bool) -> dict[int, int]:
    """Bytes of a frame the ICRC does not see as sent: position to the value it sees instead (R-ICRC-3).

    Ethernet bytes are outside the ICRC: as 0 they only shift its start (R-FRM-7). IPv6 byte 0 is half masked.
    """
    ip = _ETH_BYTES + (_VLAN_BYTES if vlan else 0)
    udp = ip + (h.IPV6 if ipv6 else h.IPV4).size_bytes
    variant = [1, 2, 3, 7] if ipv6 else [1, 8, 10, 11]  # R-ICRC-3
    seen = {at: 0 for at in range(ip)} | {ip + at: 0xFF for at in variant}
    if ipv6:
        seen[ip] = 0x6F
    return seen | {at: 0xFF for at in (udp + 6, udp + 7, udp + h.UDP.size_bytes + 4)}  # R-ICRC-3


class FrameHeader(data.StructLayout):
    """The assembled header of one frame. Headers are ``4 * words + 2`` bytes, the whole frame ``4 * end + 2``."""

    def __init__(self, p: Params):
        super().__init__({
            "bytes": 8 * MAX_HEADER_BYTES,  # first byte on the wire in bits 7:0, zero behind the headers
            "hide": HIDDEN_BYTES,  # bytes the ICRC sees as constants, see hidden_bytes
            "words": range(MAX_HEADER_BYTES // 4 + 1),
            "end": range((MAX_HEADER_BYTES + MAX_PMTU + h.ICRC_BYTES) // 4 + 1),
            "vlan": 1,
            "ipv6": 1,
            "own": 1,  # the frame goes to the MAC it comes from
            "qpn": p.qpn_bits,
            "psn": 24,
            "opcode": 8,
            "length": 13,
        })  # fmt: skip


class Ipv4Checksum(wiring.Component):
    """One's complement checksum of an IPv4 header without options (R-FRM-4, R-FRM-5).

    Timing: a pipeline without back-pressure, one header per cycle, ``o`` 4 cycles after ``i_valid``.
    """

    def __init__(self):
        super().__init__({
            "i_valid": In(1), "tos": In(8), "total_length": In(16), "ident": In(16), "ttl": In(8),
            "src": In(32), "dst": In(32),  # numbers (first byte on the wire most significant)
            "o_valid": Out(1), "o": Out(16),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        valid = Signal(4)
        src = Signal(17)
        dst = Signal(17)
        fixed = Signal(17)
        variable = Signal(17)
        addresses = Signal(18)
        others = Signal(19)
        total = Signal(20)
        folded = Signal(17)
        last_carry = Signal(16)
        m.d.sync += [
            valid.eq(Cat(self.i_valid, valid)),
            src.eq(self.src[:16] + self.src[16:]),
            dst.eq(self.dst[:16] + self.dst[16:]),
            fixed.eq(Cat(self.tos, Const(0x45, 8)) + Cat(Const(h.PROTOCOL_UDP, 8), self.ttl)),
            variable.eq(self.ident + self.total_length),
            addresses.eq(src + dst),
            others.eq(fixed + variable + _DONT_FRAGMENT),
            total.eq(addresses + others),
            folded.eq(total[:16] + total[16:]),
        ]
        m.d.comb += [
            last_carry.eq(folded[:16] + folded[16]),  # R-FRM-5
            self.o.eq(~last_carry),
            self.o_valid.eq(valid[3]),
        ]
        return m


class HeaderAssembler(wiring.Component):
    """Turns a `TxHeader` and the address context of its QP into the bytes of the frame's headers.

    Rules: R-FRM-2 (lengths), R-FRM-4 (version 4, IHL 5, DF, ID counts frames), R-FRM-6 (port 4791, UDP checksum 0),
    R-FRM-7 (VLAN tag), R-PAD-1 (PadCnt). MigReq, TVer, resv7 are 0; BECN is 1 in a CNP only. The IPv4 checksum field is
    0 here: the checksum follows on its own stream, in the order of ``o``, for IPv4 frames only.
    UD: ``rkey`` is the Q_Key, ``va`` 23:0 the destination QPN, ``qpn`` the source QPN of the DETH.

    Timing: header in at cycle t, ``o`` valid at t + 1 + ``p.address_cycles``, ``checksum_valid`` 4 cycles after ``o`` was taken;
    one header every ``p.address_cycles``. ``header.ready`` depends on registers only. ``addr`` is read ``p.address_cycles`` after
    ``addr_index``, which stays so long, and must stay while the index stays; ``gid`` and ``pkey`` follow their index in the same
    cycle.
    """

    def __init__(self, p: Params):
        self.p = p
        super().__init__({
            "header": In(stream.Signature(TxHeader(p))),
            "addr_index": Out(p.qpn_bits), "addr": In(ADDRESS_CTX.layout),
            "gid_index": Out(p.gid_bits), "gid": In(GID_ENTRY.layout),
            "pkey_index": Out(p.pkey_bits), "pkey": In(16),
            "o": Out(stream.Signature(FrameHeader(p))),
            "checksum_valid": Out(1), "checksum": Out(16),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        p = self.p
        m.submodules.sum = checksum = Ipv4Checksum()

        # Stage 1: wait for the address context; opcode and payload length are decoded meanwhile.
        asked = Signal(TxHeader(p))
        asked_valid = Signal()
        asked_ready = Signal()  # context and decode are there
        flags = Signal(opcodes.OpcodeFlags)
        payload_words = Signal(range(MAX_PMTU // 4 + 1))
        take = Signal()
        move = Signal()
        m.d.comb += [
            self.header.ready.eq(~asked_valid | move),
            take.eq(self.header.valid & self.header.ready),
            self.addr_index.eq(Mux(self.header.ready, self.header.payload.qpn, asked.qpn)),
            self.gid_index.eq(self.addr.sgid_index),
            self.pkey_index.eq(self.addr.pkey_index),
        ]
        read = Signal(p.address_cycles - 1)  # the context has been asked for a cycle ago, two
        m.d.comb += read[0].eq(asked_valid & ~move)
        if len(read) > 1:
            m.d.sync += read[1].eq(read[0])
        m.d.sync += [
            asked_ready.eq(read[-1] & ~move),
            flags.eq(opcodes.decode(m, asked.opcode)),
            payload_words.eq((asked.length + 3) >> 2),  # R-PAD-1
        ]
        with m.If(self.header.ready):
            m.d.sync += asked_valid.eq(take)
            with m.If(take):
                m.d.sync += asked.eq(self.header.payload)

        # Stage 2: IP to extended headers, in place for a frame without VLAN tag.
        network = Signal(8 * (2 + h.IPV6.size_bytes + _TRANSPORT_BYTES + h.MAX_EXT_HEADER_BYTES))  # from the ethertype on
        macs = Signal(96)
        tci = Signal(16)
        vlan = Signal()
        ipv6 = Signal()
        words = Signal(range(MAX_HEADER_BYTES // 4 + 1))  # as in FrameHeader, without the VLAN tag
        end = Signal.like(self.o.payload.end)
        identity = Signal(data.StructLayout({"qpn": p.qpn_bits, "psn": 24, "opcode": 8, "length": 13}))
        valid = Signal()
        ident = Signal(16, init=1)  # R-FRM-4, R-ICRC-4: given to the frame here, before its ICRC
        given = Signal()
        udp_words = Signal(range((MAX_HEADER_BYTES + MAX_PMTU) // 4 + 1))
        total_words = Signal.like(udp_words)
        m.d.comb += [
            move.eq(asked_ready & ~valid),
            self.o.valid.eq(valid),
            given.eq(self.o.valid & self.o.ready),
            udp_words.eq(flags.header_words + payload_words + _UDP_WORDS),
            total_words.eq(flags.header_words + payload_words + (_UDP_WORDS + h.IPV4.size_bytes // 4)),
        ]
        next_network = self._network(m, asked, flags, udp_words, total_words, ident)
        with m.If(move):
            m.d.sync += [
                network.eq(next_network),
                macs.eq(Cat(self.addr.dmac, self.gid.mac)),
                tci.eq(self.addr.vlan_tci),
                vlan.eq(self.addr.vlan),
                ipv6.eq(self.addr.ipv6),
                words.eq(flags.header_words + Mux(self.addr.ipv6, _WORDS_V4 + _WORDS_V6_MORE, _WORDS_V4)),
                end.eq(flags.header_words + payload_words
                       + Mux(self.addr.ipv6, _WORDS_V4 + _WORDS_V6_MORE, _WORDS_V4) + h.ICRC_BYTES // 4),
                identity.qpn.eq(asked.qpn), identity.psn.eq(asked.psn), identity.opcode.eq(asked.opcode),
                identity.length.eq(asked.length),
                ident.eq(ident + 1),
                valid.eq(1),
            ]  # fmt: skip
        with m.Elif(given):
            m.d.sync += valid.eq(0)

        # Out: the VLAN tag (R-FRM-7) moves all behind it; the checksum is taken from the header as it stands.
        tag = Cat(swap_bytes(Const(h.ETHERTYPE_VLAN, 16)), swap_bytes(tci))
        ipv4 = Signal(h.IPV4)
        out = self.o.payload
        m.d.comb += [
            ipv4.as_value().eq(swap_bytes(network[16 : 16 + 8 * h.IPV4.size_bytes])),
            checksum.i_valid.eq(given & ~ipv6),  # R-FRM-5
            checksum.tos.eq(Cat(ipv4.ecn, ipv4.dscp)),
            checksum.total_length.eq(ipv4.total_length),
            checksum.ident.eq(ipv4.ident),
            checksum.ttl.eq(ipv4.ttl),
            checksum.src.eq(ipv4.src),
            checksum.dst.eq(ipv4.dst),
            self.checksum_valid.eq(checksum.o_valid),
            self.checksum.eq(checksum.o),
            out.bytes.eq(Cat(macs, Mux(vlan, Cat(tag, network), network))),
            out.hide.eq(self._hide(m, vlan, ipv6)),
            out.words.eq(words + vlan),  # R-FRM-7
            out.end.eq(end + vlan),
            out.vlan.eq(vlan),
            out.ipv6.eq(ipv6),
            out.own.eq(macs[:48] == macs[48:]),
            out.qpn.eq(identity.qpn), out.psn.eq(identity.psn), out.opcode.eq(identity.opcode),
            out.length.eq(identity.length),
        ]  # fmt: skip
        watch(m, "header", self.header)
        return m

    @staticmethod
    def _hide(m, has_tag, is_ipv6):
        hide = Signal(HIDDEN_BYTES)
        with m.Switch(Cat(is_ipv6, has_tag)):
            for vlan in (0, 1):
                for ipv6 in (0, 1):
                    with m.Case(vlan << 1 | ipv6):
                        m.d.comb += hide.eq(sum(1 << at for at in hidden_bytes(bool(vlan), bool(ipv6))))
        return hide

    @staticmethod
    def _wire(m, name, layout, **fields):
        """The bytes of a header in bus order: ``fields`` as numbers, those not named are 0."""
        view = Signal(layout, name=name)
        m.d.comb += [view[field].eq(value) for field, value in fields.items()]
        return swap_bytes(view)

    def _network(self, m, head, has, udp_words, total_words, ident):
        """Ethertype to extended headers, zero behind them: IPv4 or IPv6 as the address context says."""
        addr, gid = self.addr, self.gid
        total_length = Signal(16)
        udp_length = Signal(16)
        dest_qpn = Signal(24)
        m.d.comb += [
            total_length.eq(total_words << 2),  # R-FRM-2: the ICRC is inside both lengths
            udp_length.eq(udp_words << 2),  # R-FRM-2
            dest_qpn.eq(Mux(has.has_deth, head.va[:24], addr.dest_qpn)),
        ]
        ipv4 = self._wire(
            # R-FRM-4, R-ADR-3
            m, "ipv4_header", h.IPV4, version=4, ihl=5, dscp=addr.traffic_class[2:], ecn=addr.traffic_class[:2],
            total_length=total_length, ident=ident, df=1, ttl=addr.hop_limit, protocol=h.PROTOCOL_UDP,
            src=swap_bytes(gid.ip[96:]), dst=swap_bytes(addr.dip[96:]),
        )  # fmt: skip
        ipv6 = self._wire(
            m, "ipv6_header", h.IPV6, version=6, dscp=addr.traffic_class[2:], ecn=addr.traffic_class[:2],
            flow_label=addr.flow_label, payload_length=udp_length, next_header=h.PROTOCOL_UDP, hop_limit=addr.hop_limit,
            src=swap_bytes(gid.ip), dst=swap_bytes(addr.dip),
        )  # fmt: skip
        udp = self._wire(m, "udp_header", h.UDP, sport=addr.sport, dport=h.ROCE_PORT, length=udp_length)  # R-FRM-6, R-ADR-4
        bth = self._wire(
            m, "bth", h.BTH, opcode=head.opcode, se=head.solicited, pad=(-head.length)[:2], pkey=self.pkey,  # R-PAD-1
            becn=has.transport == opcodes.Transport.CNP, dest_qpn=dest_qpn, ackreq=head.ackreq, psn=head.psn,
        )  # fmt: skip
        transport = Cat(udp, bth, self._ext(m, head, has))
        return Mux(
            addr.ipv6,
            Cat(swap_bytes(Const(h.ETHERTYPE_IPV6, 16)), ipv6, transport),
            Cat(swap_bytes(Const(h.ETHERTYPE_IPV4, 16)), ipv4, transport),
        )  # fmt: skip

    @staticmethod
    def _ext(m, head, has):
        """Extended headers (R-HDR): seven words, each an AND-OR of the headers that use it, zero behind the last."""
        imm = swap_bytes(head.imm)  # bytes as on the wire -> number
        words = [
            [(has.has_reth | has.has_atomiceth, head.va[32:]), (has.has_aeth, Cat(head.msn, head.syndrome)),
             (has.has_deth, head.rkey), (has.has_ieth, head.imm),
             (has.has_imm & ~has.has_reth & ~has.has_deth, imm)],
            [(has.has_reth | has.has_atomiceth, head.va[:32]), (has.has_atomicack, head.swap[32:]),
             (has.has_deth, head.qpn)],
            [(has.has_reth | has.has_atomiceth, head.rkey), (has.has_atomicack, head.swap[:32]),
             (has.has_deth & has.has_imm, imm)],
            [(has.has_reth, head.dma_length), (has.has_atomiceth, head.swap[32:])],  # R-OPC-3
            [(has.has_reth & has.has_imm, imm), (has.has_atomiceth, head.swap[:32])],
            [(has.has_atomiceth, head.compare[32:])],
            [(has.has_atomiceth, head.compare[:32])],
        ]  # fmt: skip
        ext = []
        for index, choices in enumerate(words):
            word = Signal(32, name=f"ext_{index}")
            total = Const(0, 32)
            for use, value in choices:
                total = total | (Value.cast(value) & use.replicate(32))
            m.d.comb += word.eq(total)
            ext.append(swap_bytes(word))
        return Cat(*ext)
