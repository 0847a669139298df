"""Builds Verilated models for cocotb and runs bench modules on them from pytest.

`build` returns a directory below ``build/cocotb`` named by the content of what went in; `run` runs one bench module there
and raises `BenchFailed`, with the failing lines, when one of its tests did not pass.
"""

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from amaranth.lib import wiring
from cocotb_tools.runner import Verilator as CocotbVerilator

import rnic
from rnic.verilog import to_verilog
from rnic_sim.build import build_root
from rnic_sim.toolchain import compiler_version, find_verilator, need_tool

__all__ = ["BenchFailed", "build", "run"]

# Only the ports of the top are public: VPI access to every signal costs three quarters of the speed.
_VISIBLE = '`verilator_config\npublic_flat_rw -module "{top}" -var "*"\n'
_VERILATE = ["--assert", "-Wno-fatal", "-Wno-lint", "-Wno-style", "--x-assign", "0", "--x-initial", "0", "--output-split", "6000"]
# -O1: compiles in three quarters of the time of -Os (Verilator's choice) and runs as fast here, where Python takes most of it.
_MAKE = ["OPT_FAST=-O1", "CFG_CXXFLAGS_PCH_I=-include"]  # the wheel's makefile has no flag that includes its own header
_RUNTIME = ("verilated", "verilated_vpi", "verilated_threads", "verilated_dpi")
_WORTH_SHOWING = re.compile(r"%Error|Assertion failed|Error:|Exception|assert |FAIL|^\s+File |Traceback|CRITICAL|ERROR")


class BenchFailed(AssertionError):
    """A bench did not pass, or its simulator died. The message ends with the lines that tell why."""


class _Runner(CocotbVerilator):
    """cocotb's runner with the Verilator that `find_verilator` chose, its make variables set right for this machine, and
    run-time objects shared between models."""

    def __init__(self, runtime: Path | None = None):
        self._runtime = runtime
        super().__init__()

    def _simulator_in_path_build_only(self) -> None:
        verilator = find_verilator()
        self.executable = verilator.command
        self.env["VERILATOR_ROOT"] = str(verilator.root)

    def _build_command(self):
        verilate, make = super()._build_command()
        verilate.remove("--public-flat-rw")
        gxx = need_tool("g++")
        make += [*_MAKE, f"CXX={gxx}", f"LINK={gxx}", "AR=ar", f"PERL={shutil.which('perl') or 'perl'}",
                 f"PYTHON3={sys.executable}", f"OBJCACHE={shutil.which('ccache') or ''}"]  # fmt: skip
        # After Verilator, before make: objects newer than the makefile are not compiled again.
        objects = [str(path) for path in sorted(self._runtime.glob("*.o"))] if self._runtime else []
        return [verilate, ["cp", *objects, str(self.build_dir)], make] if objects else [verilate, make]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock: one pytest worker builds, the others wait and find the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def build(design: Callable[[], wiring.Component] | str, name: str, *, config: object = None, waves: bool = False) -> Path:
    """Model of a component, or of Verilog text whose top module is ``name``; returns its directory.

    A component is given as what makes it, ``config`` then holds everything it depends on besides the sources (its ``repr``
    counts): as long as neither has changed it is not even elaborated. The same Verilog returns the same directory at once,
    also from another process. Ports are named as `rnic.verilog.to_verilog` names them, members joined by one underscore;
    besides ``clk`` and ``rst``. ``waves`` (or ``WAVES=1`` in the environment) compiles in what `run` needs to write waves.
    Raises `BenchFailed` with what the tools said, `MissingTool`.
    """
    waves = waves or os.environ.get("WAVES", "0") not in ("", "0")
    tools = (find_verilator().version, version("cocotb"), compiler_version(), repr(_VERILATE + _MAKE), str(waves))
    root = build_root() / "cocotb"
    if isinstance(design, str):
        return _build_text(design, name, root, tools, waves)
    known = root / f"{name}-{_digest(_sources(), name, repr(config), version('amaranth'), *tools)}.model"
    with _locked(known.with_suffix(".lock")):
        home = root / known.read_text() if known.is_file() else None
        if home is None or not (home / "done").is_file():
            home = _build_text(to_verilog(design(), name=name), name, root, tools, waves)
            known.write_text(home.name)
    return home


def _sources() -> str:
    """All the Python that can change a model: the hardware, and the harness around it."""
    files = [*Path(rnic.__file__).parent.rglob("*.py"), Path(__file__).with_name("harness.py")]
    return "".join(f"{path.name}\n{path.read_text()}" for path in sorted(files))


