"""Whole RoCEv2 frames in plain Python: build, break on purpose, parse. For tests and models, not for hardware.

:class:`Frame` packs to the bytes from the Ethernet destination to the ICRC (no Ethernet padding, no FCS);
:func:`parse_frame` is its inverse with every receive check (R-FRM-1..7, R-LEN, R-ICRC) as a precise error.
"""

import enum
from dataclasses import dataclass, field

from . import headers as h
from .icrc import icrc_bytes, icrc_ok
from .opcode import OPCODES, Opcode, OpcodeInfo

__all__ = ["Frame", "FrameError", "FrameReason", "ipv4_checksum", "mapped_address", "parse_frame"]


class FrameReason(enum.Enum):
    """Why :func:`parse_frame` refused a frame. ``NOT_ROCE`` is no fault: the frame belongs to somebody else."""

    NOT_ROCE = enum.auto()
    SHORT_FRAME = enum.auto()
    BAD_LENGTH = enum.auto()
    BAD_IP_HEADER = enum.auto()
    BAD_IP_CHECKSUM = enum.auto()
    FRAGMENT = enum.auto()
    UNKNOWN_OPCODE = enum.auto()
    BAD_TVER = enum.auto()
    QP0 = enum.auto()
    BAD_ICRC = enum.auto()


class FrameError(ValueError):
    """A frame that is not an acceptable RoCEv2 frame; ``reason`` says in one word why."""

    def __init__(self, reason: FrameReason, message: str):
        super().__init__(f"{reason.name}: {message}")
        self.reason = reason


