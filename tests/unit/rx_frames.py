"""Bench of the receive parser: sends frames, compares all outputs with what `rnic.wire.frame.parse_frame` says of them."""

import random
from dataclasses import dataclass

from rnic.records import RxDrop
from rnic.rx.parse import Parser
from rnic.wire.frame import Frame, FrameError, FrameReason, mapped_address, parse_frame
from rnic.wire.opcode import OPCODES, Opcode, PayloadRule
from tests.unit.streams import beats_of, packet_of, seeded, shared, simulate

CAUSES = {
    FrameReason.SHORT_FRAME: RxDrop.BAD_LENGTH, FrameReason.BAD_LENGTH: RxDrop.BAD_LENGTH,
    FrameReason.BAD_IP_HEADER: RxDrop.BAD_IP, FrameReason.BAD_IP_CHECKSUM: RxDrop.BAD_IP, FrameReason.FRAGMENT: RxDrop.BAD_IP,
    FrameReason.UNKNOWN_OPCODE: RxDrop.BAD_BTH, FrameReason.BAD_TVER: RxDrop.BAD_BTH, FrameReason.QP0: RxDrop.BAD_BTH,
    FrameReason.BAD_ICRC: RxDrop.BAD_ICRC,
}  # fmt: skip


def random_frame(rng: random.Random, opcode: Opcode | None = None, size: int | None = None, **change) -> Frame:
    """A correct frame with everything else random; ``size`` payload bytes where the opcode allows a payload."""
    opcode = opcode or rng.choice(list(Opcode))
    size = rng.randrange(301) if size is None else size
    address = rng.choice((4, 16))
    fields = dict(
        opcode=opcode, dest_qpn=rng.randrange(1, 1 << 24), psn=rng.getrandbits(24),
        payload=b"" if OPCODES[opcode].payload is PayloadRule.ZERO else rng.randbytes(size),
        dst_mac=rng.randbytes(6), src_mac=rng.randbytes(6),
        vlan=(rng.randrange(8), rng.randrange(4096)) if rng.random() < 0.4 else None,
        src_ip=rng.randbytes(address), dst_ip=rng.randbytes(address), traffic_class=rng.randrange(256),
        hop_limit=rng.randrange(256), flow_label=rng.getrandbits(20), ident=rng.getrandbits(16),
        dont_fragment=rng.random() < 0.9, sport=rng.getrandbits(16), udp_checksum=rng.choice((0, rng.getrandbits(16))),
        se=rng.random() < 0.5, migreq=rng.random() < 0.5, fecn=rng.random() < 0.5, becn=rng.random() < 0.5,
        ackreq=rng.random() < 0.5, resv7=rng.randrange(128), pkey=rng.getrandbits(16), va=rng.getrandbits(64),
        rkey=rng.getrandbits(32), dma_length=rng.getrandbits(32), swap=rng.getrandbits(64), compare=rng.getrandbits(64),
        syndrome=rng.getrandbits(8), msn=rng.getrandbits(24), original=rng.getrandbits(64), imm=rng.getrandbits(32),
        qkey=rng.getrandbits(32), src_qp=rng.getrandbits(24),
    )  # fmt: skip
    return Frame(**fields | change)


def header_fields(frame: Frame) -> dict[str, int]:
    """The RxHeader fields that mean something for this frame."""
    info = frame.info
    assert info is not None
    number = lambda raw: int.from_bytes(raw, "big")  # noqa: E731
    out = dict(
        opcode=info.opcode.value, se=frame.se, pad=frame.raw_pad if frame.raw_pad is not None else -len(frame.payload) & 3,
        pkey=frame.pkey, dest_qpn=frame.dest_qpn, ackreq=frame.ackreq, psn=frame.psn, payload_len=len(frame.payload),
        is_ipv6=frame.is_ipv6, vlan_valid=frame.vlan is not None, vlan_vid=frame.vlan[1] if frame.vlan else 0,
        src_ip=number(mapped_address(frame.src_ip)), dst_ip=number(mapped_address(frame.dst_ip)),
        dst_mac=number(frame.dst_mac), src_mac=number(frame.src_mac), ecn=frame.traffic_class & 3,
    )  # fmt: skip
    if info.has_reth or info.has_atomiceth:
        out |= dict(va=frame.va, rkey=frame.rkey)
    if info.has_reth:
        out |= dict(dma_len=frame.dma_length)
    if info.has_atomiceth:
        out |= dict(swap=frame.swap, compare=frame.compare)
    if info.has_aeth:
        out |= dict(aeth_syndrome=frame.syndrome, aeth_msn=frame.msn)
    if info.has_atomicack:
        out |= dict(original=frame.original)
    if info.has_imm:
        out |= dict(imm=int.from_bytes(frame.imm.to_bytes(4, "big"), "little"))
    if info.has_ieth:
        out |= dict(imm=frame.rkey)
    if info.has_deth:
        out |= dict(qkey=frame.qkey, src_qp=frame.src_qp)
    return {name: int(value) for name, value in out.items()}


