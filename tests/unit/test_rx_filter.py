"""Receive filter against a plain-Python reading of rules.md section 5."""

import random

import pytest
from amaranth.sim import Simulator

from rnic.abi import ADDRESS_CTX, GID_ENTRY, QpState, QpType
from rnic.config import CONFIGS, Params
from rnic.records import RxDrop
from rnic.rx.filter import Filter
from rnic.wire.opcode import OPCODES, Kind, Opcode, Transport, flags_of
from tests.rules import rule

_TYPES = {Transport.RC: QpType.RC, Transport.UC: QpType.UC, Transport.UD: QpType.UD}


def ip(rng):
    return rng.choice([0xFFFF0A000001, 0xFFFF0A000002, 0x20010DB8 << 96 | 1])


def swap(value, size):
    return int.from_bytes(value.to_bytes(size, "big"), "little")


class World:
    """Random contexts, mostly such that a random packet passes most checks."""

    def __init__(self, rng, p):
        self.gids = [
            dict(ip=ip(rng), mac=0x020000000001 + i, valid=int(rng.random() < 0.95), vlan=int(rng.random() < 0.3), vlan_vid=7)
            for i in range(p.num_gids)
        ]
        self.pkeys = [rng.choice([0xFFFF, 0x7FFF, 0x8001]) for _ in range(p.num_pkeys)]
        self.qps = [
            dict(state=rng.choice([3, 3, 3, *range(7)]), type=rng.choice([0, 0, 1, 3]), pkey_index=rng.randrange(p.num_pkeys),
                 sgid_index=rng.randrange(p.num_gids), qkey=rng.choice([5, 6]), dip=ip(rng))
            for _ in range(p.num_qps)
        ]  # fmt: skip

    def packet(self, rng, p):
        opcode = rng.choice(list(Opcode))
        qpn = rng.randrange(p.num_qps)
        qp = self.qps[qpn]
        gid = self.gids[qp["sgid_index"]]
        good = {_TYPES.get(OPCODES[o].transport): o for o in rng.sample(list(Opcode), len(Opcode))}
        if rng.random() < 0.8:
            opcode = good.get(QpType(qp["type"]), opcode)
        odd = lambda value, other: value if rng.random() < 0.93 else other  # noqa: E731
        return dict(
            opcode=opcode, dest_qpn=odd(qpn, qpn | 1 << rng.randrange(p.qpn_bits, 24)), src_ip=odd(qp["dip"], ip(rng)),
            dst_ip=odd(gid["ip"], ip(rng)), dst_mac=odd(gid["mac"], gid["mac"] ^ 1 << rng.randrange(48)),
            pkey=odd(self.pkeys[qp["pkey_index"]] | 0x8000, rng.choice([0x7FFF, 0x8002, 0x0001])),
            qkey=odd(qp["qkey"], 7), vlan_valid=odd(gid["vlan"], 1), vlan_vid=rng.choice([7, 7, 7, 0, 8]),
            payload_len=rng.choice([0, 1, 64, 4096]), psn=rng.getrandbits(24), ecn=rng.getrandbits(2),
            dropped=int(rng.random() < 0.05),
        )  # fmt: skip

    def judge(self, pkt, p):
        """('request'|'response'|'ignore', None) or ('drop', cause)."""
        info = OPCODES[pkt["opcode"]]
        if pkt["payload_len"] and pkt["dropped"]:
            return "drop", RxDrop.NO_SPACE
        if info.kind is Kind.CNP:
            return "ignore", None
        if pkt["dest_qpn"] >= p.num_qps:
            return "drop", RxDrop.NO_QP
        qp = self.qps[pkt["dest_qpn"]]
        gid = self.gids[qp["sgid_index"]]
        takes = {QpState.RTS, QpState.SQD} | ({QpState.RTR, QpState.SQE} if info.is_request else set())
        if qp["state"] not in takes:
            return "drop", RxDrop.NO_QP
        tagged = pkt["vlan_valid"] and pkt["vlan_vid"] != 0
        vlan_ok = (tagged and pkt["vlan_vid"] == gid["vlan_vid"]) if gid["vlan"] else not tagged
        if not gid["valid"] or pkt["dst_ip"] != gid["ip"] or pkt["dst_mac"] != gid["mac"] or not vlan_ok:
            return "drop", RxDrop.NOT_FOR_US
        if _TYPES.get(info.transport) != qp["type"]:
            return "drop", RxDrop.BAD_TYPE
        own = self.pkeys[qp["pkey_index"]]
        if (pkt["pkey"] ^ own) & 0x7FFF or not (pkt["pkey"] | own) & 0x8000:
            return "drop", RxDrop.BAD_PKEY
        if qp["type"] == QpType.UD and pkt["qkey"] != qp["qkey"]:
            return "drop", RxDrop.BAD_QKEY
        if qp["type"] != QpType.UD and pkt["src_ip"] != qp["dip"]:
            return "drop", RxDrop.BAD_ADDRESS
        return "request" if info.is_request else "response", None


