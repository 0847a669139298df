"""Frame builder against the Python frames, scapy and the published vectors; timing in cycles."""

import pathlib
import re

import pytest
from amaranth import *
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out
from scapy.layers.inet import IP
from scapy.layers.l2 import Ether

from rnic.abi import ADDRESS_CTX, GID_ENTRY
from rnic.config import CONFIGS, Params
from rnic.records import ProbeEvent, TxHeader
from rnic.stream.beat import Beat
from rnic.tx.build import Builder
from rnic.tx.icrc import BodyBeat, IcrcInsert
from rnic.wire.frame import Frame, mapped_address, parse_frame
from rnic.wire.opcode import OPCODES, Opcode, Transport
from tests.rules import rule
from tests.unit.streams import beats_of, packet_of, recv_packet, seeded, send, simulate

VECTORS = pathlib.Path(__file__).parents[1] / "data" / "vectors.txt"


def params(width, **changes):
    return Params(CONFIGS["tiny"].replace(data_width=width, num_qps=64, **changes))


def vectors():
    """Name to frame bytes of tests/data/vectors.txt."""
    found = {}
    for line in VECTORS.read_text().splitlines():
        if line.startswith("## "):
            name = line.split()[1]
        elif re.fullmatch("[0-9a-f]{40,}", line):
            found[name] = bytes.fromhex(line)
    return found


class Fixture(wiring.Component):
    """A builder with its tables as constants: address contexts (dicts by QPN), GID entries, P_Keys."""

    def __init__(self, p, contexts, gids, pkeys):
        self.p = p
        self.restart = Signal()
        self.contexts = [ADDRESS_CTX.pack_int(**contexts.get(qpn, {})) for qpn in range(p.num_qps)]
        self.gids = [GID_ENTRY.pack_int(**gid) for gid in gids]
        self.pkeys = pkeys
        self.builder = Builder(p)
        super().__init__({
            "header": In(self.builder.header.signature.flip()), "payload": In(self.builder.payload.signature.flip()),
            "frame": Out(self.builder.frame.signature), "probe": Out(self.builder.probe.shape()),
        })  # fmt: skip

    def elaborate(self, platform):
        m = Module()
        builder = self.builder
        m.submodules.builder = ResetInserter(self.restart)(builder)
        m.submodules.contexts = contexts = memory.Memory(shape=8 * ADDRESS_CTX.size, depth=self.p.num_qps,
                                                         init=self.contexts)
        port = contexts.read_port()
        wiring.connect(m, wiring.flipped(self.header), builder.header)
        wiring.connect(m, wiring.flipped(self.payload), builder.payload)
        wiring.connect(m, builder.frame, wiring.flipped(self.frame))
        m.d.comb += [
            port.addr.eq(builder.addr_index),
            builder.gid.eq(Array(Const(gid, 8 * GID_ENTRY.size) for gid in self.gids)[builder.gid_index]),
            builder.pkey.eq(Array(Const(pkey, 16) for pkey in self.pkeys)[builder.pkey_index]),
            self.probe.eq(builder.probe),
        ]
        found = port.data  # as late as the address table may be
        for i in range(self.p.address_cycles - 1):
            late = Signal(8 * ADDRESS_CTX.size, name=f"late_{i}")
            m.d.sync += late.eq(found)
            found = late
        m.d.comb += builder.addr.as_value().eq(found)
        return m


