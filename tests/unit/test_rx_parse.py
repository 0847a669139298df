"""The receive parser against the frame model in plain Python: correct, damaged, truncated, foreign frames."""

import random
import re
from pathlib import Path

import pytest

from rnic.records import RxDrop
from rnic.rx.parse import Parser
from rnic.wire.frame import Frame, ipv4_checksum, parse_frame
from rnic.wire.opcode import OPCODES, Opcode, PayloadRule
from tests.rules import rule
from tests.unit.rx_frames import check, random_frame, run

TEXT = (Path(__file__).parent.parent / "data" / "vectors.txt").read_text()
VECTORS = {name: bytes.fromhex(raw) for name, raw in re.findall(r"^## (\w+) .*\nlen.*\n([0-9a-f]+)$", TEXT, re.M)}
WIDTHS = (64, 128, 256, 512)


def padded(raw: bytes) -> bytes:
    """As a MAC delivers it: at least 60 bytes."""
    return raw.ljust(60, b"\0")


@pytest.mark.parametrize("width", WIDTHS)
@rule("R-ICRC-1", "R-ICRC-3", "R-ICRC-8", "R-FRM-1", "R-FRM-6", "R-ICRC-2", "R-ICRC-6")
def test_vectors(width):
    frames = [padded(raw) for raw in VECTORS.values()]
    seen = run(width, frames)
    assert check(seen, frames) == len(VECTORS) - 2
    assert [raw for raw, _ in seen.eth] == [VECTORS["V3"], VECTORS["V4"]]  # RoCEv1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("stall", (0.0, 0.4), ids=("smooth", "stalls"))
@rule("R-FRM-1", "R-FRM-2", "R-FRM-3", "R-FRM-7", "R-HDR-1", "R-PAD-3", "R-ADR-1", "R-CQ-4", "R-OPC-3", "R-PAD-1", "R-ADR-4")
def test_every_opcode_with_any_size_and_trailer(width, stall):
    rng = random.Random(width)
    frames = [random_frame(rng, opcode) for opcode in Opcode]
    frames += [random_frame(rng, opcode, size) for size in (0, 1, 2, 3, 4, 5) for opcode in (Opcode.RC_WRITE_ONLY_IMM,)]
    rng.shuffle(frames)
    raw = [padded(f.pack()) + rng.randbytes(rng.choice((0, 0, 1, 3, 29, 64, 100))) for f in frames]
    assert check(run(width, raw, stall_in=stall, stall_out=stall), raw) == len(frames)


@pytest.mark.parametrize("width", (64, 512))
@rule("R-FRM-1", "R-PAD-1", "R-PAD-3")
def test_every_payload_alignment(width):
    """All variants of headers, all payload ends within a bus word, back to back, no padding."""
    rng = random.Random(5)
    lanes = width // 8
    frames = []
    for opcode in (Opcode.RC_SEND_MIDDLE, Opcode.RC_WRITE_ONLY):
        for change in (dict(vlan=None), dict(vlan=(0, 7))):
            for size in range(0, lanes + 5, 1 if width == 64 else 3):
                address = rng.randbytes(rng.choice((4, 16)))
                frames.append(random_frame(rng, opcode, size, src_ip=address, dst_ip=address, **change).pack())
    assert check(run(width, frames), frames) == len(frames)


@pytest.mark.parametrize("width", (64, 512))
@rule("R-MTU-1", "R-MTU-2")
def test_path_mtu_sizes_and_one_more(width):
    rng = random.Random(6)
    frames = [random_frame(rng, Opcode.RC_WRITE_ONLY_IMM, size).pack() for size in (256, 1024, 4096, 4097, 4100, 9000)]
    seen = run(width, frames)
    assert check(seen, frames) == 3
    assert seen.drops == [RxDrop.BAD_LENGTH] * 3


def flipped(raw: bytes, bit: int) -> bytes:
    out = bytearray(raw)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


