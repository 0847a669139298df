"""ICRC and whole frames against the public and own vectors, scapy, and damage of every bit."""

import random
import re
from pathlib import Path

import pytest
from scapy.contrib.roce import BTH as ScapyBth
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Dot1Q, Ether
from scapy.packet import Raw

from rnic.wire import headers as h
from rnic.wire.frame import Frame, FrameError, FrameReason, ipv4_checksum, mapped_address, parse_frame
from rnic.wire.icrc import icrc, icrc_bytes, icrc_ok, masked_datagram
from rnic.wire.opcode import OPCODES, Opcode, PayloadRule
from tests.rules import rule

TEXT = (Path(__file__).parent.parent / "data" / "vectors.txt").read_text()
VECTORS = {
    name: (bytes.fromhex(raw), bytes.fromhex(wire))
    for name, wire, raw in re.findall(r"^## (\w+) .*\nlen=\d+ icrc_wire=(\w+)\n([0-9a-f]+)$", TEXT, re.M)
}
ROCEV1 = ("V3", "V4")


@pytest.mark.parametrize("name", VECTORS)
@rule("R-ICRC-1", "R-ICRC-2", "R-ICRC-3", "R-ICRC-4", "R-ICRC-5", "R-ICRC-9", "R-FRM-2")
def test_vector(name):
    raw, wire = VECTORS[name]
    assert icrc_bytes(raw[14:-4]) == wire == raw[-4:] and icrc_ok(raw[14:])
    if name in ROCEV1:
        with pytest.raises(FrameError) as caught:
            parse_frame(raw)
        assert caught.value.reason is FrameReason.NOT_ROCE
    else:
        assert parse_frame(raw).pack() == raw
        assert parse_frame(raw + b"\xa5" * 29).pack() == raw  # R-FRM-1


def test_there_are_34_vectors():
    assert len(VECTORS) == 34


@rule("R-ICRC-6")
def test_register_constants():
    def register(data, crc=0xFFFFFFFF):
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        return crc

    raw, _ = VECTORS["V1"]
    assert register(b"\xff" * 8) == 0xDEBB20E3
    assert register(masked_datagram(raw[14:-4]), 0xDEBB20E3) ^ 0xFFFFFFFF == icrc(raw[14:-4]) == 0xF353F378
    assert register(masked_datagram(raw[14:-4]) + raw[-4:], 0xDEBB20E3) == 0xDEBB20E3


def random_frame(rng: random.Random, opcode: Opcode) -> Frame:
    size = 16 if rng.random() < 0.5 else 4
    payload = b"" if OPCODES[opcode].payload is PayloadRule.ZERO else rng.randbytes(rng.randrange(1, 70))
    return Frame(
        opcode, dest_qpn=rng.randrange(1, 1 << 24), psn=rng.getrandbits(24), payload=payload,
        vlan=(rng.randrange(8), rng.randrange(4096)) if rng.random() < 0.3 else None,
        src_ip=rng.randbytes(size), dst_ip=rng.randbytes(size), traffic_class=rng.randrange(256),
        hop_limit=rng.randrange(256), flow_label=rng.getrandbits(20) if size == 16 else 0,
        ident=rng.getrandbits(16) if size == 4 else 0, sport=rng.getrandbits(16), se=rng.random() < 0.5,
        migreq=rng.random() < 0.5, fecn=rng.random() < 0.5, becn=rng.random() < 0.5, ackreq=rng.random() < 0.5,
        resv7=rng.randrange(128), pkey=rng.getrandbits(16), va=rng.getrandbits(64), rkey=rng.getrandbits(32),
        dma_length=rng.getrandbits(32), swap=rng.getrandbits(64), compare=rng.getrandbits(64),
        syndrome=rng.getrandbits(8), msn=rng.getrandbits(24), original=rng.getrandbits(64), imm=rng.getrandbits(32),
        qkey=rng.getrandbits(32), src_qp=rng.getrandbits(24),
    )  # fmt: skip


@pytest.mark.parametrize("opcode", Opcode, ids=lambda o: o.name)
def test_same_bytes_as_scapy(opcode):
    rng = random.Random(opcode.value)
    for _ in range(4):
        frame = random_frame(rng, opcode)
        mac = ":".join
        eth = Ether(dst=mac(f"{b:02x}" for b in frame.dst_mac), src=mac(f"{b:02x}" for b in frame.src_mac))
        if frame.vlan:
            eth /= Dot1Q(prio=frame.vlan[0], vlan=frame.vlan[1])
        if frame.is_ipv6:
            eth /= IPv6(fl=frame.flow_label, tc=frame.traffic_class, hlim=frame.hop_limit)
            eth[IPv6].src = ":".join(frame.src_ip[i : i + 2].hex() for i in range(0, 16, 2))
            eth[IPv6].dst = ":".join(frame.dst_ip[i : i + 2].hex() for i in range(0, 16, 2))
        else:
            eth /= IP(tos=frame.traffic_class, ttl=frame.hop_limit, id=frame.ident, flags="DF")
            eth[IP].src, eth[IP].dst = (".".join(str(b) for b in ip) for ip in (frame.src_ip, frame.dst_ip))
        body = frame.transport()
        bth = ScapyBth(
            opcode=opcode.value, solicited=frame.se, migreq=frame.migreq, padcount=-len(frame.payload) & 3,
            pkey=frame.pkey, fecn=frame.fecn, becn=frame.becn, dqpn=frame.dest_qpn, ackreq=frame.ackreq,
            resv7=frame.resv7, psn=frame.psn,
        )  # fmt: skip
        eth /= UDP(sport=frame.sport, dport=4791, chksum=0) / bth / Raw(body[12:])
        raw = frame.pack()
        assert raw == bytes(eth)
        again = parse_frame(raw)
        assert again.pack() == raw and again.payload == frame.payload
        info = OPCODES[opcode]
        names = ["va", "rkey"] * (info.has_reth or info.has_atomiceth) + ["imm"] * info.has_imm
        names += ["qkey", "src_qp"] * info.has_deth + ["rkey"] * info.has_ieth + ["msn", "syndrome"] * info.has_aeth
        names += ["original"] * info.has_atomicack
        assert [getattr(again, n) for n in names] == [getattr(frame, n) for n in names]


