"""Clock, reset, time limits and seeds of the cocotb benches."""

import functools
import logging
import os
import random
from collections.abc import Callable
from typing import Any

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles

__all__ = ["PERIOD_NS", "bench", "start"]

PERIOD_NS = 8  # 125 MHz


def bench(cycles: int) -> Callable[[Any], Any]:
    """``cocotb.test`` that fails after ``cycles`` clock cycles (fewer when `runner.run` was given a lower limit)."""
    most = os.environ.get("RNIC_BENCH_CYCLES")
    limit = min(cycles, int(most)) if most else cycles
    return functools.partial(cocotb.test, timeout_time=limit * PERIOD_NS, timeout_unit="ns")()


async def start(dut: Any, name: str) -> random.Random:
    """Starts the clock, resets the design for four cycles; returns random numbers of their own for the test ``name``.

    Outputs of bus models must have been driven before: create them first, they begin idle.
    """
    logging.getLogger(f"cocotb.{dut._name}").setLevel(logging.WARNING)  # cocotbext-axi tells every burst
    rng = random.Random(f"{cocotb.RANDOM_SEED} {name}")
    dut.rst.value = 1
    Clock(dut.clk, PERIOD_NS, unit="ns").start()
    await ClockCycles(dut.clk, 4)
    dut.rst.value = 0
    await ClockCycles(dut.clk, 2)
    return rng
