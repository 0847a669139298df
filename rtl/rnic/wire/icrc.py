"""Invariant CRC in plain Python. Source: rules.md section 3 (R-ICRC-*). Hardware engines are checked against it."""

import zlib

from .headers import ICRC_BYTES, IPV4, IPV6, UDP

__all__ = ["ICRC_RESIDUE", "GRH_NEXT_HEADER", "icrc", "icrc_bytes", "icrc_ok", "masked_datagram"]

ICRC_RESIDUE = 0xDEBB20E3
"""CRC register (reflected, not inverted) behind the eight 0xFF bytes that stand in for the LRH, and also behind a whole
correct packet including its ICRC (R-ICRC-6)."""
GRH_NEXT_HEADER = 0x1B
_LRH_STAND_IN = b"\xff" * 8


def masked_datagram(datagram: bytes) -> bytes:
    """``datagram`` (from the IP header or RoCEv1 GRH on) with every variant field replaced by ones (R-ICRC-3).

    ValueError when it is neither IPv4 without options nor IPv6, or ends inside the BTH.
    """
    out = bytearray(datagram)
    version = out[0] >> 4 if out else 0
    if version == 4:
        if out[0] & 15 != 5:
            raise ValueError(f"IPv4 IHL is {out[0] & 15}, must be 5")
        udp = IPV4.size_bytes
        variant = [1, 8, 10, 11]  # TOS, TTL, header checksum
    elif version == 6:
        udp = IPV6.size_bytes
        variant = [1, 2, 3, 7]  # traffic class and flow label, hop limit
    else:
        raise ValueError(f"IP version is {version}, must be 4 or 6")
    bth = udp
    if version == 4 or len(out) > 6 and out[6] != GRH_NEXT_HEADER:  # R-ICRC-9: a GRH has no UDP header behind it
        variant += [udp + 6, udp + 7]  # UDP checksum
        bth = udp + UDP.size_bytes
    variant.append(bth + 4)  # FECN, BECN, resv6
    if len(out) < bth + 12:
        raise ValueError(f"datagram is {len(out)} bytes, must reach the end of the BTH at {bth + 12}")
    if version == 6:
        out[0] |= 0x0F  # upper half of the traffic class
    for at in variant:
        out[at] = 0xFF
    return bytes(out)


def icrc(datagram: bytes) -> int:
    """ICRC of a datagram without its 4 ICRC bytes (R-ICRC-1, R-ICRC-2)."""
    return zlib.crc32(_LRH_STAND_IN + masked_datagram(datagram))


def icrc_bytes(datagram: bytes) -> bytes:
    """The 4 ICRC bytes to append to ``datagram``: least significant first (R-ICRC-5)."""
    return icrc(datagram).to_bytes(ICRC_BYTES, "little")


def icrc_ok(datagram: bytes) -> bool:
    """Whether a datagram that ends with its ICRC is intact."""
    return icrc_bytes(datagram[:-ICRC_BYTES]) == datagram[-ICRC_BYTES:]