@rule("R-ICRC-3", "R-ICRC-4", "R-ICRC-7", "R-FRM-5", "R-FRM-7")
def test_every_bit_outside_the_masked_fields_is_protected():
    frame = Frame(Opcode.RC_SEND_ONLY, dest_qpn=5, payload=b"abcde", vlan=(1, 2))
    raw = frame.pack()
    ip = 18
    unprotected = {*range(12), 14, 15, ip + 26, ip + 27, ip + 28 + 4}  # MACs, VLAN tag, UDP checksum, FECN byte
    passed = set()
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            parse_frame(bytes(damaged))
            passed.add(bit // 8)
        except FrameError:
            pass
    assert passed == unprotected


BASE = dict(opcode=Opcode.RC_SEND_ONLY, dest_qpn=1, payload=b"1234")
FAULTS = [
    (dict(dport=4792), FrameReason.NOT_ROCE), (dict(raw_ip_checksum=1), FrameReason.BAD_IP_CHECKSUM),
    (dict(raw_udp_length=27), FrameReason.BAD_LENGTH),
    (dict(raw_ip_length=40, raw_udp_length=20), FrameReason.BAD_LENGTH),
    (dict(raw_ip_length=2000, raw_udp_length=1980), FrameReason.SHORT_FRAME),
    (dict(opcode=0x15), FrameReason.UNKNOWN_OPCODE),
    (dict(opcode=Opcode.RC_CMP_SWAP, raw_ext=bytes(20), payload=b""), FrameReason.BAD_LENGTH),
    (dict(payload=b"", raw_pad=1), FrameReason.BAD_LENGTH), (dict(raw_pad_bytes=b"x"), FrameReason.BAD_LENGTH),
    (dict(tver=1), FrameReason.BAD_TVER), (dict(dest_qpn=0), FrameReason.QP0),
    (dict(raw_icrc=bytes(4)), FrameReason.BAD_ICRC),
]  # fmt: skip


@pytest.mark.parametrize("change, reason", FAULTS, ids=[f"{r.name}-{n}" for n, (_, r) in enumerate(FAULTS)])
@rule("R-FRM-3", "R-FRM-5", "R-FRM-6", "R-LEN-4", "R-PAD-1")
def test_fault_has_its_reason(change, reason):
    with pytest.raises(FrameError) as caught:
        parse_frame(Frame(**BASE | change).pack())
    assert caught.value.reason is reason


@rule("R-FRM-4")
def test_ipv4_header_faults():
    raw = Frame(**BASE).pack()

    def with_header(at, value):
        out = bytearray(raw)
        out[14 + at] = value
        out[24:26] = bytes(2)
        out[24:26] = ipv4_checksum(bytes(out[14:34])).to_bytes(2, "big")
        return bytes(out)

    cases = {
        (0, 0x46): FrameReason.BAD_IP_HEADER, (0, 0x55): FrameReason.BAD_IP_HEADER, (6, 0x60): FrameReason.FRAGMENT,
        (7, 1): FrameReason.NOT_ROCE, (9, 6): FrameReason.NOT_ROCE,
    }  # fmt: skip
    for (at, value), reason in cases.items():
        with pytest.raises(FrameError) as caught:
            parse_frame(with_header(at, value))
        assert caught.value.reason is reason
    for size in range(42):
        with pytest.raises(FrameError, match="NOT_ROCE"):
            parse_frame(raw[:size])
    for size in range(42, len(raw)):
        with pytest.raises(FrameError, match="SHORT_FRAME"):
            parse_frame(raw[:size])


def test_pack_errors_and_addresses():
    with pytest.raises(ValueError, match="MAC"):
        Frame(**BASE, dst_mac=b"").pack()
    with pytest.raises(ValueError, match="IP addresses are 4 and 16"):
        Frame(**BASE, dst_ip=bytes(16)).pack()
    assert mapped_address(bytes([1, 2, 3, 4])).hex() == "00000000000000000000ffff01020304"  # R-ADR-1
    assert mapped_address(bytes(16)) == bytes(16)
    assert h.MIN_ETHERNET_BYTES == 60
    with pytest.raises(ValueError, match="version is 0"):
        masked_datagram(b"")
    with pytest.raises(ValueError, match="IHL is 6"):
        masked_datagram(b"\x46" * 60)
    with pytest.raises(ValueError, match="reach the end of the BTH"):
        masked_datagram(b"\x45" * 39)
