"""The whole RNIC on cocotb's bus models, against the software endpoint."""

from rnic.config import Params
from rnic.nic import Nic
from rnic_tb.bench.runner import build, run
from rnic_tb.bench.tb_nic import CONFIG


def test_nic_and_software_endpoint(tmp_path):
    model = build(Nic(Params(CONFIG)), "nic")
    assert run("rnic_tb.bench.tb_nic", model, tmp_path) == 9
