"""AxiChecker finds what it is for; signatures keep the AXI names; connect_host joins both engines."""

import re

import pytest
from amaranth.back import verilog
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from rnic.memory.axi import AxiChecker, AxiLiteSignature, AxiSignature, connect_host
from rnic.memory.burst import BurstSplitter
from rnic.memory.dma_read import DmaRead, ReadClient
from rnic.memory.dma_write import DmaWrite
from tests.unit.streams import recv, seeded, send, simulate

AW = {"awvalid": 1, "awready": 1, "awid": 0, "awaddr": 0x1000, "awlen": 1, "awsize": 3, "awburst": 1}
AR = {"arvalid": 1, "arready": 1, "arid": 1, "araddr": 0x1FF8, "arlen": 0, "arsize": 3, "arburst": 1}
W = {"wvalid": 1, "wready": 1, "wdata": 5, "wstrb": 0xFF, "wlast": 0}
W_LAST = {**W, "wlast": 1}
B = {"bvalid": 1, "bready": 1, "bid": 0, "bresp": 0}
R = {"rvalid": 1, "rready": 1, "rid": 1, "rresp": 0, "rlast": 1}

CASES = {
    "good write": ([AW, W, W_LAST, {}, B], None),
    "good write, W with AW": ([{**AW, **W}, W_LAST, B], None),
    "good one-beat write at once": ([{**AW, "awlen": 0, **W_LAST}, B], None),
    "good write, AW late": ([{**AW, "awready": 0, **W}, {**AW, "awready": 0, **W_LAST}, AW, B], None),
    "two bursts": ([AW, {**AW, "awlen": 0}, W, W_LAST, W_LAST, B, B], None),
    "good read": ([AR, R], None),
    "read to the page end": ([{**AR, "araddr": 0x1000, "arlen": 255}], None),
    "AW changes": ([{**AW, "awready": 0}, {**AW, "awaddr": 0x2000}], "AXI aw: payload changed"),
    "AR dropped": ([{**AR, "arready": 0}, {}], "AXI ar: valid dropped"),
    "W changes": ([{**AW, **W, "wready": 0}, {**W, "wdata": 6}], "AXI w: payload changed"),
    "write over 4 KiB": ([{**AW, "awaddr": 0x1FF8}], "2 beats from 0x1ff8 cross 4 KiB"),
    "read over 4 KiB": ([{**AR, "arlen": 1}], "2 beats from 0x1ff8 cross 4 KiB"),
    "unaligned": ([{**AR, "araddr": 0x1001}], "is not aligned"),
    "narrow": ([{**AR, "arsize": 2}], "not full width"),
    "wrap": ([{**AW, "awburst": 2}], "burst is not INCR"),
    "WLAST early": ([AW, W_LAST], "WLAST is 1 on beat 1 of 2"),
    "WLAST missing": ([AW, W, W], "WLAST is 0 on beat 2 of 2"),
    "W before AW": ([W], "beat before its AW"),
    "B without burst": ([B], "write: response for ID 0 without"),
    "B of another ID": ([AW, W, W_LAST, {**B, "bid": 1}], "write: response for ID 1 without"),
    "R without burst": ([R], "read: response for ID 1 without"),
    "R twice": ([AR, R, R], "read: response for ID 1 without"),
}


@pytest.mark.parametrize("name", CASES)
def test_checker(name):
    cycles, message = CASES[name]
    dut = AxiChecker(64, 1)
    names = {key for cycle in cycles for key in cycle}

    async def bench(ctx):
        for cycle in [*cycles, {}]:
            for key in names:
                ctx.set(getattr(dut, key), cycle.get(key, 0))
            await ctx.tick()
        await ctx.tick()

    if message is None:
        simulate(dut, bench)
    else:
        with pytest.raises(AssertionError, match=re.escape(message)):
            simulate(dut, bench)


class Host(wiring.Component):
    """Both engines on one port."""

    def __init__(self):
        self.read = DmaRead(64, [ReadClient(name="a", buffer_beats=4)])
        self.write = DmaWrite(64, ["a", "b", "c"])
        super().__init__({"m_axi": Out(AxiSignature(64, 2)), "s_axil": wiring.In(AxiLiteSignature(16))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.read = self.read
        m.submodules.write = self.write
        connect_host(m, self.m_axi, self.read.axi, self.write.axi)
        return m


def test_connect_host():
    host = Host()

    async def bench(ctx):
        ctx.set(host.m_axi.arready, 1)
        await send(ctx, host.read.a.command, [{"address": 0x123456789A0, "length": 16}])
        while not ctx.get(host.m_axi.arvalid):
            await ctx.tick()
        assert ctx.get(host.m_axi.araddr) == 0x123456789A0
        assert ctx.get(host.m_axi.arlen) == 1
        for word in (5, 6):
            ctx.set(host.m_axi.rdata, word)
            ctx.set(host.m_axi.rvalid, 1)
            await ctx.tick()
        ctx.set(host.m_axi.rvalid, 0)
        assert [int(word.data) for word in await recv(ctx, host.read.a.word, 2)] == [5, 6]

    simulate(host, bench)


def test_port_names():
    host = Host()
    ports = {f"m_axi_{name}": (getattr(host.m_axi, name), None) for name in host.m_axi.signature.members}
    text = verilog.convert(host, name="host", ports=ports, emit_src=False)
    for name in ("m_axi_awaddr", "m_axi_wstrb", "m_axi_bready", "m_axi_arlen", "m_axi_rdata"):
        assert re.search(rf"^  (input|output) (\[\d+:0\] )?{name};", text, re.MULTILINE), name


@pytest.mark.parametrize("width", [64, 512])
def test_splitter(width):
    """Every burst stays inside its block; together they cover the access once."""
    rng = seeded(width)
    lanes = width // 8
    block = lanes * 4
    dut = BurstSplitter(width, block, tag_width=5)
    accesses = [((1 << 64) - block * 4096 if k == 0 else rng.getrandbits(63), rng.choice((1, lanes, 65535,
                rng.randint(1, 5 * block)))) for k in range(12)]

    async def feed(ctx):
        for tag, (address, length) in enumerate(accesses):
            ctx.set(dut.tag, tag)
            await send(ctx, dut.i, [{"address": address, "length": length}], rng, 0.2)

    async def drain(ctx):
        for tag, (address, length) in enumerate(accesses):
            at = address - address % lanes
            last = 0
            while not last:
                (burst,) = await recv(ctx, dut.o, 1, rng, 0.2)
                assert burst.address == at and burst.tag == tag
                assert at // block == (at + burst.len * lanes) // block
                at += (burst.len + 1) * lanes
                last = burst.last
            assert at == -(-(address + length) // lanes) * lanes

    simulate(dut, feed, drain, limit=12000)


@pytest.mark.parametrize("block", [4, 24, 4096])
def test_splitter_bad_block(block):
    with pytest.raises(ValueError, match=f"block is {block}"):
        BurstSplitter(64, block)


@pytest.mark.parametrize("arguments, message", [
    ((48, 1), "data_width is 48"), ((64, 0), "id_width is 0"),
])
def test_bad_signature(arguments, message):
    with pytest.raises(ValueError, match=message):
        AxiSignature(*arguments)
