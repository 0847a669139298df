"""Every header of a RoCEv2 frame, in wire order. Source: rules.md section 1 (R-FRM, R-HDR)."""

from .layout import wire_layout

__all__ = [
    "AETH", "ATOMIC_ACK_ETH", "ATOMIC_ETH", "BTH", "CNP_RESERVED_BYTES", "DEFAULT_PKEY", "DETH", "ETHERNET",
    "ETHERTYPE_ARP", "ETHERTYPE_IPV4", "ETHERTYPE_IPV6", "ETHERTYPE_ROCEV1", "ETHERTYPE_VLAN", "ICRC_BYTES", "IETH",
    "IMM_DT", "IPV4", "IPV6", "MAX_EXT_HEADER_BYTES", "MIN_ETHERNET_BYTES", "MTU_BYTES", "PROTOCOL_UDP", "RETH",
    "ROCE_PORT", "UDP", "VLAN_TAG", "max_frame_bytes", "mtu_enum",
]  # fmt: skip

ROCE_PORT = 4791
"""UDP destination port of RoCEv2 (R-FRM-6)."""
ETHERTYPE_IPV4 = 0x0800
ETHERTYPE_ARP = 0x0806
ETHERTYPE_VLAN = 0x8100
ETHERTYPE_IPV6 = 0x86DD
ETHERTYPE_ROCEV1 = 0x8915
PROTOCOL_UDP = 17
DEFAULT_PKEY = 0xFFFF
ICRC_BYTES = 4
MIN_ETHERNET_BYTES = 60
"""Smallest Ethernet frame without FCS; a MAC pads shorter ones (R-FRM-1)."""
CNP_RESERVED_BYTES = 16
"""Zero bytes behind the BTH of a CNP (rules.md 1.4)."""
MAX_EXT_HEADER_BYTES = 28
"""Largest extended header: AtomicETH."""

MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""MTU enum to bytes (R-MTU-1)."""

ETHERNET = wire_layout({"dst": 48, "src": 48, "ethertype": 16})

VLAN_TAG = wire_layout({"pcp": 3, "dei": 1, "vid": 12, "ethertype": 16})
"""802.1Q tag behind the 0x8100 ethertype: tag control information, then the ethertype of what follows."""

IPV4 = wire_layout({
    "version": 4, "ihl": 4, "dscp": 6, "ecn": 2, "total_length": 16,
    "ident": 16, "reserved_flag": 1, "df": 1, "mf": 1, "fragment_offset": 13,
    "ttl": 8, "protocol": 8, "checksum": 16, "src": 32, "dst": 32,
})  # fmt: skip
"""IPv4 header without options (R-FRM-4: the only one RoCEv2 allows)."""

IPV6 = wire_layout({
    "version": 4, "dscp": 6, "ecn": 2, "flow_label": 20,
    "payload_length": 16, "next_header": 8, "hop_limit": 8, "src": 128, "dst": 128,
})  # fmt: skip

UDP = wire_layout({"sport": 16, "dport": 16, "length": 16, "checksum": 16})

BTH = wire_layout({
    "opcode": 8, "se": 1, "migreq": 1, "pad": 2, "tver": 4, "pkey": 16,
    "fecn": 1, "becn": 1, "resv6": 6, "dest_qpn": 24,
    "ackreq": 1, "resv7": 7, "psn": 24,
})  # fmt: skip
"""Base transport header (rules.md 1.2). ``opcode`` is raw: a frame may hold a value that is no opcode."""

DETH = wire_layout({"qkey": 32, "reserved": 8, "src_qp": 24})
RETH = wire_layout({"va": 64, "rkey": 32, "length": 32})
AETH = wire_layout({"syndrome": 8, "msn": 24})

ATOMIC_ETH = wire_layout({"va": 64, "rkey": 32, "swap": 64, "compare": 64})
"""``swap`` holds the addend of FETCH_ADD (R-OPC-3). In a frame its 64-bit fields are only 4-byte aligned (R-HDR-1)."""

ATOMIC_ACK_ETH = wire_layout({"original": 64})
IMM_DT = wire_layout({"imm": 32})
IETH = wire_layout({"rkey": 32})


def mtu_enum(size: int) -> int:
    """MTU enum 1..5 of an MTU in bytes (ValueError for a size that is none)."""
    for code, octets in MTU_BYTES.items():
        if octets == size:
            return code
    raise ValueError(f"MTU is {size} bytes, must be one of {sorted(MTU_BYTES.values())}")


def max_frame_bytes(mtu: int) -> int:
    """Largest RoCEv2 frame without FCS for a path MTU in bytes: VLAN, IPv6, WRITE_ONLY_IMM (R-MTU-2)."""
    headers = (ETHERNET, VLAN_TAG, IPV6, UDP, BTH, RETH, IMM_DT)
    return sum(header.size_bytes for header in headers) + mtu + ICRC_BYTES
