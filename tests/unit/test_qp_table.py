"""Context table: byte writes of the bus, word writes of the engine, read latency."""

import random

import pytest
from amaranth.sim import Simulator

from rnic.abi import ADDRESS_CTX, RESPONDER_HOT, CtxTable
from rnic.config import CONFIGS, Params
from rnic.qp.address import AddressTable
from rnic.qp.halves import HalvedTable
from rnic.qp.table import ContextTable


@pytest.mark.parametrize(("seed", "depth"), [(0, 8), (1, 8), (2, 8), (3, 10)])
def test_table_against_a_list(seed, depth):
    """``depth`` 10: two rows above a power of two."""
    rng = random.Random(seed)
    p = Params(CONFIGS["tiny"])
    dut = ContextTable(p, CtxTable.RESPONDER_HOT, RESPONDER_HOT, depth, read_ports=2, engine_writes=True)
    words = RESPONDER_HOT.size // 4
    model = [[0] * words for _ in range(depth)]
    stalled = 0

    async def bench(ctx):
        nonlocal stalled
        for _ in range(600):
            table = rng.choice([CtxTable.RESPONDER_HOT, CtxTable.TPT])
            index, word, mask, value = rng.randrange(depth), rng.randrange(words), rng.randrange(16), rng.getrandbits(32)
            bus = rng.random() < 0.6
            ctx.set(dut.ctx.payload, {"table": table, "index": index, "word": word, "bytes": mask, "data": value})
            ctx.set(dut.ctx.valid, bus)
            engine = rng.random() < 0.4
            eindex, emask, evalue = rng.randrange(depth), rng.getrandbits(words), rng.getrandbits(32 * words)
            ctx.set(dut.write_en, engine)
            ctx.set(dut.write_index, eindex)
            ctx.set(dut.write_words, emask)
            ctx.set(dut.write_data, RESPONDER_HOT.layout.from_bits(evalue))
            ready = ctx.get(dut.ctx.ready)
            assert ready == (not engine or table != CtxTable.RESPONDER_HOT)
            if engine:
                stalled += not ready and bus
                for w in range(words):
                    if emask >> w & 1:
                        model[eindex][w] = evalue >> 32 * w & 0xFFFF_FFFF
            elif bus and table == CtxTable.RESPONDER_HOT:
                keep = sum(0xFF << 8 * b for b in range(4) if not mask >> b & 1)
                model[index][word] = model[index][word] & keep | value & ~keep & 0xFFFF_FFFF
            await ctx.tick()
            ctx.set(dut.ctx.valid, 0)
            ctx.set(dut.write_en, 0)
            for port, at in ((0, rng.randrange(depth)), (1, rng.randrange(depth))):
                index_signal, record = dut.read(port)
                ctx.set(index_signal, at)
                await ctx.tick().repeat(2)
                assert ctx.get(record.as_value()) == sum(w << 32 * i for i, w in enumerate(model[at]))

    sim = Simulator(dut)
    sim.add_clock(8e-9)
    sim.add_testbench(bench)
    sim.run()
    assert stalled > 0


def write_bus(ctx, dut, table, index, word, mask, value, model):
    """A write of the command engine, in ``model`` as well; the caller ticks."""
    ctx.set(dut.ctx.payload, {"table": table, "index": index, "word": word, "bytes": mask, "data": value})
    ctx.set(dut.ctx.valid, 1)
    assert ctx.get(dut.ctx.ready)
    keep = sum(0xFF << 8 * b for b in range(4) if not mask >> b & 1)
    model[index][word] = model[index][word] & keep | value & ~keep & 0xFFFF_FFFF


def test_halved_table_against_a_list():
    """Both sides write; a read of a half sees a write in its cycle."""
    rng = random.Random(4)
    p = Params(CONFIGS["tiny"])
    seconds = (4, 5, 6, 7, 8)
    dut = HalvedTable(p, CtxTable.RESPONDER_HOT, RESPONDER_HOT, 8, seconds)
    words = RESPONDER_HOT.size // 4
    model = [[0] * words for _ in range(8)]

    async def bench(ctx):
        for _ in range(500):
            index, second = rng.randrange(8), rng.randrange(2)
            if rng.random() < 0.5:
                write_bus(ctx, dut, CtxTable.RESPONDER_HOT, rng.choice([index, rng.randrange(8)]), rng.randrange(words),
                          rng.randrange(16), rng.getrandbits(32), model)  # fmt: skip
            else:
                at, half = rng.choice([index, 3]), rng.randrange(2)
                mask, value = rng.getrandbits(words), rng.getrandbits(32 * words)
                ctx.set(dut.write_en, 1)
                ctx.set(dut.write_index, at)
                ctx.set(dut.write_second, half)
                ctx.set(dut.write_words, mask)
                ctx.set(dut.write_data, RESPONDER_HOT.layout.from_bits(value))
                ctx.set(dut.ctx.payload.table, CtxTable.RESPONDER_HOT)
                assert not ctx.get(dut.ctx.ready)
                for word in range(words):
                    if mask >> word & 1 and (word in seconds) == half:
                        model[at][word] = value >> 32 * word & 0xFFFF_FFFF
            ctx.set(dut.read_index, index)
            ctx.set(dut.read_second, second)
            want = sum(w << 32 * i for i, w in enumerate(model[index]) if (i in seconds) == second)
            await ctx.tick()
            ctx.set(dut.ctx.valid, 0)
            ctx.set(dut.write_en, 0)
            ctx.set(dut.read_index, rng.randrange(8))
            await ctx.tick()
            assert ctx.get((dut.second if second else dut.first).as_value()) == want

    sim = Simulator(dut)
    sim.add_clock(8e-9)
    sim.add_testbench(bench)
    sim.run()
    with pytest.raises(ValueError, match="no half"):
        HalvedTable(p, CtxTable.RESPONDER_HOT, RESPONDER_HOT, 8, (1, 2))


@pytest.mark.parametrize("config", ["tiny", "hundred"])
def test_address_table_against_a_list(config):
    """An index that stays for two cycles has its record when it is due, and a new one every other cycle."""
    rng = random.Random(5)
    p = Params(CONFIGS[config])
    dut = AddressTable(p)
    words = ADDRESS_CTX.size // 4
    model = [[0] * words for _ in range(8)]

    async def bench(ctx):
        for _ in range(300):
            write_bus(ctx, dut, CtxTable.ADDRESS, rng.randrange(8), rng.randrange(words), rng.randrange(16), rng.getrandbits(32),
                      model)  # fmt: skip
            await ctx.tick()
        ctx.set(dut.ctx.valid, 0)
        for port in (0, 1):
            index, record = dut.read(port)
            asked = []
            for cycle in range(60):
                if cycle % 2 == 0:
                    asked.append(rng.randrange(8))
                    ctx.set(index, asked[-1])
                if cycle >= p.address_cycles and (cycle - p.address_cycles) % 2 == 0:
                    row = model[asked[(cycle - p.address_cycles) // 2]]
                    assert ctx.get(record.as_value()) == sum(w << 32 * i for i, w in enumerate(row))
                await ctx.tick()

    sim = Simulator(dut)
    sim.add_clock(8e-9)
    sim.add_testbench(bench)
    sim.run()
