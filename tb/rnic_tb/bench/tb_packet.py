"""Parser and Builder at 512 bits against the frames of `rnic.wire.frame`, gaps and back-pressure on every stream."""

import random
from typing import Any

import cocotb
from cocotb.triggers import ClockCycles, RisingEdge

from rnic.abi import ADDRESS_CTX, GID_ENTRY
from rnic.config import Params, RnicConfig, named_config
from rnic.records import RxDrop, TxHeader
from rnic.rx.header import RxHeader
from rnic.wire.frame import Frame, FrameError, FrameReason, mapped_address, parse_frame
from rnic.wire.opcode import OPCODES, Opcode, OpcodeInfo, PayloadRule, Transport

from .clock import bench, start
from .streams import FrameSink, FrameSource, ItemSink, ItemSource, PackedPort, pattern

CONFIG: RnicConfig = named_config("tiny").replace(data_width=512, num_qps=32)
P = Params(CONFIG)

CAUSES = {
    FrameReason.SHORT_FRAME: RxDrop.BAD_LENGTH, FrameReason.BAD_LENGTH: RxDrop.BAD_LENGTH,
    FrameReason.BAD_IP_HEADER: RxDrop.BAD_IP, FrameReason.BAD_IP_CHECKSUM: RxDrop.BAD_IP, FrameReason.FRAGMENT: RxDrop.BAD_IP,
    FrameReason.UNKNOWN_OPCODE: RxDrop.BAD_BTH, FrameReason.BAD_TVER: RxDrop.BAD_BTH, FrameReason.QP0: RxDrop.BAD_BTH,
    FrameReason.BAD_ICRC: RxDrop.BAD_ICRC,
}  # fmt: skip


def info_of(frame: Frame) -> OpcodeInfo:
    return OPCODES[Opcode(frame.opcode)]


def draw(rng: random.Random, size: int, **change: Any) -> Frame:
    """A correct frame of any opcode with about ``size`` payload bytes."""
    info = OPCODES[rng.choice(list(Opcode))]
    address = rng.choice((4, 16))
    fields: dict[str, Any] = dict(
        opcode=info.opcode, dest_qpn=rng.randrange(1, 1 << 24), psn=rng.getrandbits(24), ident=rng.getrandbits(16),
        payload=b"" if info.payload is PayloadRule.ZERO else rng.randbytes(size), dst_mac=rng.randbytes(6),
        src_mac=rng.randbytes(6), vlan=rng.choice((None, (rng.getrandbits(3), rng.getrandbits(12)))),
        src_ip=rng.randbytes(address), dst_ip=rng.randbytes(address), traffic_class=rng.getrandbits(8),
        hop_limit=rng.getrandbits(8), flow_label=rng.getrandbits(20) if address == 16 else 0, sport=rng.getrandbits(16),
        se=bool(rng.getrandbits(1)), ackreq=bool(rng.getrandbits(1)), becn=info.transport is Transport.CNP,
        pkey=rng.getrandbits(16), va=rng.getrandbits(64), rkey=rng.getrandbits(32), dma_length=rng.getrandbits(32),
        swap=rng.getrandbits(64), compare=rng.getrandbits(64), syndrome=rng.getrandbits(8), msn=rng.getrandbits(24),
        original=rng.getrandbits(64), imm=rng.getrandbits(32), qkey=rng.getrandbits(32), src_qp=rng.getrandbits(24),
    )  # fmt: skip
    return Frame(**fields | change)


def received_fields(frame: Frame) -> dict[str, int]:
    """Fields of the `RxHeader` an accepted frame must give, those its opcode has."""
    info, number = info_of(frame), lambda raw: int.from_bytes(raw, "big")
    fields = dict(
        opcode=info.opcode.value, se=frame.se, pad=-len(frame.payload) & 3, pkey=frame.pkey, dest_qpn=frame.dest_qpn,
        ackreq=frame.ackreq, psn=frame.psn, payload_len=len(frame.payload), is_ipv6=frame.is_ipv6,
        vlan_valid=frame.vlan is not None, src_ip=number(mapped_address(frame.src_ip)),
        dst_ip=number(mapped_address(frame.dst_ip)), dst_mac=number(frame.dst_mac), ecn=frame.traffic_class & 3,
    )  # fmt: skip
    for present, more in (
        (info.has_reth, dict(va=frame.va, rkey=frame.rkey, dma_len=frame.dma_length)),
        (info.has_atomiceth, dict(va=frame.va, rkey=frame.rkey, swap=frame.swap, compare=frame.compare)),
        (info.has_aeth, dict(aeth_syndrome=frame.syndrome, aeth_msn=frame.msn)),
        (info.has_atomicack, dict(original=frame.original)),
        (info.has_imm, dict(imm=int.from_bytes(frame.imm.to_bytes(4, "big"), "little"))),
        (info.has_ieth, dict(imm=frame.rkey)),
        (info.has_deth, dict(qkey=frame.qkey, src_qp=frame.src_qp)),
    ):  # fmt: skip
        if present:
            fields |= more
    return {name: int(value) for name, value in fields.items()}


