"""Parser and builder under Verilator at 512 bits."""

from rnic_tb.bench.harness import PacketHarness
from rnic_tb.bench.runner import build, run
from rnic_tb.bench.tb_packet import P


def test_parser_and_builder(tmp_path):
    model = build(PacketHarness(P), "packet")
    assert run("rnic_tb.bench.tb_packet", model, tmp_path) == 18
