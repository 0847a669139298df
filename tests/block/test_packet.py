"""Parser and builder under Verilator at 512 bits."""

import pytest

from rnic.config import Params
from rnic_tb.bench.harness import PacketHarness
from rnic_tb.bench.runner import build, run
from rnic_tb.bench.tb_packet import CONFIG


@pytest.mark.parametrize("block", ["parser", "builder"])
def test_packet(block, tmp_path):
    model = build(lambda: PacketHarness(Params(CONFIG)), "packet", config=CONFIG)
    assert run("rnic_tb.bench.tb_packet", model, tmp_path, tests=block) == 9