FLIPS = {
    64: (dict(src_ip=bytes(16), dst_ip=bytes(16)), 5), 128: (dict(vlan=(1, 2)), 11), 256: (dict(), 7),
    512: (dict(src_ip=bytes(16), dst_ip=bytes(16), vlan=(1, 2)), 1),
}  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@rule("R-ICRC-3", "R-ICRC-4", "R-ICRC-7", "R-FRM-5", "R-ICRC-1", "R-ICRC-2", "R-ICRC-6")
def test_no_flipped_bit_is_accepted_outside_the_masked_fields(width):
    change, step = FLIPS[width]
    frame = Frame(Opcode.RC_SEND_ONLY, dest_qpn=5, payload=b"abcde", **change)
    raw = frame.pack()
    bits = range(0, 8 * len(raw), step)
    frames = [flipped(raw, bit) for bit in bits]
    ip = 14 if frame.vlan is None else 18
    udp = ip + (40 if frame.is_ipv6 else 20)
    masked = {*range(12), *range(14, ip), udp + 6, udp + 7, udp + 12}  # MACs, VLAN tag, UDP checksum, FECN byte
    if frame.vlan:
        masked -= {16, 17}  # the ethertype behind the tag
    expected = sum(bit // 8 in masked for bit in bits)
    if frame.is_ipv6:  # traffic class, flow label, hop limit
        expected += sum(4 + 8 * ip > bit >= 8 * ip or bit // 8 in (ip + 1, ip + 2, ip + 3, ip + 7) for bit in bits)
    assert check(run(width, frames), frames) == expected > 0


@pytest.mark.parametrize("width", WIDTHS)
@rule("R-FRM-1", "R-FRM-3")
def test_truncated_at_every_byte(width):
    """Every FSM finds its way out: a good frame behind each damaged one must pass."""
    rng = random.Random(8)
    whole = [random_frame(rng, Opcode.RC_WRITE_ONLY, size=40) for _ in range(4)]
    good = Frame(Opcode.RC_ACK, dest_qpn=3).pack()
    frames = []
    for cut in range(1, len(whole[0].pack())):
        frames += [whole[cut % 4].pack()[:cut]] + [good] * (cut % 3 == 0)
    assert check(run(width, frames, stall_out=0.1), frames) >= len(frames) // 5


@pytest.mark.parametrize("width", (64, 512))
def test_aborted_by_the_mac_at_any_point(width):
    rng = random.Random(9)
    frames = [random_frame(rng, size=rng.randrange(80)).pack() for _ in range(40)]
    frames = [raw if rng.random() < 0.4 else raw[: rng.randrange(1, len(raw))] for raw in frames]
    frames += [rng.randbytes(n) for n in (1, 8, 60, 64, 65)]
    errors = {n for n in range(len(frames)) if n % 3 != 1}
    seen = run(width, frames, errors=errors, stall_in=0.1, stall_out=0.1)
    check(seen, frames, errors)
    assert seen.drops.count(RxDrop.MAC_ERROR) == len(errors)


BASE = dict(opcode=Opcode.RC_SEND_ONLY, dest_qpn=1, payload=b"1234")
FAULTS = [
    dict(raw_ip_checksum=1), dict(raw_udp_length=27), dict(raw_udp_length=65535), dict(raw_ip_length=40, raw_udp_length=20),
    dict(raw_ip_length=2000, raw_udp_length=1980), dict(raw_ip_length=1, raw_udp_length=65517), dict(raw_ip_length=0),
    dict(raw_ip_length=65535, raw_udp_length=65515), dict(raw_ip_length=28, raw_udp_length=8), dict(opcode=0x15),
    dict(opcode=0x1C), dict(opcode=0xFF), dict(opcode=Opcode.RC_CMP_SWAP, raw_ext=bytes(20), payload=b""),
    dict(payload=b"", raw_pad=1), dict(payload=b"", raw_pad=3), dict(raw_pad_bytes=b"x"), dict(tver=1), dict(tver=8),
    dict(dest_qpn=0), dict(raw_icrc=bytes(4)), dict(tver=1, raw_icrc=bytes(4)), dict(dport=4792), dict(raw_pad=3),
]  # fmt: skip


def ip_faults() -> list[bytes]:
    """IPv4 headers wrong in one byte, the checksum right: version, IHL, MF, offset, protocol."""
    out = []
    changes = [(None, 0, 0x46), ((0, 1), 0, 0x44), (None, 0, 0x65), (None, 6, 0x60), (None, 6, 0x20), (None, 6, 0x80)]
    changes += [(None, 7, 1), ((0, 1), 6, 0x1F), (None, 9, 6)]
    for vlan, at, value in changes:
        raw = bytearray(Frame(**BASE, vlan=vlan).pack())
        ip = 14 if vlan is None else 18
        raw[ip + at] = value
        raw[ip + 10 : ip + 12] = bytes(2)
        raw[ip + 10 : ip + 12] = ipv4_checksum(bytes(raw[ip : ip + 20])).to_bytes(2, "big")
        out.append(bytes(raw))
    return out


@pytest.mark.parametrize("width", WIDTHS)
@rule("R-FRM-3", "R-FRM-4", "R-FRM-5", "R-FRM-6", "R-LEN-4", "R-ICRC-7", "R-PAD-1", "R-MTU-1", "R-FRM-1")
def test_faults(width):
    v6 = dict(src_ip=bytes(16), dst_ip=bytes(range(16)))
    frames = [padded(Frame(**BASE | change).pack()) for change in FAULTS]
    frames += [padded(Frame(**BASE | change | v6 | dict(vlan=(1, 1))).pack()) for change in FAULTS]
    frames += ip_faults()
    good = Frame(**BASE).pack()
    frames = [raw for fault in frames for raw in (fault, good)]
    seen = run(width, frames)
    accepted = check(seen, frames)
    assert accepted >= len(frames) // 2 and {RxDrop.BAD_IP, RxDrop.BAD_LENGTH, RxDrop.BAD_BTH, RxDrop.BAD_ICRC} <= set(seen.drops)


@pytest.mark.parametrize("width", (64, 512))
def test_foreign_frames_pass_unchanged(width):
    rng = random.Random(11)
    arp = bytes(12) + b"\x08\x06" + rng.randbytes(46)
    tcp = bytearray(Frame(**BASE).pack())
    tcp[23] = 6
    other_port = Frame(**BASE | dict(dport=53, payload=rng.randbytes(200))).pack()
    double_tag = bytes(12) + b"\x81\x00\x00\x01\x81\x00\x00\x02\x08\x00" + rng.randbytes(50)
    jumbo = rng.randbytes(12) + b"\x88\xb5" + rng.randbytes(2000)
    frames = [arp, bytes(tcp), Frame(**BASE).pack(), other_port, double_tag, jumbo, b"\x01", rng.randbytes(13), rng.randbytes(64)]
    seen = run(width, frames, stall_in=0.1, stall_out=0.2)
    assert check(seen, frames) == 1 and len(seen.eth) == len(frames) - 1


def test_giant_frames_are_dropped_and_leave_nothing_behind():
    rng = random.Random(12)
    foreign = bytes(12) + b"\x88\xb5" + rng.randbytes(16000)  # larger than the FIFO for eth
    roce = random_frame(rng, Opcode.RC_SEND_ONLY, 16000).pack()
    trailer = Frame(**BASE).pack() + rng.randbytes(16000)
    frames = [foreign, roce, trailer, Frame(**BASE).pack(), bytes(60)]
    seen = run(512, frames, dut=Parser(512, eth_frame_bytes=4096))
    assert seen.drops == [RxDrop.ETH_OVERFLOW, RxDrop.BAD_LENGTH]
    assert len(seen.headers) == 2 and seen.eth == [(bytes(60), 0)]
    assert seen.payloads[-2:] == [(b"1234", 0)] * 2


@pytest.mark.parametrize("width", (64, 512))
def test_eth_that_is_not_read_never_blocks(width):
    rng = random.Random(13)
    dut = Parser(width, eth_frame_bytes=128)
    foreign = [bytes(12) + b"\x88\xb5" + rng.randbytes(86) for _ in range(8)]
    frames = [raw for one in foreign for raw in (one, Frame(**BASE).pack())]
    seen = run(width, frames, eth_ready=False, dut=dut)
    assert len(seen.headers) == 8 and seen.stalls <= 1
    fit = dut.eth_depth // -(-100 // (width // 8))  # one frame leaves the FIFO for the registers behind it
    assert 8 - fit - 1 <= len(seen.drops) <= 8 - fit and set(seen.drops) == {RxDrop.ETH_OVERFLOW}


@pytest.mark.parametrize("width", WIDTHS)
def test_full_rate_and_latency(width):
    """Design budget: a beat per cycle, a one-beat frame every two cycles forever (here every cycle); verdict in 6 or 8."""
    frames = [Frame(Opcode.RC_ACK, dest_qpn=n + 1).pack() for n in range(30)]
    frames += [Frame(Opcode.RC_SEND_ONLY, dest_qpn=1, payload=bytes([n, 1])).pack() for n in range(30)]
    frames += [Frame(Opcode.RC_SEND_MIDDLE, dest_qpn=1, payload=bytes(256)).pack() for n in range(10)]
    assert len(frames[0]) <= 64 and len(frames[30]) <= 64
    seen = run(width, frames)
    assert check(seen, frames) == len(frames)
    assert seen.stalls <= 1  # the first cycle after reset
    latencies = {out - last for out, last in zip(seen.header_cycles, seen.last_cycles, strict=True)}
    print("latency", latencies)
    assert max(latencies) <= (6 if width >= 256 else 7)


@pytest.mark.parametrize("width", (64, 512))
@pytest.mark.parametrize("port", ("hdr", "payload"))
def test_a_consumer_that_stops_stops_the_parser_and_loses_nothing(width, port):
    rng = random.Random(14)
    frames = [random_frame(rng, Opcode.RC_SEND_ONLY, size=rng.randrange(1, 90)).pack() for _ in range(40)]
    seen = run(width, frames, hold={port: (20, 260)})
    assert check(seen, frames) == len(frames) and seen.stalls > 50


@pytest.mark.parametrize("width, seed", [(64, 1), (64, 2), (128, 3), (256, 4), (512, 5), (512, 6)])
def test_random_mix(width, seed):
    """Correct, damaged, truncated, aborted and foreign frames in any order with stalls on every stream."""
    rng = random.Random(seed)
    frames, errors = [], set()
    for n in range(60):
        raw = random_frame(rng, size=rng.choice((0, 3, 16, 64, rng.randrange(200)))).pack()
        match rng.randrange(8):
            case 0:
                raw = raw[: rng.randrange(1, len(raw))]
            case 1:
                raw = flipped(raw, rng.randrange(8 * len(raw)))
            case 2:
                errors.add(n)
            case 3:
                raw = rng.randbytes(rng.randrange(1, 120))
            case 4:
                raw += rng.randbytes(rng.randrange(80))
        frames.append(raw)
    seen = run(width, frames, errors=errors, stall_in=rng.choice((0, 0.3)), stall_out=rng.choice((0.1, 0.5)), seed=seed)
    assert check(seen, frames, errors) > 10


def test_the_oracle_knows_all_payload_rules():
    assert {OPCODES[o].payload for o in Opcode} == set(PayloadRule)
    assert parse_frame(Frame(**BASE).pack()).payload == b"1234"
