"""Headers, opcode table, syndromes and PSN arithmetic against struct, hand-written tables and plain arithmetic."""

import random
import struct

import pytest
from amaranth import *
from amaranth.sim import Simulator

from rnic.wire import headers as h
from rnic.wire import psn as p
from rnic.wire import syndrome as s
from rnic.wire.layout import swap_bytes, wire_layout
from rnic.wire.opcode import OPCODES, Kind, Opcode, OpcodeFlags, PayloadRule, Transport, decode, flags_of, opcode_of
from tests.rules import rule


def test_bth_is_packed_in_wire_order():
    raw = h.BTH.pack(
        opcode=0x11, se=0, migreq=1, pad=2, tver=0, pkey=0xFFFE, fecn=1, becn=0, resv6=5, dest_qpn=0x123456, ackreq=1,
        resv7=3, psn=0xABCDEF,
    )  # fmt: skip
    assert raw == struct.pack(">BBHII", 0x11, 0x60, 0xFFFE, 0x85123456, 0x83ABCDEF)
    assert h.BTH.unpack(raw)["psn"] == 0xABCDEF and h.BTH.unpack(raw)["resv6"] == 5


def test_header_sizes():
    sizes = {
        "ETHERNET": 14, "VLAN_TAG": 4, "IPV4": 20, "IPV6": 40, "UDP": 8, "BTH": 12, "DETH": 8, "RETH": 16, "AETH": 4,
        "ATOMIC_ETH": 28, "ATOMIC_ACK_ETH": 8, "IMM_DT": 4, "IETH": 4,
    }  # fmt: skip
    assert {name: getattr(h, name).size_bytes for name in sizes} == sizes
    assert h.RETH.pack(va=1 << 56, rkey=2, length=3) == struct.pack(">QII", 1 << 56, 2, 3)
    assert h.ATOMIC_ETH.pack(va=1, rkey=2, swap=3, compare=4) == struct.pack(">QIQQ", 1, 2, 3, 4)
    assert h.DETH.pack(qkey=1, src_qp=2) == struct.pack(">II", 1, 2)
    assert h.max_frame_bytes(4096) == 14 + 4 + 40 + 8 + 12 + 16 + 4 + 4096 + 4
    assert h.mtu_enum(4096) == 5 and h.mtu_enum(256) == 1


def test_layout_errors():
    with pytest.raises(ValueError, match="7 bits"):
        wire_layout({"a": 7})
    with pytest.raises(ValueError, match="no field 'x'"):
        h.UDP.pack(x=1)
    with pytest.raises(ValueError, match="sport is 0x10000"):
        h.UDP.pack(sport=0x10000)
    with pytest.raises(ValueError, match="7 bytes"):
        h.UDP.unpack(bytes(7))
    with pytest.raises(ValueError, match="MTU is 1500"):
        h.mtu_enum(1500)


def test_hardware_sees_the_same_fields():
    bus, bth = Signal(512), Signal(h.BTH)
    m = Module()
    m.d.comb += bth.eq(swap_bytes(bus[: h.BTH.size]))
    raw = random.Random(1).randbytes(64)

    async def bench(ctx):
        ctx.set(bus, int.from_bytes(raw, "little"))
        seen = ctx.get(bth)
        assert {name: getattr(seen, name) for name, _ in h.BTH} == h.BTH.unpack(raw[:12])

    sim = Simulator(m)
    sim.add_testbench(bench)
    sim.run()


# (opcode, header bytes, payload rule, takes a receive WQE, makes a receive CQE): typed from the rule text, not derived
Z, P, L, O = PayloadRule.ZERO, PayloadRule.PMTU, PayloadRule.ONE_TO_PMTU, PayloadRule.ZERO_TO_PMTU  # noqa: E741
TABLE = [
    (0x00, 12, P, 1, 0), (0x01, 12, P, 0, 0), (0x02, 12, L, 0, 1), (0x03, 16, L, 0, 1), (0x04, 12, O, 1, 1),
    (0x05, 16, O, 1, 1), (0x06, 28, P, 0, 0), (0x07, 12, P, 0, 0), (0x08, 12, L, 0, 0), (0x09, 16, L, 1, 1),
    (0x0A, 28, O, 0, 0), (0x0B, 32, O, 1, 1), (0x0C, 28, Z, 0, 0), (0x0D, 16, P, 0, 0), (0x0E, 12, P, 0, 0),
    (0x0F, 16, L, 0, 0), (0x10, 16, O, 0, 0), (0x11, 16, Z, 0, 0), (0x12, 24, Z, 0, 0), (0x13, 40, Z, 0, 0),
    (0x14, 40, Z, 0, 0), (0x16, 16, L, 0, 1), (0x17, 16, O, 1, 1), (0x64, 20, O, 1, 1), (0x65, 24, O, 1, 1),
    (0x81, 28, Z, 0, 0),
]  # fmt: skip
TABLE += [(0x20 | op, *row) for op, *row in TABLE if op <= 0x0B]


