"""What the parser says of a frame, and where in a frame the headers are."""

from typing import NamedTuple

from amaranth.lib import data

from rnic.wire import headers as h
from rnic.wire.opcode import OpcodeFlags

__all__ = ["HEADER_BYTES", "VARIANTS", "FrameInfo", "RxHeader", "Variant"]


class Variant(NamedTuple):
    """One of the four ways headers stand in a RoCEv2 frame; byte offsets from the frame's start, all 2 mod 4."""

    vlan: bool
    ipv6: bool

    @property
    def ip(self) -> int:
        return h.ETHERNET.size_bytes + self.vlan * h.VLAN_TAG.size_bytes

    @property
    def udp(self) -> int:
        return self.ip + (h.IPV6 if self.ipv6 else h.IPV4).size_bytes

    @property
    def bth(self) -> int:
        return self.udp + h.UDP.size_bytes

    @property
    def length_base(self) -> int:
        """Frame offset the IP length field counts from: IPv4 counts its own header, IPv6 does not (R-FRM-2)."""
        return self.udp if self.ipv6 else self.ip


VARIANTS = [Variant(vlan, ipv6) for vlan in (False, True) for ipv6 in (False, True)]

HEADER_BYTES = max(v.bth for v in VARIANTS) + h.BTH.size_bytes + h.MAX_EXT_HEADER_BYTES
"""Frame bytes that can hold a header (106)."""


RxHeader = data.StructLayout({
    "opcode": 8,
    "flags": OpcodeFlags,
    "se": 1,
    "pad": 2,
    "pkey": 16,
    "dest_qpn": 24,
    "ackreq": 1,
    "psn": 24,
    "payload_len": 13,
    "is_ipv6": 1,
    "vlan_valid": 1,
    "vlan_vid": 12,
    "src_ip": 128,
    "dst_ip": 128,
    "dst_mac": 48,
    "src_mac": 48,
    "ecn": 2,
    "va": 64,
    "rkey": 32,
    "dma_len": 32,
    "swap": 64,
    "compare": 64,
    "aeth_syndrome": 8,
    "aeth_msn": 24,
    "original": 64,
    "imm": 32,
    "qkey": 32,
    "src_qp": 24,
})  # fmt: skip
"""Header of one accepted RoCEv2 frame.

Numbers as their protocol means them; addresses are big-endian numbers (first byte most significant), IPv4 addresses as
::ffff:a.b.c.d (R-ADR-1). ``vlan_vid`` is 0 without a tag. ``payload_len`` is bytes without pad, 0..4096. ``imm`` holds
the ImmDt bytes in wire order (byte 0 in bits 7:0; R-CQ-4: opaque), or the IETH key as a number. ``original`` is the
AtomicAckETH value. A field of an extended header the opcode does not have (``flags.has_*``) is garbage.
"""


FrameInfo = data.StructLayout({
    "vlan": 1,
    "ipv6": 1,
    "roce": 1,
    "bad_ip": 1,  # version, IHL, MF (R-FRM-4)
    "ip_length": 16,
    "udp_length": 16,
    "opcode": 8,
    "pad": 2,
    "bad_tver": 1,
})  # fmt: skip
"""What the stages behind the capture need to know of a frame, as of the beat it travels with: a field is right from the
beat that holds its bytes on, ``roce`` (this is a RoCEv2 frame, see `wire.frame.parse_frame`) from the end of the UDP
header on."""