def ipv4_checksum(header: bytes) -> int:
    """One's complement checksum over an IPv4 header; 0 over a correct header including its checksum field."""
    total = sum(int.from_bytes(header[i : i + 2], "big") for i in range(0, len(header), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def mapped_address(address: bytes) -> bytes:
    """The 16-byte form of an address: IPv4 as ::ffff:a.b.c.d (R-ADR-1)."""
    return address if len(address) == 16 else bytes(10) + b"\xff\xff" + address


@dataclass
class Frame:
    """One RoCEv2 frame.

    Addresses are bytes: MAC 6, IP 4 or 16 (both alike). ``vlan`` is None or (pcp, vid). Extended header fields are used
    when the opcode has that header (``rkey`` also names the key of SEND with invalidate) and ignored otherwise. Fields
    named ``raw_*`` replace what :meth:`pack` computes; they exist to build faulty frames.
    """

    opcode: Opcode | int
    dest_qpn: int
    psn: int = 0
    payload: bytes = b""
    dst_mac: bytes = b"\x02\x00\x00\x00\x00\x02"
    src_mac: bytes = b"\x02\x00\x00\x00\x00\x01"
    vlan: tuple[int, int] | None = None
    src_ip: bytes = b"\x0a\x00\x00\x01"
    dst_ip: bytes = b"\x0a\x00\x00\x02"
    traffic_class: int = 0
    hop_limit: int = 64
    flow_label: int = 0
    ident: int = 0
    dont_fragment: bool = True
    sport: int = 0xC000
    dport: int = h.ROCE_PORT
    udp_checksum: int = 0
    se: bool = False
    migreq: bool = False
    tver: int = 0
    pkey: int = h.DEFAULT_PKEY
    fecn: bool = False
    becn: bool = False
    ackreq: bool = False
    resv7: int = 0
    va: int = 0
    rkey: int = 0
    dma_length: int = 0
    swap: int = 0
    compare: int = 0
    syndrome: int = 0
    msn: int = 0
    original: int = 0
    imm: int = 0
    qkey: int = 0
    src_qp: int = 0
    raw_ext: bytes | None = field(default=None, repr=False)
    raw_pad: int | None = field(default=None, repr=False)
    raw_pad_bytes: bytes | None = field(default=None, repr=False)
    raw_ip_length: int | None = field(default=None, repr=False)
    raw_udp_length: int | None = field(default=None, repr=False)
    raw_ip_checksum: int | None = field(default=None, repr=False)
    raw_icrc: bytes | None = field(default=None, repr=False)

    @property
    def info(self) -> OpcodeInfo | None:
        """Row of the opcode table, None for a value that is no opcode."""
        try:
            return OPCODES[Opcode(self.opcode)]
        except ValueError:
            return None

    @property
    def is_ipv6(self) -> bool:
        return len(self.dst_ip) == 16

    def ext_headers(self) -> bytes:
        """Extended headers in wire order."""
        if self.raw_ext is not None:
            return self.raw_ext
        info = self.info
        if info is None:
            return b""
        out = b""
        if info.opcode is Opcode.CNP:
            out += bytes(h.CNP_RESERVED_BYTES)
        if info.has_deth:
            out += h.DETH.pack(qkey=self.qkey, src_qp=self.src_qp)
        if info.has_reth:
            out += h.RETH.pack(va=self.va, rkey=self.rkey, length=self.dma_length)
        if info.has_atomiceth:
            out += h.ATOMIC_ETH.pack(va=self.va, rkey=self.rkey, swap=self.swap, compare=self.compare)
        if info.has_aeth:
            out += h.AETH.pack(syndrome=self.syndrome, msn=self.msn)
        if info.has_atomicack:
            out += h.ATOMIC_ACK_ETH.pack(original=self.original)
        if info.has_imm:
            out += h.IMM_DT.pack(imm=self.imm)
        if info.has_ieth:
            out += h.IETH.pack(rkey=self.rkey)
        return out

    def transport(self) -> bytes:
        """BTH, extended headers, payload and pad bytes: what the UDP datagram carries before the ICRC (R-PAD-1)."""
        pad = -len(self.payload) & 3
        pad_bytes = bytes(pad) if self.raw_pad_bytes is None else self.raw_pad_bytes
        opcode = self.opcode.value if isinstance(self.opcode, Opcode) else self.opcode
        bth = h.BTH.pack(
            opcode=opcode, se=self.se, migreq=self.migreq, pad=pad if self.raw_pad is None else self.raw_pad,
            tver=self.tver, pkey=self.pkey, fecn=self.fecn, becn=self.becn, dest_qpn=self.dest_qpn, ackreq=self.ackreq,
            resv7=self.resv7, psn=self.psn,
        )  # fmt: skip
        return bth + self.ext_headers() + self.payload + pad_bytes

    def _ip_header(self, udp_length: int) -> bytes:
        if len(self.src_ip) != len(self.dst_ip) or len(self.dst_ip) not in (4, 16):
            raise ValueError(f"IP addresses are {len(self.src_ip)} and {len(self.dst_ip)} bytes, must both be 4 or 16")
        src, dst = int.from_bytes(self.src_ip, "big"), int.from_bytes(self.dst_ip, "big")
        dscp, ecn = self.traffic_class >> 2, self.traffic_class & 3
        if self.is_ipv6:
            return h.IPV6.pack(
                version=6, dscp=dscp, ecn=ecn, flow_label=self.flow_label,
                payload_length=udp_length if self.raw_ip_length is None else self.raw_ip_length,
                next_header=h.PROTOCOL_UDP, hop_limit=self.hop_limit, src=src, dst=dst,
            )  # fmt: skip
        fields = dict(
            version=4, ihl=5, dscp=dscp, ecn=ecn,
            total_length=h.IPV4.size_bytes + udp_length if self.raw_ip_length is None else self.raw_ip_length,
            ident=self.ident, df=self.dont_fragment, ttl=self.hop_limit, protocol=h.PROTOCOL_UDP, src=src, dst=dst,
        )  # fmt: skip
        checksum = ipv4_checksum(h.IPV4.pack(**fields)) if self.raw_ip_checksum is None else self.raw_ip_checksum
        return h.IPV4.pack(**fields, checksum=checksum)

    def datagram(self) -> bytes:
        """IP datagram including the ICRC (R-FRM-2)."""
        transport = self.transport()
        udp_length = h.UDP.size_bytes + len(transport) + h.ICRC_BYTES
        udp = h.UDP.pack(
            sport=self.sport, dport=self.dport, checksum=self.udp_checksum,
            length=udp_length if self.raw_udp_length is None else self.raw_udp_length,
        )  # fmt: skip
        datagram = self._ip_header(udp_length) + udp + transport
        return datagram + (icrc_bytes(datagram) if self.raw_icrc is None else self.raw_icrc)

    def pack(self) -> bytes:
        """The frame, Ethernet destination to ICRC. ValueError when a field does not fit."""
        if len(self.dst_mac) != 6 or len(self.src_mac) != 6:
            raise ValueError(f"MAC addresses are {len(self.dst_mac)} and {len(self.src_mac)} bytes, must be 6")
        ethertype = h.ETHERTYPE_IPV6 if self.is_ipv6 else h.ETHERTYPE_IPV4
        out = self.dst_mac + self.src_mac
        if self.vlan is not None:
            pcp, vid = self.vlan
            out += h.ETHERTYPE_VLAN.to_bytes(2, "big") + h.VLAN_TAG.pack(pcp=pcp, vid=vid, ethertype=ethertype)
        else:
            out += ethertype.to_bytes(2, "big")
        return out + self.datagram()


def parse_frame(raw: bytes) -> Frame:
    """The :class:`Frame` in ``raw``; bytes behind the IP datagram (MAC padding, trailers) are ignored (R-FRM-1).

    Raises :class:`FrameError` (a ValueError). A frame is RoCEv2 when it is IPv4 or IPv6 (with or without one VLAN tag),
    carries UDP, is no later fragment, and holds port 4791 where the UDP destination port stands behind a header without
    options; anything else, frames that end before that included, is ``NOT_ROCE``. Of a RoCEv2 frame the reason is the
    first check that fails in this order: IP header, fragment, IP checksum, IP against UDP length, frame shorter than
    the datagram, opcode, header and pad against length, TVer, QP number, ICRC.
    """

    def need(size: int, what: str) -> None:
        if len(raw) < size:
            raise FrameError(FrameReason.NOT_ROCE, f"frame is {len(raw)} bytes and ends inside the {what}")

    need(h.ETHERNET.size_bytes, "Ethernet header")
    eth = h.ETHERNET.unpack(raw[:14])
    ethertype, at, vlan = eth["ethertype"], 14, None
    if ethertype == h.ETHERTYPE_VLAN:  # R-FRM-7
        need(18, "VLAN tag")
        tag = h.VLAN_TAG.unpack(raw[14:18])
        ethertype, at, vlan = tag["ethertype"], 18, (tag["pcp"], tag["vid"])
    if ethertype == h.ETHERTYPE_IPV4:
        ip, udp_at, values = _parse_ipv4(raw, at, need)
    elif ethertype == h.ETHERTYPE_IPV6:
        ip, udp_at, values = _parse_ipv6(raw, at, need)
    else:
        raise FrameError(FrameReason.NOT_ROCE, f"ethertype is {ethertype:#06x}")
    need(udp_at + h.UDP.size_bytes, "UDP header")
    udp = h.UDP.unpack(raw[udp_at : udp_at + 8])
    if udp["dport"] != h.ROCE_PORT:  # R-FRM-6
        raise FrameError(FrameReason.NOT_ROCE, f"UDP destination port is {udp['dport']}")
    if values["fault"] is not None:  # R-FRM-4
        raise values["fault"]
    if ethertype == h.ETHERTYPE_IPV4 and ipv4_checksum(ip):  # R-FRM-5
        raise FrameError(FrameReason.BAD_IP_CHECKSUM, "IPv4 header checksum is wrong")
    if udp["length"] != values["udp_length"]:  # R-FRM-2
        message = f"UDP length is {udp['length']}, the IP header says {values['udp_length']}"
        raise FrameError(FrameReason.BAD_LENGTH, message)
    bth_at = udp_at + h.UDP.size_bytes
    body_bytes = udp["length"] - h.UDP.size_bytes
    if body_bytes < h.BTH.size_bytes + h.ICRC_BYTES:
        raise FrameError(FrameReason.BAD_LENGTH, f"UDP carries {body_bytes} bytes, less than BTH and ICRC")
    if len(raw) < udp_at + udp["length"]:
        message = f"frame is {len(raw)} bytes and ends inside the IP datagram, which ends at {udp_at + udp['length']}"
        raise FrameError(FrameReason.SHORT_FRAME, message)
    bth = h.BTH.unpack(raw[bth_at : bth_at + 12])
    try:
        info = OPCODES[Opcode(bth["opcode"])]
    except ValueError:
        raise FrameError(FrameReason.UNKNOWN_OPCODE, f"opcode is {bth['opcode']:#04x}") from None
    payload_len = body_bytes - info.header_bytes - bth["pad"] - h.ICRC_BYTES  # R-FRM-3
    # R-PAD-1: every packet ends on a 4-byte boundary; R-MTU-1: no path MTU is larger
    if not 0 <= payload_len <= h.MTU_BYTES[5] or body_bytes % 4:
        message = f"UDP carries {body_bytes} bytes, {info.opcode.name} with pad {bth['pad']}"
        raise FrameError(FrameReason.BAD_LENGTH, message)
    if bth["tver"]:
        raise FrameError(FrameReason.BAD_TVER, f"TVer is {bth['tver']}")
    if not bth["dest_qpn"]:
        raise FrameError(FrameReason.QP0, "destination QP is 0")
    end = udp_at + udp["length"]
    if not icrc_ok(raw[at:end]):  # R-ICRC-7
        raise FrameError(FrameReason.BAD_ICRC, "ICRC is wrong")
    ext = raw[bth_at + 12 : bth_at + info.header_bytes]
    payload_at = bth_at + info.header_bytes
    payload, pad_bytes = raw[payload_at : payload_at + payload_len], raw[payload_at + payload_len : end - 4]
    odd_pad = bth["pad"] != -payload_len & 3
    return Frame(
        opcode=info.opcode, dest_qpn=bth["dest_qpn"], psn=bth["psn"], payload=payload,
        dst_mac=raw[0:6], src_mac=raw[6:12], vlan=vlan, sport=udp["sport"], udp_checksum=udp["checksum"],
        se=bool(bth["se"]), migreq=bool(bth["migreq"]), pkey=bth["pkey"], fecn=bool(bth["fecn"]),
        becn=bool(bth["becn"]), ackreq=bool(bth["ackreq"]), resv7=bth["resv7"],
        raw_pad=bth["pad"] if odd_pad else None, raw_pad_bytes=pad_bytes if odd_pad or any(pad_bytes) else None,
        **values["frame"], **_parse_ext(info, ext),
    )  # fmt: skip


def _parse_ipv4(raw: bytes, at: int, need) -> tuple[bytes, int, dict]:
    need(at + h.IPV4.size_bytes, "IPv4 header")
    header = raw[at : at + h.IPV4.size_bytes]
    ip = h.IPV4.unpack(header)
    if ip["protocol"] != h.PROTOCOL_UDP:
        raise FrameError(FrameReason.NOT_ROCE, f"IP protocol is {ip['protocol']}")
    if ip["fragment_offset"]:  # a later fragment has no UDP header
        raise FrameError(FrameReason.NOT_ROCE, f"fragment offset is {ip['fragment_offset']}")
    fault = None
    if ip["version"] != 4 or ip["ihl"] != 5:
        fault = FrameError(FrameReason.BAD_IP_HEADER, f"IPv4 version is {ip['version']}, IHL {ip['ihl']}")
    elif ip["mf"]:
        fault = FrameError(FrameReason.FRAGMENT, "first fragment of an IPv4 datagram")
    frame = dict(
        src_ip=header[12:16], dst_ip=header[16:20], traffic_class=header[1], hop_limit=ip["ttl"], ident=ip["ident"],
        dont_fragment=bool(ip["df"]),
    )  # fmt: skip
    udp_length = ip["total_length"] - h.IPV4.size_bytes
    return header, at + h.IPV4.size_bytes, {"udp_length": udp_length, "frame": frame, "fault": fault}


def _parse_ipv6(raw: bytes, at: int, need) -> tuple[bytes, int, dict]:
    need(at + h.IPV6.size_bytes, "IPv6 header")
    header = raw[at : at + h.IPV6.size_bytes]
    ip = h.IPV6.unpack(header)
    if ip["next_header"] != h.PROTOCOL_UDP:
        raise FrameError(FrameReason.NOT_ROCE, f"IPv6 next header is {ip['next_header']}")
    fault = None
    if ip["version"] != 6:
        fault = FrameError(FrameReason.BAD_IP_HEADER, f"IPv6 version is {ip['version']}")
    frame = dict(
        src_ip=header[8:24], dst_ip=header[24:40], traffic_class=ip["dscp"] << 2 | ip["ecn"],
        hop_limit=ip["hop_limit"], flow_label=ip["flow_label"],
    )  # fmt: skip
    return header, at + h.IPV6.size_bytes, {"udp_length": ip["payload_length"], "frame": frame, "fault": fault}


def _parse_ext(info: OpcodeInfo, ext: bytes) -> dict[str, int]:
    """Extended header bytes of a known opcode to :class:`Frame` fields."""
    out: dict[str, int] = {}

    def take(layout) -> dict[str, int]:
        nonlocal ext
        values, ext = layout.unpack(ext[: layout.size_bytes]), ext[layout.size_bytes :]
        return values

    if info.has_deth:
        deth = take(h.DETH)
        out |= {"qkey": deth["qkey"], "src_qp": deth["src_qp"]}
    if info.has_reth:
        reth = take(h.RETH)
        out |= {"va": reth["va"], "rkey": reth["rkey"], "dma_length": reth["length"]}
    if info.has_atomiceth:
        out |= take(h.ATOMIC_ETH)
    if info.has_aeth:
        out |= take(h.AETH)
    if info.has_atomicack:
        out |= take(h.ATOMIC_ACK_ETH)
    if info.has_imm:
        out |= take(h.IMM_DT)
    if info.has_ieth:
        out |= {"rkey": take(h.IETH)["rkey"]}
    return out