def damage(rng: random.Random, raw: bytes) -> bytes:
    """Something a wire or a foreign host may do to a frame."""
    flip = bytearray(raw)
    flip[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return rng.choice([bytes(flip), raw[: rng.randrange(1, len(raw))], rng.randbytes(rng.randrange(1, 300)),
                       raw + rng.randbytes(rng.randrange(1, 80))])  # fmt: skip


@bench(60_000)
@cocotb.parametrize(gaps=["none", "half", "bursts"], stalls=["none", "half", "bursts"])
async def parser(dut: Any, gaps: str, stalls: str) -> None:
    """Good, damaged, foreign and aborted frames: header, payload, foreign frame or drop, each as the frame model says."""
    rng = random.Random(f"{cocotb.RANDOM_SEED} parser {gaps} {stalls}")
    source = FrameSource(PackedPort(dut, "parse_i", P.data_width), dut.clk, pattern(gaps, rng))
    headers = ItemSink(PackedPort(dut, "parse_hdr"), dut.clk, pattern(stalls, rng))
    payloads = FrameSink(PackedPort(dut, "parse_payload", P.data_width), dut.clk, pattern(stalls, rng))
    # Foreign frames never stall the rest; they are dropped when nobody takes them, so here somebody does.
    foreign = FrameSink(PackedPort(dut, "parse_eth", P.data_width), dut.clk)
    drops: list[RxDrop] = []

    async def watch() -> None:
        edge = RisingEdge(dut.clk)
        while True:
            await edge
            drop = int(dut.parse_drop.value)
            if drop & 1:
                drops.append(RxDrop(drop >> 1))

    await start(dut, "parser")
    cocotb.start_soon(watch())
    wanted: dict[str, list] = {"headers": [], "payloads": [], "foreign": [], "drops": []}
    for _ in range(120):
        raw = draw(rng, rng.choice((rng.randrange(4), rng.randrange(300), 1024, 4096))).pack()
        if rng.random() < 0.3:
            raw = damage(rng, raw)
        raw = raw.ljust(60, b"\0") if rng.random() < 0.7 else raw
        aborted = rng.random() < 0.1
        source.send(raw, aborted)
        try:
            frame = parse_frame(raw)
        except FrameError as error:
            if aborted:
                wanted["drops"].append(RxDrop.MAC_ERROR)
            elif error.reason is FrameReason.NOT_ROCE:
                wanted["foreign"].append((raw, False))
            else:
                wanted["drops"].append(CAUSES[error.reason])
            continue
        if aborted:
            wanted["drops"].append(RxDrop.MAC_ERROR)
            continue
        wanted["headers"].append(received_fields(frame))
        if frame.payload:
            wanted["payloads"].append(frame.payload)
    while not source.idle:
        await ClockCycles(dut.clk, 100)
    for fields in wanted["headers"]:
        got = RxHeader.from_bits(await headers.receive())
        assert {name: int(getattr(got, name)) for name in fields} == fields
    await ClockCycles(dut.clk, 200)
    assert not headers.received
    assert [data for data, refused in payloads.received if not refused] == wanted["payloads"]
    assert list(foreign.received) == wanted["foreign"]
    assert drops == wanted["drops"]
    assert len(wanted["headers"]) > 50 and len(set(drops)) >= 3


def header_of(frame: Frame, qpn: int) -> int:
    """The `TxHeader` that asks for ``frame``."""
    info = info_of(frame)
    fields = dict(
        qpn=qpn, opcode=info.opcode.value, psn=frame.psn, solicited=frame.se, ackreq=frame.ackreq, length=len(frame.payload),
        va=frame.va, rkey=frame.rkey, dma_length=frame.dma_length, swap=frame.original if info.has_atomicack else frame.swap,
        compare=frame.compare, syndrome=frame.syndrome, msn=frame.msn,
        imm=int.from_bytes(frame.imm.to_bytes(4, "big"), "little") if info.has_imm else frame.rkey,
    )  # fmt: skip
    if info.has_deth:
        fields |= dict(va=frame.dest_qpn, rkey=frame.qkey)  # UD: the destination travels with the packet
    return TxHeader(P).const({name: int(value) for name, value in fields.items()}).as_value().value


def context_of(frame: Frame, source: int) -> int:
    """The address context of the QP that sends ``frame``."""
    vlan = frame.vlan or (0, 0)
    return ADDRESS_CTX.pack_int(
        pkey_index=source, sgid_index=source, dest_qpn=0 if info_of(frame).has_deth else frame.dest_qpn,
        dmac=int.from_bytes(frame.dst_mac, "little"), sport=frame.sport, hop_limit=frame.hop_limit,
        traffic_class=frame.traffic_class, flow_label=frame.flow_label, ipv6=int(frame.is_ipv6),
        dip=int.from_bytes(mapped_address(frame.dst_ip), "little"), vlan=int(frame.vlan is not None),
        vlan_tci=vlan[0] << 13 | vlan[1],
    )  # fmt: skip


@bench(60_000)
@cocotb.parametrize(gaps=["none", "half", "bursts"], stalls=["none", "half", "bursts"])
async def builder(dut: Any, gaps: str, stalls: str) -> None:
    """Frames of every kind from 30 QPs with contexts of their own: bytes as the frame model packs them."""
    rng = random.Random(f"{cocotb.RANDOM_SEED} builder {gaps} {stalls}")
    headers = ItemSource(PackedPort(dut, "build_header"), dut.clk, pattern(gaps, rng))
    payloads = FrameSource(PackedPort(dut, "build_payload", P.data_width), dut.clk, pattern(gaps, rng))
    out = FrameSink(PackedPort(dut, "build_frame", P.data_width), dut.clk, pattern(stalls, rng))
    dut.context_write.value = 0
    await start(dut, "builder")

    sources = [(rng.randbytes(6), rng.randbytes(size), rng.getrandbits(16)) for size in rng.sample((4, 16), 2)]
    for n, (mac, ip, pkey) in enumerate(sources):
        entry = dict(ip=int.from_bytes(mapped_address(ip), "little"), mac=int.from_bytes(mac, "little"), valid=1)
        getattr(dut, f"gid_{n}").value = GID_ENTRY.pack_int(**entry)
        getattr(dut, f"pkey_{n}").value = pkey
    frames: dict[int, Frame] = {}  # QPN to a frame with its addresses
    for qpn in range(2, P.num_qps):
        mac, ip, pkey = sources[qpn % 2]
        frames[qpn] = draw(rng, 0, src_mac=mac, src_ip=ip, dst_ip=rng.randbytes(len(ip)), pkey=pkey,
                           flow_label=rng.getrandbits(20) if len(ip) == 16 else 0)  # fmt: skip
        dut.context_qpn.value, dut.context_value.value = qpn, context_of(frames[qpn], qpn % 2)
        dut.context_write.value = 1
        await ClockCycles(dut.clk, 1)
    dut.context_write.value = 0
    await ClockCycles(dut.clk, 2)

    wanted = []
    for _ in range(120):
        qpn = rng.randrange(2, P.num_qps)
        addresses = ("dst_mac", "src_mac", "vlan", "src_ip", "dst_ip", "traffic_class", "hop_limit", "flow_label", "sport",
                     "pkey")  # fmt: skip
        frame = draw(rng, rng.choice((rng.randrange(5), rng.randrange(300), 1024, 4096)),
                     **{name: getattr(frames[qpn], name) for name in addresses})  # fmt: skip
        deth = info_of(frame).has_deth
        if deth == info_of(frames[qpn]).has_deth and not deth:
            frame.dest_qpn = frames[qpn].dest_qpn
        elif not deth:
            continue  # a UD QP sends UD packets only
        frame.src_qp, frame.qkey = (qpn, frame.qkey) if deth else (0, 0)
        headers.send(header_of(frame, qpn))
        if frame.payload:
            payloads.send(frame.payload)
        wanted.append(frame)
    assert len(wanted) > 60
    for frame in wanted:
        raw, err = await out.receive()
        # The identification of IPv4 is the builder's own count (R-FRM-4: any value).
        at = 14 + 4 * (frame.vlan is not None) + 4
        frame.ident = 0 if frame.is_ipv6 else int.from_bytes(raw[at : at + 2], "big")
        assert not err and raw == frame.pack(), f"{frame}: {raw.hex()}"
    await ClockCycles(dut.clk, 100)
    assert not out.received
