"""The whole RNIC on cocotb's bus models, against the software endpoint; one simulation for each kind of test."""

import pytest

from rnic.config import Params
from rnic.nic import Nic
from rnic_tb.bench.runner import build, run
from rnic_tb.bench.tb_nic import CONFIG
from tests.rules import rule


@pytest.mark.parametrize(("tests", "count"), [
    ("one_at_a_time", 4), ("both_ways_at_once", 3), ("wrong_key", 2), ("receiver_not_ready", 1), ("bad_wire", 3),
])  # fmt: skip
@rule("R-SEQ-1", "R-SEQ-2", "R-DUP-1", "R-RNR-4", "R-MR-1")
def test_nic_and_software_endpoint(tests, count, tmp_path):
    model = build(lambda: Nic(Params(CONFIG)), "nic", config=CONFIG)
    assert run("rnic_tb.bench.tb_nic", model, tmp_path, tests=tests) == count
