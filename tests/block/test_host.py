"""The host's side of the RNIC under Verilator: DMA engines on AXI4, registers on AXI4-Lite."""

import pytest

from rnic.config import Params, named_config
from rnic_tb.bench.harness import HostHarness
from rnic_tb.bench.runner import build, run


@pytest.mark.parametrize("bench", ("tb_copy", "tb_csr"))
def test_host_side(bench, tmp_path):
    model = build(HostHarness(Params(named_config("tiny"))), "host_side")
    assert run(f"rnic_tb.bench.{bench}", model, tmp_path) >= 2