def case(frame, qpn, ctx_pkey=0, sgid=0):
    """TxHeader fields, address context and GID entry that must give ``frame``."""
    info = OPCODES[Opcode(frame.opcode)]
    header = {
        "qpn": qpn, "opcode": info.opcode.value, "psn": frame.psn, "solicited": int(frame.se), "ackreq": int(frame.ackreq),
        "length": len(frame.payload), "va": frame.va, "rkey": frame.rkey, "dma_length": frame.dma_length,
        "swap": frame.original if info.has_atomicack else frame.swap, "compare": frame.compare,
        "imm": int.from_bytes(frame.imm.to_bytes(4, "big"), "little") if info.has_imm else frame.rkey,
        "syndrome": frame.syndrome, "msn": frame.msn,
    }  # fmt: skip
    ctx = {
        "pkey_index": ctx_pkey, "sgid_index": sgid, "dest_qpn": frame.dest_qpn,
        "dmac": int.from_bytes(frame.dst_mac, "little"), "sport": frame.sport, "hop_limit": frame.hop_limit,
        "traffic_class": frame.traffic_class, "flow_label": frame.flow_label, "ipv6": int(frame.is_ipv6),
        "dip": int.from_bytes(mapped_address(frame.dst_ip), "little"),
    }  # fmt: skip
    if frame.vlan is not None:
        pcp, vid = frame.vlan
        ctx |= {"vlan": 1, "vlan_tci": pcp << 13 | vid}
    if info.has_deth:
        assert frame.src_qp == qpn
        header |= {"va": frame.dest_qpn, "rkey": frame.qkey}
        ctx["dest_qpn"] = 0
    gid = {"ip": int.from_bytes(mapped_address(frame.src_ip), "little"), "mac": int.from_bytes(frame.src_mac, "little"),
           "valid": 1}  # fmt: skip
    return header, ctx, gid


def run(p, frames, rng=None, p_stall=0.0, errors=frozenset(), limit=6000):
    """Build ``frames`` (list of Frame, identification as the builder counts it) one after the other; returns the frames
    (bytes, err) and the cycle numbers of all output beats."""
    gids, contexts, headers = [], {}, []
    for at, frame in enumerate(frames):
        qpn = frame.src_qp if OPCODES[Opcode(frame.opcode)].has_deth else 2 + at % 30
        sgid = at % 2
        header, ctx, gid = case(frame, qpn, at % 2, sgid)
        headers.append(header)
        assert contexts.setdefault(qpn, ctx) == ctx, "the test's frames clash on a QP"
        if len(gids) <= sgid:
            gids.append(gid)
        assert gids[sgid] == gid, "the test's frames clash on a GID"
    pkeys = [frames[0].pkey, frames[1 % len(frames)].pkey]
    dut = Fixture(p, contexts, gids * 2, pkeys)
    got, cycles, probes = [], [], []

    async def feed(ctx):
        await send(ctx, dut.header, headers, rng, p_stall)

    async def feed_payload(ctx):
        for at, frame in enumerate(frames):
            if frame.payload:
                await send(ctx, dut.payload, beats_of(frame.payload, p.data_width, int(at in errors)), rng, p_stall)

    async def drain(ctx):
        for _ in frames:
            got.append(await recv_packet(ctx, dut.frame, rng, p_stall))

    async def watch(ctx):
        cycle = 0
        while len(got) < len(frames):
            _, _, valid, ready, probe = await ctx.tick().sample(dut.frame.valid, dut.frame.ready, dut.probe)
            if valid and ready:
                cycles.append(cycle)
            if probe.valid:
                assert probe.event == ProbeEvent.FRAME_OUT and valid and ready
                probes.append((int(probe.qpn), int(probe.psn), int(probe.opcode), int(probe.length)))
            cycle += 1

    simulate(dut, feed, feed_payload, drain, watch, limit=limit)
    assert probes == [(h["qpn"], h["psn"], h["opcode"], h["length"]) for h in headers]
    return got, cycles


def numbered(frames):
    """Make a list of drawn frames buildable in one run: identification in order, one address and P_Key a GID, one QP each."""
    for at, frame in enumerate(frames):
        like = frames[at % 2]
        frame.ident = at + 1
        frame.src_mac, frame.src_ip, frame.pkey = like.src_mac, like.src_ip, like.pkey
        frame.dst_ip = (frame.dst_ip * 4)[: len(like.src_ip)]
        frame.flow_label = frame.flow_label if frame.is_ipv6 else 0
        frame.src_qp = 2 + at if OPCODES[frame.opcode].has_deth else 0
    return frames