@rule("R-OPC-2", "R-LEN-1", "R-LEN-4")
def test_opcode_table():
    assert {op for op, *_ in TABLE} == {opcode.value for opcode in Opcode} == {o.value for o in OPCODES}
    for op, size, payload, takes, makes in TABLE:
        info = OPCODES[Opcode(op)]
        assert (info.header_bytes, info.payload, info.takes_rwqe, info.makes_cqe) == (size, payload, takes, makes), info
        assert info.transport is {0: Transport.RC, 1: Transport.UC, 3: Transport.UD, 4: Transport.CNP}[op >> 5]
        assert info.first + info.middle + info.last + info.only == 1
    assert [o.value for o, i in OPCODES.items() if i.is_response] == [0x0D, 0x0E, 0x0F, 0x10, 0x11, 0x12]
    assert not OPCODES[Opcode.CNP].is_request
    assert OPCODES[Opcode.RC_SEND_LAST].payload_ok(256, 256) and not OPCODES[Opcode.RC_SEND_LAST].payload_ok(0, 256)
    assert not OPCODES[Opcode.RC_WRITE_FIRST].payload_ok(255, 256) and OPCODES[Opcode.RC_ACK].payload_ok(0, 256)


def test_opcode_of():
    assert opcode_of(Transport.RC, Kind.SEND) is Opcode.RC_SEND_ONLY
    assert opcode_of(Transport.UC, Kind.WRITE, starts=False, imm=True) is Opcode.UC_WRITE_LAST_IMM
    assert opcode_of(Transport.RC, Kind.READ_RESP, starts=False, ends=False) is Opcode.RC_READ_RESP_MIDDLE
    assert opcode_of(Transport.RC, Kind.SEND, starts=False, inv=True) is Opcode.RC_SEND_LAST_INV
    with pytest.raises(ValueError, match="UC has no READ_REQ"):
        opcode_of(Transport.UC, Kind.READ_REQ)


def test_hardware_decode_of_every_byte():
    m, opcode = Module(), Signal(8)
    flags = decode(m, opcode)
    known = {o.value: i for o, i in OPCODES.items()}

    async def bench(ctx):
        for value in range(256):
            ctx.set(opcode, value)
            info = known.get(value)
            want = OpcodeFlags.const(flags_of(info)) if info else OpcodeFlags.const({})
            seen = ctx.get(flags)
            assert seen == want, value
            assert (seen.known, seen.header_words * 4) == ((1, info.header_bytes) if info else (0, 0))

    sim = Simulator(m)
    sim.add_testbench(bench)
    sim.run()


@rule("R-RNR-3")
def test_syndrome():
    assert (s.ack_syndrome(), s.ack_syndrome(3), s.rnr_syndrome(14)) == (0x1F, 0x03, 0x2E)
    assert [s.nak_syndrome(code) for code in s.NakCode] == [0x60, 0x61, 0x62, 0x63, 0x64]
    assert s.decode_syndrome(0x62) == (s.AethType.NAK, 2) and s.decode_syndrome(0x62).nak is s.NakCode.REMOTE_ACCESS
    assert s.decode_syndrome(0x7F).nak is None and s.decode_syndrome(0x2E) == (s.AethType.RNR_NAK, 14)
    assert s.SYNDROME.from_bits(0x63).type is s.AethType.NAK and s.SYNDROME.from_bits(0x63).value == 3
    assert max(s.RNR_TIMER_NS) == s.RNR_TIMER_NS[0] == 655_360_000
    assert s.RNR_TIMER_NS[1:4] == (10_000, 20_000, 30_000) and s.RNR_TIMER_NS[14] == 1_280_000
    assert s.RNR_TIMER_NS[25] == 61_440_000 and s.RNR_TIMER_NS[31] == 491_520_000 and len(s.RNR_TIMER_NS) == 32
    assert [s.credit_code(n) for n in (0, 1, 5, 6, 7, 32768, 99999)] == [0, 1, 4, 5, 5, 30, 30] and len(s.CREDITS) == 31
    for function, bad in ((s.ack_syndrome, 32), (s.rnr_syndrome, -1), (s.decode_syndrome, 256), (s.credit_code, -1)):
        with pytest.raises(ValueError, match=f"is {bad}, must"):
            function(bad)


PSNS = [0, 1, 2, 0x7FFFFE, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFE, 0xFFFFFF]


@rule("R-PSN-1", "R-PSN-2", "R-PSN-3")
def test_psn_arithmetic():
    a, b, c = Signal(24), Signal(24), Signal(24)
    after, delta, inside, total = Signal(), Signal(signed(24)), Signal(), Signal(24)
    m = Module()
    m.d.comb += [
        after.eq(p.psn_after_value(a, b)), delta.eq(p.psn_delta_value(a, b)), total.eq(p.psn_add_value(a, b)),
        inside.eq(p.psn_in_window_value(a, b, c)),
    ]  # fmt: skip

    async def bench(ctx):
        for x in PSNS:
            for y in PSNS:
                ctx.set(a, x)
                ctx.set(b, y)
                ctx.set(c, 5)
                signed_difference = struct.unpack(">i", struct.pack(">I", (x - y << 8) & 0xFFFFFFFF))[0] >> 8
                assert p.psn_delta(x, y) == ctx.get(delta) == signed_difference
                assert p.psn_after(x, y) == ctx.get(after) == (0 < (x - y) % 2**24 < 2**23)
                assert p.psn_before(x, y) == (signed_difference < 0)
                assert p.psn_add(x, y) == ctx.get(total) == (x + y) % 2**24
                assert p.psn_in_window(x, y, 5) == ctx.get(inside) == ((x - y) % 2**24 < (5 - y) % 2**24)

    sim = Simulator(m)
    sim.add_testbench(bench)
    sim.run()
    assert not p.psn_in_window(7, 7, 7) and p.psn_in_window(0, 0xFFFFFF, 1)
    assert [p.psn_packets(n, 256) for n in (0, 1, 256, 257)] == [1, 1, 1, 2]
