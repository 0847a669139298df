"""The runner of the cocotb benches: a failure must be a failure, with its reason; the cache; the wrong Verilator on PATH."""

import os

import pytest
from amaranth import *
from amaranth.hdl import Assert
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from rnic_tb.bench.runner import BenchFailed, build, run


class Counter(wiring.Component):
    """Counts enabled cycles; an assertion holds it below 100."""

    enable: In(1)
    count: Out(8)

    def elaborate(self, platform):
        m = Module()
        m.d.sync += [self.count.eq(self.count + self.enable), Assert(self.count < 100, "count is not below 100")]
        return m


def model():
    return build(Counter, "counter", config="test_runner")


def test_passing_tests_are_counted_and_the_model_is_cached(tmp_path, monkeypatch, capsys):
    old = tmp_path / "bin" / "verilator"  # an old Verilator in front of PATH must not be taken
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'Verilator 5.006 2022-01-22 rev (Debian)'\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{old.parent}{os.pathsep}{os.environ['PATH']}")
    home = model()
    made = (home / "done").stat().st_mtime_ns
    assert run("tests.block.tb_runner", home, tmp_path, tests="counts", seed=77) == 2
    assert "COCOTB_RANDOM_SEED=77" in capsys.readouterr().out
    assert model() == home and (home / "done").stat().st_mtime_ns == made


@pytest.mark.parametrize(("test", "reason"), [
    ("wrong", "AssertionError: seven is not eight"), ("hangs", "SimTimeoutError"),
    ("hardware", "count is not below 100"), ("absent", "no test of"),
])  # fmt: skip
def test_failures_are_raised_with_their_reason(test, reason, tmp_path):
    with pytest.raises(BenchFailed, match=reason):
        run("tests.block.tb_runner", model(), tmp_path, tests=test)


def test_cycle_limit_of_the_caller(tmp_path):
    with pytest.raises(BenchFailed, match="SimTimeoutError"):
        run("tests.block.tb_runner", model(), tmp_path, tests="counts", cycles=10)


def test_verilog_that_does_not_compile(tmp_path):
    with pytest.raises(BenchFailed, match="syntax error"):
        build("module broken(input clk); nonsense endmodule\n", "broken")