def drawn_frames(rng, count, payload_sizes=None, opcodes=None):
    """Random legal frames; the identification counts from 0; two sources, all fields of the context change per frame."""
    sources = [(rng.randbytes(6), rng.randbytes(4), rng.randbytes(16)) for _ in range(2)]
    ipv6 = [rng.getrandbits(1) for _ in range(2)]  # a GID is one address
    pkeys = [rng.getrandbits(16) for _ in range(2)]
    frames = []
    for at in range(count):
        info = OPCODES[rng.choice(opcodes or list(Opcode))]
        size = rng.choice(payload_sizes) if payload_sizes else rng.randint(0, 300)
        mac, ip4, ip6 = sources[at % 2]
        v6 = ipv6[at % 2]
        qpn = 2 + at % 30
        ud = info.transport is Transport.UD
        frames.append(Frame(
            opcode=info.opcode, dest_qpn=rng.getrandbits(24), psn=rng.getrandbits(24),
            payload=b"" if info.payload.name == "ZERO" else rng.randbytes(size),
            dst_mac=rng.randbytes(6), src_mac=mac, src_ip=ip6 if v6 else ip4, dst_ip=rng.randbytes(16 if v6 else 4),
            vlan=rng.choice([None, (rng.getrandbits(3), rng.getrandbits(12))]),
            traffic_class=rng.getrandbits(8), hop_limit=rng.getrandbits(8), flow_label=rng.getrandbits(20) if v6 else 0,
            ident=at + 1, sport=rng.getrandbits(16), se=bool(rng.getrandbits(1)), ackreq=bool(rng.getrandbits(1)),
            becn=info.transport is Transport.CNP, pkey=pkeys[at % 2], va=rng.getrandbits(64), rkey=rng.getrandbits(32),
            dma_length=rng.getrandbits(32), swap=rng.getrandbits(64), compare=rng.getrandbits(64),
            syndrome=rng.getrandbits(8), msn=rng.getrandbits(24), original=rng.getrandbits(64), imm=rng.getrandbits(32),
            qkey=rng.getrandbits(32) if ud else 0, src_qp=qpn if ud else 0,
        ))  # fmt: skip
    return frames


@rule(
    "R-FRM-2", "R-FRM-4", "R-FRM-6", "R-FRM-7", "R-PAD-1", "R-ICRC-1", "R-ICRC-2", "R-ICRC-3", "R-ICRC-5", "R-ICRC-8",
    "R-ADR-3", "R-ADR-4", "R-FRM-5", "R-HDR-1", "R-ICRC-6",
)  # fmt: skip
@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("p_stall", [0.0, 0.3])
def test_random_frames(width, p_stall):
    rng = seeded(width)
    frames = drawn_frames(rng, 16)
    got, _ = run(params(width), frames, rng, p_stall)
    assert got == [(frame.pack(), 0) for frame in frames]


@rule("R-HDR-1", "R-OPC-3", "R-PAD-1", "R-ICRC-8")
@pytest.mark.parametrize("width", [64, 512])
def test_every_opcode_and_small_payload(width):
    """All opcodes, payload lengths around the bus width."""
    rng = seeded(100 + width)
    sizes = [0, 1, 2, 3, 4, 6, 7, 8, 9, 62, 63, 64, 65]
    half = len(Opcode) // 2
    for opcodes in (list(Opcode)[:half], list(Opcode)[half:]):
        frames = numbered([drawn_frames(rng, 1, sizes, [opcode])[0] for opcode in opcodes])
        got, _ = run(params(width), frames)
        assert got == [(frame.pack(), 0) for frame in frames]


@rule("R-FRM-4", "R-FRM-5")
def test_scapy_agrees():
    """Lengths and header checksum as scapy computes them."""
    frames = numbered([frame for frame in drawn_frames(seeded(8), 40) if not frame.is_ipv6][:12])
    got, _ = run(params(64), frames)
    assert len(got) == 12
    for raw, err in got:
        sent = Ether(raw)[IP]
        again = sent.copy()
        del again.chksum, again.len
        again = IP(bytes(again))
        assert (again.chksum, again.len) == (sent.chksum, sent.len)
        parse_frame(raw)
        assert not err


@pytest.mark.parametrize("width", [64, 512])
def test_pmtu_sizes(width):
    rng = seeded(3)
    frames = numbered([drawn_frames(rng, 1, [size], [opcode])[0] for size, opcode in (
        (4096, Opcode.RC_WRITE_ONLY_IMM), (256, Opcode.RC_SEND_MIDDLE), (1024, Opcode.RC_READ_RESP_FIRST),
    )])  # fmt: skip
    got, _ = run(params(width), frames)
    assert got == [(frame.pack(), 0) for frame in frames]


