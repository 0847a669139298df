"""cocotb tests for `test_runner`: two that pass, and one of each way to fail."""

import cocotb
from cocotb.triggers import ClockCycles, ValueChange

from rnic_tb.bench.clock import bench, start


@bench(200)
@cocotb.parametrize(cycles=[5, 50])
async def counts(dut, cycles):
    dut.enable.value = 0
    await start(dut, "counts")
    before = int(dut.count.value)
    dut.enable.value = 1
    await ClockCycles(dut.clk, cycles)
    dut.enable.value = 0
    await ClockCycles(dut.clk, 2)
    assert int(dut.count.value) - before == cycles


@bench(200)
async def wrong(dut):
    await start(dut, "wrong")
    assert 7 == 8, "seven is not eight"


@bench(100)
async def hangs(dut):
    dut.enable.value = 0
    await start(dut, "hangs")
    await ValueChange(dut.count)


@bench(1000)
async def hardware(dut):
    await start(dut, "hardware")
    dut.enable.value = 1
    await ClockCycles(dut.clk, 500)
