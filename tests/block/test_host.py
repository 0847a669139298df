"""The host's side of the RNIC under Verilator: DMA engines on AXI4, registers on AXI4-Lite."""

import pytest

from rnic.config import Params
from rnic_tb.bench.harness import HostHarness
from rnic_tb.bench.runner import build, run
from rnic_tb.bench.tb_csr import P


@pytest.mark.parametrize(("bench", "tests"), [("tb_copy", 9), ("tb_csr", 6)])
def test_host_side(bench, tests, tmp_path):
    model = build(lambda: HostHarness(Params(P.config)), "host_side", config=P.config)
    assert run(f"rnic_tb.bench.{bench}", model, tmp_path) == tests