# B4, B6, B8 have bits set that the builder never sends (FECN, no DF, MigReq): see test_icrc_of_vectors.
BUILT = [f"A{i}" for i in range(1, 20)] + ["B1", "B2", "B3", "B7", "C1", "C2"]


@rule("R-ICRC-3", "R-ICRC-4", "R-ICRC-6")
@pytest.mark.parametrize("width", [64, 512])
def test_vectors(width):
    """Each vector is the first frame after a reset: they all have identification 1. B5 is the frame after B1 again."""
    p = params(width)
    raw = vectors()
    made = {name: case(parse_frame(raw[name]), 2 + at if name not in ("A16", "A17") else 0x34, 0, at % 2)
            for at, name in enumerate(BUILT)}  # fmt: skip
    made["B5"] = made["B1"]
    contexts = {header["qpn"]: ctx for header, ctx, _ in made.values()}
    contexts[0x34] |= {"sgid_index": 0}
    v4 = made["A1"][2]
    contexts = {qpn: ctx | {"sgid_index": ctx["ipv6"]} for qpn, ctx in contexts.items()}
    dut = Fixture(p, contexts, [v4, made["C1"][2]], [0xFFFF] * 2)

    order = [name for built in BUILT for name in ([built, "B5"] if built == "B1" else [built])]
    got = []

    async def feed(ctx):
        for at, name in enumerate(order):
            while len(got) < at:
                await ctx.tick()
            ctx.set(dut.restart, name != "B5")
            await ctx.tick()
            ctx.set(dut.restart, 0)
            await send(ctx, dut.header, [made[name][0]])
            payload = parse_frame(raw[name]).payload
            if payload:
                await send(ctx, dut.payload, beats_of(payload, width))

    async def drain(ctx):
        for name in order:
            got.append(await recv_packet(ctx, dut.frame))
            assert got[-1] == (raw[name], 0), name

    simulate(dut, feed, drain, limit=5000)


@rule("R-ICRC-3", "R-ICRC-4", "R-ICRC-5")
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_icrc_of_vectors(width):
    """Every RoCEv2 vector through the ICRC stage alone, also those with bits the builder never sends."""
    from rnic.tx.headers import hidden_bytes

    raw = [data for name, data in vectors().items() if name not in ("V3", "V4")]
    dut = IcrcInsert(width)
    lanes = width // 8

    def body(frame):
        vlan, ipv6 = frame[12:14] == b"\x81\x00", frame[12:14] == b"\x86\xdd"
        hide = sum(1 << at for at in hidden_bytes(vlan, ipv6))
        end = len(frame) - 4  # where the ICRC begins
        beats = []
        for at, beat in enumerate(beats_of(frame[:-4] + bytes(4), width)):
            here = at == (end - 1) // lanes
            beats.append(beat | {
                "first": int(at == 0), "icrc": int(here), "checksum": 0, "hide": hide >> at * lanes & (1 << lanes) - 1,
                "spare": (at * lanes + lanes - end - 2) // 4 if here else 0, "vlan": int(vlan), "ipv6": int(ipv6),
            })  # fmt: skip
        return beats

    async def feed(ctx):
        for frame in raw:
            await send(ctx, dut.i, body(frame))

    async def drain(ctx):
        for frame in raw:
            assert await recv_packet(ctx, dut.frame) == (frame, 0)

    assert BodyBeat(width)  # the layout exists at every width
    simulate(dut, feed, drain, limit=20000)