@dataclass
class Seen:
    """What came out: RxHeader constants, (payload, err), eth packets (bytes, err), drop causes; cycle of each header and of
    each last beat taken."""

    headers: list
    payloads: list
    eth: list
    drops: list
    header_cycles: list
    last_cycles: list
    stalls: int


def run(width, frames, *, stall_in=0.0, stall_out=0.0, errors=(), seed=1, hold=None, eth_ready=True, dut=None) -> Seen:
    """Send ``frames`` (bytes) through a parser; ``errors`` are the numbers of the frames the MAC aborts; ``hold``: name to
    (from, to) cycles in which that output is not ready."""
    rng = seeded(seed)
    dut = dut or shared(Parser, width)
    beats = [b for n, raw in enumerate(frames) for b in beats_of(raw, width, int(n in errors))]
    limit = int((len(beats) / (1 - stall_in) + 60) / (1 - stall_out) * 1.5) + sum(b for _, b in (hold or {}).values()) + 200
    seen = Seen([], [], [], [], [], [], 0)
    gathered: dict[str, list] = {"payload": [], "eth": []}
    done = False
    cycle = 0

    async def clock(ctx):  # a list of all outputs, sampled each cycle
        nonlocal cycle, done
        quiet = 0
        while not (done and quiet > 40):
            outs = {"hdr": dut.hdr, "payload": dut.payload, "eth": dut.eth}
            for name, port in outs.items():
                held = name in (hold or {}) and hold[name][0] <= cycle < hold[name][1]
                ready = not held and rng.random() >= stall_out and (name != "eth" or eth_ready)
                ctx.set(port.ready, ready)
            sample = await ctx.tick().sample(
                dut.hdr.valid, dut.hdr.ready, dut.hdr.payload, dut.payload.valid, dut.payload.ready, dut.payload.payload,
                dut.eth.valid, dut.eth.ready, dut.eth.payload, dut.drop, dut.i.valid, dut.i.ready, dut.i.payload.last,
            )  # fmt: skip
            hv, hr, hp, pv, pr, pp, ev, er, ep, drop, iv, ir, last = sample[2:]
            if hv and hr:
                seen.headers.append(hp)
                seen.header_cycles.append(cycle)
            for name, valid, ready, beat, out in (("payload", pv, pr, pp, seen.payloads), ("eth", ev, er, ep, seen.eth)):
                if valid and ready:
                    gathered[name].append(beat)
                    if beat.last:
                        out.append((packet_of(gathered[name]), int(beat.err)))
                        gathered[name] = []
            if drop.valid:
                seen.drops.append(drop.cause)
            if iv and ir and last:
                seen.last_cycles.append(cycle)
            seen.stalls += iv and not ir
            active = hv or pv or (ev and eth_ready) or iv
            quiet = 0 if active else quiet + 1
            cycle += 1

    async def feed(ctx):
        nonlocal done
        await ctx.tick()
        for beat in beats:
            while rng.random() < stall_in:
                await ctx.tick()
            ctx.set(dut.i.payload, beat)
            ctx.set(dut.i.valid, 1)
            ready = False
            while not ready:
                _, _, ready = await ctx.tick().sample(dut.i.ready)
            ctx.set(dut.i.valid, 0)
        done = True

    simulate(dut, clock, feed, limit=limit)
    assert not gathered["payload"] and not gathered["eth"], "a packet without an end"
    return seen


def check(seen: Seen, frames, errors=()) -> int:
    """Compare with the oracle; returns the number of accepted frames."""
    headers, payloads, eth, drops = [], [], [], []
    for n, raw in enumerate(frames):
        try:
            frame, reason = parse_frame(raw), None
        except FrameError as error:
            frame, reason = None, error.reason
        if n in errors:
            drops.append(RxDrop.MAC_ERROR)
        elif reason is FrameReason.NOT_ROCE:
            eth.append((raw, 0))
        elif frame is None:
            drops.append(CAUSES[reason])
        else:
            headers.append(header_fields(frame))
            if frame.payload:
                payloads.append(frame.payload)
    assert len(seen.headers) == len(headers)
    for got, want in zip(seen.headers, headers, strict=True):
        assert {name: int(getattr(got, name)) for name in want} == want
        assert got.flags.known and got.flags.header_words * 4 == OPCODES[Opcode(want["opcode"])].header_bytes
    assert [data for data, err in seen.payloads if not err] == payloads
    assert sum(err for _, err in seen.payloads) <= len(drops)
    assert seen.eth == eth
    assert seen.drops == drops
    return len(headers)