@rule("R-PKEY-1", "R-QKEY-1", "R-OPC-1", "R-ADR-1", "R-CC-3", "R-QP-2", "R-QP-5", "R-CC-1", "R-PAD-3")
@pytest.mark.parametrize("seed", range(4))
def test_filter_against_the_rules(seed):
    print("seed", seed)
    rng = random.Random(seed)
    p = Params(CONFIGS["tiny"])
    world = World(rng, p)
    packets = [world.packet(rng, p) for _ in range(300)]
    dut = Filter(p)
    got: list[list] = [[] for _ in range(4)]  # request, response, free, drop
    widths = {"va": 64, "rkey": 32, "dma_len": 32, "swap": 64, "compare": 64, "aeth_syndrome": 8, "aeth_msn": 24, "original": 64,
              "imm": 32}  # fmt: skip
    extended = {id(pkt): {name: rng.getrandbits(bits) for name, bits in widths.items()} for pkt in packets}

    def request_of(opcode, get):
        """What a request's descriptor says: fields of headers it does not have are garbage."""
        info = OPCODES[opcode]
        names = ["va", "rkey"] * (info.has_reth | info.has_atomiceth) + ["dma_length"] * info.has_reth
        names += ["swap", "compare"] * info.has_atomiceth + ["imm"] * (info.has_imm | info.has_ieth)
        return [get(name) for name in names]

    def response_of(opcode, get):
        info = OPCODES[opcode]
        return [get(name) for name in ["syndrome", "msn"] * info.has_aeth + ["original"] * info.has_atomicack]

    async def headers(ctx):
        for pkt in packets:
            while rng.random() < 0.2:
                await ctx.tick()
            fields = {k: pkt[k] for k in ("dest_qpn", "src_ip", "dst_ip", "dst_mac", "pkey", "qkey", "vlan_valid", "vlan_vid",
                                          "payload_len", "psn", "ecn")}  # fmt: skip
            ctx.set(dut.hdr.payload, {**fields, **extended[id(pkt)], "opcode": pkt["opcode"].value,
                                      "flags": flags_of(OPCODES[pkt["opcode"]])})  # fmt: skip
            ctx.set(dut.hdr.valid, 1)
            await ctx.tick().until(dut.hdr.ready)
            ctx.set(dut.hdr.valid, 0)

    async def handles(ctx):
        for i, pkt in enumerate(packets):
            if not pkt["payload_len"]:
                continue
            while rng.random() < 0.2:
                await ctx.tick()
            length = 0 if pkt["dropped"] else pkt["payload_len"]
            ctx.set(dut.handle.payload, {"head": i % p.rx_cells, "length": length, "dropped": pkt["dropped"]})
            ctx.set(dut.handle.valid, 1)
            await ctx.tick().until(dut.handle.ready)
            ctx.set(dut.handle.valid, 0)

    async def contexts(ctx):
        pipe = [0] * p.address_cycles
        while True:
            qp = world.qps[pipe[-1]]
            ctx.set(dut.addr, ADDRESS_CTX.layout.from_bits(ADDRESS_CTX.pack_int(**{**qp, "dip": swap(qp["dip"], 16)})))
            gid = world.gids[qp["sgid_index"]]
            packed = GID_ENTRY.pack_int(**{**gid, "ip": swap(gid["ip"], 16), "mac": swap(gid["mac"], 6)})
            ctx.set(dut.gid, GID_ENTRY.layout.from_bits(packed))
            ctx.set(dut.pkey, world.pkeys[qp["pkey_index"]])
            await ctx.delay(1e-10)
            pipe = [ctx.get(dut.addr_index), *pipe[:-1]]
            await ctx.tick()

    def collector(which, port, parts, *fields):
        async def collect(ctx):
            while True:
                ctx.set(port.ready, rng.random() < 0.7)
                _, _, valid, ready, payload = await ctx.tick().sample(port.valid, port.ready, port.payload)
                if valid and ready:
                    got[which].append(payload if not fields else (
                        *(int(payload[field]) for field in fields),
                        *parts(Opcode(payload.opcode), lambda name: int(payload[name]))))  # noqa: B023 (used at once)

        return collect

    async def drops(ctx):
        async for _, _, drop, cause in ctx.tick().sample(dut.drop, dut.cause):
            if drop:
                got[3].append(cause)

    async def limit(ctx):
        for _ in range(8000):
            await ctx.tick()
            if sum(map(len, (got[0], got[1], got[3]))) + ignored == len(packets):
                await ctx.tick().repeat(3)
                return
        raise AssertionError(f"stuck after {list(map(len, got))} of {len(packets)}")

    verdicts = [world.judge(pkt, p) for pkt in packets]
    ignored = sum(v == "ignore" for v, _ in verdicts)
    sim = Simulator(dut)
    sim.add_clock(8e-9)
    for process in (headers, handles, contexts, drops):
        sim.add_testbench(process, background=True)
    sim.add_testbench(collector(0, dut.request, request_of, "psn", "length", "ce"), background=True)
    sim.add_testbench(collector(1, dut.response, response_of, "psn", "length"), background=True)
    sim.add_testbench(collector(2, dut.free, None), background=True)
    sim.add_testbench(limit)
    sim.run()
    judged = [(pkt, v) for pkt, (v, _) in zip(packets, verdicts, strict=True)]
    names = {"dma_length": "dma_len", "syndrome": "aeth_syndrome", "msn": "aeth_msn"}

    def expected(pkt, parts):
        return parts(pkt["opcode"], lambda name: extended[id(pkt)][names.get(name, name)])

    assert got[0] == [(k["psn"], k["payload_len"], k["ecn"] == 3, *expected(k, request_of)) for k, v in judged if v == "request"]
    assert got[1] == [(k["psn"], k["payload_len"], *expected(k, response_of)) for k, v in judged if v == "response"]
    assert got[3] == [c for v, c in verdicts if v == "drop"]
    free = [i % p.rx_cells for i, (k, (v, _)) in enumerate(zip(packets, verdicts, strict=True))
            if v in ("drop", "ignore") and k["payload_len"] and not k["dropped"]]  # fmt: skip
    assert got[2] == free
    assert len(got[0]) > 20 and len(set(got[3])) >= 5