@pytest.mark.parametrize("width", [64, 512])
def test_cut_frames(width):
    """A payload that ends with err ends the frame with err; the frames around it are whole."""
    rng = seeded(4)
    frames = drawn_frames(rng, 12, payload_sizes=[1, 5, 64, 130, 256], opcodes=[Opcode.RC_WRITE_ONLY, Opcode.RC_SEND_ONLY])
    errors = {1, 2, 5, 8, 11}
    got, _ = run(params(width), frames, rng, 0.2, errors)
    for at, (frame, (raw, err)) in enumerate(zip(frames, got, strict=True)):
        assert err == int(at in errors)
        if at in errors:
            whole = len(frame.pack())
            assert len(raw) <= -(-whole // (width // 8)) * (width // 8)
        else:
            assert raw == frame.pack()


@pytest.mark.parametrize("width", [64, 512])
def test_payload_cut_early(width):
    """A payload shorter than announced, with err: the frame ends with it and the next one is whole."""
    p = params(width)
    rng = seeded(5)
    frames = drawn_frames(rng, 2, payload_sizes=[300], opcodes=[Opcode.RC_WRITE_ONLY])
    (h0, c0, g0), (h1, c1, g1) = case(frames[0], 2), case(frames[1], 3, 1, 1)
    dut = Fixture(p, {2: c0, 3: c1}, [g0, g1] * 2, [frames[0].pkey, frames[1].pkey])

    async def feed(ctx):
        await send(ctx, dut.header, [h0, h1])

    async def feed_payload(ctx):
        await send(ctx, dut.payload, beats_of(frames[0].payload[:70], width, 1) + beats_of(frames[1].payload, width))

    async def drain(ctx):
        raw, err = await recv_packet(ctx, dut.frame)
        assert err and len(raw) < len(frames[0].pack())
        assert await recv_packet(ctx, dut.frame) == (frames[1].pack(), 0)

    simulate(dut, feed, feed_payload, drain)


@pytest.mark.parametrize("width", [64, 512])
def test_payload_too_long_is_noticed(width):
    p = params(width)
    frame = drawn_frames(seeded(6), 1, payload_sizes=[40], opcodes=[Opcode.RC_WRITE_ONLY])[0]
    header, ctx0, gid = case(frame, 2)
    dut = Fixture(p, {2: ctx0}, [gid] * 4, [frame.pkey] * 2)

    async def feed(ctx):
        await send(ctx, dut.header, [header])

    async def feed_payload(ctx):
        await send(ctx, dut.payload, beats_of(bytes(400), width))

    async def drain(ctx):
        await recv_packet(ctx, dut.frame)

    with pytest.raises(AssertionError, match="goes on behind"):
        simulate(dut, feed, feed_payload, drain)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_timing(width):
    """First beat 6 cycles and a read of the address table after the header; no bubble inside a frame, at most one idle cycle
    between frames."""
    rng = seeded(7)
    sizes = [0, 1, 64, 65, 66, 128, 256, 300]
    frames = drawn_frames(rng, 24, payload_sizes=sizes, opcodes=[Opcode.RC_WRITE_ONLY, Opcode.RC_SEND_ONLY, Opcode.RC_ACK])
    p = params(width)
    got, cycles = run(p, frames)
    assert got == [(frame.pack(), 0) for frame in frames]
    assert cycles[0] == 6 + p.address_cycles
    lanes = width // 8
    at = 0
    idle = []
    for frame in frames:
        beats = -(-len(frame.pack()) // lanes)
        mine = cycles[at : at + beats]
        assert mine == list(range(mine[0], mine[0] + beats)), "bubble inside a frame"
        if at:
            idle.append(mine[0] - cycles[at - 1] - 1)
        at += beats
    print("idle cycles between frames", idle)
    assert max(idle) <= 1
    if width == 64:
        assert max(idle) == 0


def test_records_are_the_contract():
    p = params(64)
    assert Builder(p).header.payload.shape() == TxHeader(p)
    assert Builder(p).frame.payload.shape() == Beat(64)
    assert packet_of([]) == b""


def test_single_beat_frames_every_second_cycle():
    """ACKs fit one 512-bit beat: one idle cycle between them."""
    frames = numbered(drawn_frames(seeded(9), 10, opcodes=[Opcode.RC_ACK]))
    for frame in frames:
        frame.vlan, frame.dst_ip, frame.src_ip, frame.flow_label = None, frame.dst_ip[:4], frame.src_ip[:4], 0
    got, cycles = run(params(512), numbered(frames))
    assert got == [(frame.pack(), 0) for frame in frames]
    assert cycles == [8 + 2 * at for at in range(10)]
