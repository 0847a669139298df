"""Csr behind an AXI4-Lite master, doorbells and mailbox answered by the bench."""

import random
from typing import Any

import cocotb
from cocotb.triggers import ClockCycles, RisingEdge

from rnic import abi
from rnic.abi import register
from rnic.config import Params, named_config
from rnic.records import Doorbell

from .axi import Registers
from .clock import bench, start
from .streams import ItemSink, ItemSource, PackedPort, pattern

P = Params(named_config("tiny"))
PAGES = {"sq": (abi.DB_SQ, P.num_qps, P.qpn_bits), "rq": (abi.DB_RQ, P.num_qps, P.qpn_bits),
         "cq": (abi.DB_CQ, P.num_cqs, P.cqn_bits), "eq": (abi.DB_EQ, P.num_eqs, 1)}  # fmt: skip


def idle(dut: Any) -> None:
    """Inputs that no test below drives by a model of its own."""
    for name in ("result_valid", "mailbox_index", "mailbox_write", "mailbox_data", "counter_value", "eq_event", "fatal",
                 "reset_busy", "command_ready"):  # fmt: skip
        getattr(dut, f"csr_{name}").value = 0
    for name in PAGES:
        getattr(dut, f"csr_doorbell_{name}_ready").value = 1


@bench(4_000)
async def capabilities(dut: Any) -> None:
    """What a driver reads before it does anything."""
    registers = Registers(dut, "csr_axil")
    idle(dut)
    await start(dut, "capabilities")
    wanted = {"MAGIC": abi.MAGIC, "ABI_VERSION": abi.ABI_VERSION, "CLOCK_HZ": P.config.clock_hz, "DATA_WIDTH": P.data_width,
              "NUM_QPS": P.num_qps, "NUM_MRS": P.num_mrs, "NUM_CQS": P.num_cqs, "MAX_SGE": P.max_sge, "STATUS": 0}  # fmt: skip
    for name, value in wanted.items():
        await registers.write(register(name), 0xFFFF_FFFF)  # read-only: must not change
        assert await registers.read(register(name)) == value, name


@bench(20_000)
@cocotb.parametrize(stalls=["none", "half", "bursts"])
async def doorbells(dut: Any, stalls: str) -> None:
    """Every good doorbell comes out once, in order on its page, before its write is answered; bad ids only count."""
    registers = Registers(dut, "csr_axil")
    idle(dut)
    rng = random.Random(f"{cocotb.RANDOM_SEED} doorbells {stalls}")
    sinks = {name: ItemSink(PackedPort(dut, f"csr_doorbell_{name}"), dut.clk, pattern(stalls, rng)) for name in PAGES}
    bad = 0

    async def count_bad() -> None:
        nonlocal bad
        while True:
            await RisingEdge(dut.csr_bad_id)
            bad += 1

    await start(dut, "doorbells")
    cocotb.start_soon(count_bad())
    wrong = 0
    for _ in range(60):
        name = rng.choice(list(PAGES))
        page, count, bits = PAGES[name]
        number, datum = rng.choice([rng.randrange(count), count - 1, count, 0x3FFF]), rng.getrandbits(32)
        await registers.write(page + 4 * number, datum)
        if number >= count:
            wrong += 1
            continue
        assert len(sinks[name].received) == 1, "the write was answered before its doorbell was out"
        got = Doorbell(bits).from_bits(await sinks[name].receive())
        assert (got.id, got.counter, got.arm) == (number, datum & 0xFF_FFFF, datum >> 30)
    await ClockCycles(dut.clk, 10)
    assert not any(sink.received for sink in sinks.values())
    assert bad == wrong > 5


@bench(20_000)
async def bytes_and_words(dut: Any) -> None:
    """Writes of single bytes into mailbox and registers against a plain model, channels paused at random."""
    registers = Registers(dut, "csr_axil")
    idle(dut)
    rng = await start(dut, "bytes")
    master = registers.master
    for channel in (master.write_if.aw_channel, master.write_if.w_channel, master.write_if.b_channel,
                    master.read_if.ar_channel, master.read_if.r_channel):  # fmt: skip
        channel.set_pause_generator(pattern("half", rng))
    model = {abi.MAILBOX_BASE + 4 * n: bytearray(4) for n in range(abi.MAILBOX_WORDS)}
    model[register("TIMER_SCALE")] = bytearray(4)
    for address in model:
        await registers.write(address, 0)
    for _ in range(120):
        address, first = rng.choice(list(model)), rng.randrange(4)
        data = rng.randbytes(rng.randint(1, 4 - first))
        await registers.write_bytes(address + first, data)
        model[address][first : first + len(data)] = data
        address = rng.choice([address, rng.choice(list(model))])
        assert await registers.read(address) == int.from_bytes(model[address], "little"), hex(address)


@bench(10_000)
async def command(dut: Any) -> None:
    """A command goes out once; busy until its status is back; the engine's mailbox words are read back."""
    registers = Registers(dut, "csr_axil")
    idle(dut)
    rng = random.Random(f"{cocotb.RANDOM_SEED} command")
    codes = ItemSink(PackedPort(dut, "csr_command"), dut.clk, pattern("half", rng))
    status = ItemSource(PackedPort(dut, "csr_result"), dut.clk)
    await start(dut, "command")
    for code in (1, 7, 11):
        await registers.write(abi.MAILBOX_BASE + 8, 0x1000 + code)
        await registers.write(register("CMD_OP"), code)
        assert await codes.receive() == code
        assert await registers.read(register("CMD_STATUS")) >> 31
        await registers.write(register("CMD_OP"), code + 1)  # ignored while busy
        dut.csr_mailbox_index.value = 2
        await ClockCycles(dut.clk, 4)
        assert int(dut.csr_mailbox_value.value) == 0x1000 + code
        dut.csr_mailbox_index.value, dut.csr_mailbox_data.value, dut.csr_mailbox_write.value = 5, 0x2000 + code, 1
        await ClockCycles(dut.clk, 1)
        dut.csr_mailbox_write.value = 0
        status.send(code ^ 3)
        while await registers.read(register("CMD_STATUS")) >> 31:
            pass
        assert await registers.read(register("CMD_STATUS")) == code ^ 3
        assert await registers.read(abi.MAILBOX_BASE + 4 * 5) == 0x2000 + code
    assert not codes.received
