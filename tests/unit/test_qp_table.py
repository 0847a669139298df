"""Context table: byte writes of the bus, word writes of the engine, read latency."""

import random

import pytest
from amaranth.sim import Simulator

from rnic.abi import RESPONDER_HOT, CtxTable
from rnic.config import CONFIGS, Params
from rnic.qp.table import ContextTable


@pytest.mark.parametrize("seed", range(3))
def test_table_against_a_list(seed):
    rng = random.Random(seed)
    p = Params(CONFIGS["tiny"])
    dut = ContextTable(p, CtxTable.RESPONDER_HOT, RESPONDER_HOT, 8, read_ports=2, engine_writes=True)
    words = RESPONDER_HOT.size // 4
    model = [[0] * words for _ in range(8)]
    stalled = 0

    async def bench(ctx):
        nonlocal stalled
        for _ in range(600):
            table = rng.choice([CtxTable.RESPONDER_HOT, CtxTable.TPT])
            index, word, mask, value = rng.randrange(8), rng.randrange(words), rng.randrange(16), rng.getrandbits(32)
            bus = rng.random() < 0.6
            ctx.set(dut.ctx.payload, {"table": table, "index": index, "word": word, "bytes": mask, "data": value})
            ctx.set(dut.ctx.valid, bus)
            engine = rng.random() < 0.4
            eindex, emask, evalue = rng.randrange(8), rng.getrandbits(words), rng.getrandbits(32 * words)
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
            for port, at in ((0, rng.randrange(8)), (1, rng.randrange(8))):
                index_signal, record = dut.read(port)
                ctx.set(index_signal, at)
                await ctx.tick().repeat(2)
                assert ctx.get(record.as_value()) == sum(w << 32 * i for i, w in enumerate(model[at]))

    sim = Simulator(dut)
    sim.add_clock(8e-9)
    sim.add_testbench(bench)
    sim.run()
    assert stalled > 0