def _build_text(text: str, name: str, root: Path, tools: tuple[str, ...], waves: bool) -> Path:
    home = root / f"{name}-{_digest(text, *tools)}"
    if (home / "done").is_file():
        return home
    runtime = root / f"runtime-{_digest(*tools)}"
    with _locked(root / f"{home.name}.lock"):
        if not (home / "done").is_file():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
            (home / f"{name}.v").write_text(text)
            (home / "visible.vlt").write_text(_VISIBLE.format(top=name))
            log = home / "build.log"
            try:
                _Runner(runtime).build(
                    sources=[home / "visible.vlt", home / f"{name}.v"], hdl_toplevel=name, build_dir=home,
                    timescale=("1ns", "1ps"), build_args=_VERILATE, waves=waves, log_file=log,
                )  # fmt: skip
            except (SystemExit, RuntimeError) as error:
                said = log.read_text().splitlines()[-40:] if log.is_file() else []
                raise BenchFailed("\n".join([f"the model {name} was not built: {error}", *said])) from None
            (home / "done").touch()
            _keep_runtime(home, runtime)
    return home


def _keep_runtime(home: Path, runtime: Path) -> None:
    """Keeps the objects of Verilator's run time for the next model (they do not depend on the design)."""
    if runtime.is_dir():
        return
    work = Path(tempfile.mkdtemp(prefix="runtime.", dir=runtime.parent))
    for part in _RUNTIME:
        if (home / f"{part}.o").is_file():
            shutil.copy2(home / f"{part}.o", work)
    try:
        work.rename(runtime)
    except OSError:  # another worker was first
        shutil.rmtree(work)


def run(module: str, model: Path, test_dir: Path, *, seed: int = 1, tests: str | Sequence[str] | None = None,
        cycles: int | None = None, env: Mapping[str, str] | None = None, waves: bool = False) -> int:  # fmt: skip
    """Runs the cocotb tests of ``module`` (those whose names are or begin with ``tests``); returns how many passed.

    ``test_dir``: where logs, results and waves go. ``seed``: of Python's random numbers, also of cocotb; printed, so that
    pytest shows it with a failure; ``COCOTB_RANDOM_SEED`` in the environment overrides it. ``cycles``: upper limit for
    each test's own time-out (`rnic_tb.bench.clock.bench`). Raises `BenchFailed`: a test failed or was not found, an assertion
    of the hardware failed, the simulator died.
    """
    __tracebackhide__ = True  # the message says it all
    seed = int(os.environ.get("COCOTB_RANDOM_SEED", seed))
    print(f"{module} on {model.name}: COCOTB_RANDOM_SEED={seed}")
    log, results = test_dir / f"{module.rsplit('.', 1)[-1]}.log", test_dir / "results.xml"
    chosen = [tests] if isinstance(tests, str) else tests
    pattern = rf"\.({'|'.join(map(re.escape, chosen))})(/|$)" if chosen else None
    died = None
    try:
        _Runner().test(
            test_module=module, hdl_toplevel=model.name.rsplit("-", 1)[0], hdl_toplevel_lang="verilog", build_dir=model,
            test_dir=test_dir, results_xml=str(results.absolute()), log_file=log, seed=seed, test_filter=pattern, waves=waves,
            extra_env={"RNIC_BENCH_CYCLES": str(cycles or "")} | dict(env or {}),
        )  # fmt: skip
    except (SystemExit, RuntimeError) as error:
        died = error
    passed, failures = _read_results(results)
    if died is None and not failures and passed:
        return passed
    why = "; ".join(failures) or (f"the simulator ended: {died}" if died else f"no test of {module} ran")
    raise BenchFailed("\n".join([f"{module}, seed {seed}: {why}", *_telling_lines(log)]))


def _read_results(path: Path) -> tuple[int, list[str]]:
    """(tests passed, "name: message" of each that did not)."""
    if not path.is_file():
        return 0, []
    passed, failures = 0, []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error")]
        if bad:
            message = (bad[0].get("message") or bad[0].text or "failed").strip()
            failures.append(f"{case.get('name')}: {message}")
        elif not any(part.tag == "skipped" for part in case):
            passed += 1
    return passed, failures


def _telling_lines(log: Path, around: int = 2, most: int = 100) -> list[str]:
    """The lines of a simulator's log that speak of errors, with their neighbours; the last ones if there are many."""
    if not log.is_file():
        return []
    lines = log.read_text(errors="replace").splitlines()
    wanted = {near for at, line in enumerate(lines) if _WORTH_SHOWING.search(line)
              for near in range(max(0, at - around), min(len(lines), at + around + 1))}  # fmt: skip
    return [lines[at] for at in sorted(wanted)][-most:] or lines[-20:]
