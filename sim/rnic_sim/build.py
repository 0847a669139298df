"""Verilog of the NIC to a shared library that `rnic_sim.world` loads.

``build_model`` Verilates module ``rnic`` inside a generated shell, compiles it with g++ and links it with the harness.
Results are cached by content under ``build/sim/<hash>``; the objects that do not depend on the model (Verilator's run
time and the harness) under ``build/sim/runtime-<hash>``, so a changed block compiles the model alone.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from .enum_names import name_enums
from .shell import SHELL, Manifest, check_ports, find_ports, make_glue, make_shell
from .toolchain import MissingTool, Verilator, compiler_version, find_verilator, need_tool

__all__ = ["BuildError", "MissingTool", "build_known", "build_model", "build_root"]

_HARNESS = Path(__file__).parent / "harness"
_LOADED = time.time()  # sources changed since (or shortly before) may not be the ones this process runs
_SETTLED = 60  # seconds
_MAKERS = ("build.py", "enum_names.py", "lab.py", "names.py", "shell.py")  # of this package, what has a say in a model
_RUNTIME_SOURCES = ("world.cpp", "axi_host.cpp", "link.cpp", "capi.cpp")
_LIBRARY = "librnic.so"

# Verilator's own default, and in every comparison so far no slower a model than -O1 or -O2 and less compile time. A model
# of 57,000 lines of Verilog takes 69 s of processor time at 512 bits, 23 s at 64.
_OPT_FAST = ("-Os",)
# Code that runs once (construction, the wave hierarchy): its compile time is what counts.
_OPT_SLOW = ("-O0",)
_OPT_RUNTIME = ("-O2",)
_COMMON = (
    "-std=c++17", "-fPIC", "-pthread", "-w",
    # Two models in one process: neither may see the other's run time.
    "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-gnu-unique",
)
_VERILATE = (
    "--cc", "--prefix", "Vrnic", "--top-module", SHELL, "--assert", "--no-timing", "-Wno-lint", "-Wno-style", "-Wno-fatal",
    "-Wno-ENUMVALUE",
    "--x-assign", "0", "--x-initial", "0", "--output-split", "6000", "--output-split-cfuncs", "1500",
    # Sources joined into four of each kind: the same compile time as two, the same files however many cores there are.
    "--output-groups", "4",
)


class BuildError(RuntimeError):
    """Verilator or the compiler refused. The message ends with what it said."""


def build_root() -> Path:
    """Where build results go: ``$RNIC_BUILD_DIR``, else ``build/`` of the checkout, else ``build/`` here."""
    chosen = os.environ.get("RNIC_BUILD_DIR")
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / "build"


@dataclass
class _Job:
    """One object file to compile."""

    source: Path
    target: Path
    flags: tuple[str, ...]


def _digest(*parts: object) -> str:
    state = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
        state.update(f"{len(text)}:{text}".encode())
    return state.hexdigest()[:16]


def _harness_text() -> str:
    files = sorted(path for path in _HARNESS.rglob("*") if path.suffix in (".h", ".cpp"))
    return "".join(f"{path.relative_to(_HARNESS)}\n{path.read_text()}" for path in files)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on ``path``: one process builds, the others wait and find the result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _call(command: list[str], cwd: Path) -> None:
    environment = os.environ | {"CCACHE_SLOPPINESS": "pch_defines,time_macros"}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stderr or result.stdout).splitlines()[:40])
        raise BuildError(f"{Path(command[0]).name} failed on {command[-1]}:\n{tail}")


def _compile(jobs: list[_Job], workers: int, cwd: Path) -> None:
    """Compiles all jobs, the large ones first."""
    gxx = need_tool("g++")
    front = [ccache, gxx] if (ccache := shutil.which("ccache")) else [gxx]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_call, [*front, *job.flags, "-c", "-o", str(job.target), str(job.source)], cwd)
                   for job in sorted(jobs, key=lambda job: -job.source.stat().st_size)]
        for future in futures:
            future.result()


def _include_flags(verilator: Verilator, trace: bool) -> tuple[str, ...]:
    include = [f"-I{_HARNESS}"]
    if trace and verilator.bundled_fst:
        include.append(f"-I{_HARNESS / 'shim'}")
    include += [f"-I{verilator.include}", f"-I{verilator.include / 'vltstd'}"]
    fst = int(trace)
    defines = [f"-DVM_TRACE={fst}", f"-DVM_TRACE_FST={fst}", "-DVERILATOR=1", "-DVM_COVERAGE=0", "-DVM_SC=0",
               "-DVM_TIMING=0", "-DVM_TRACE_VCD=0", "-DVM_TRACE_SAIF=0"]
    return (*_COMMON, *include, *defines)


def _runtime(root: Path, names: list[str], verilator: Verilator, trace: bool, workers: int) -> list[Path]:
    """Objects of Verilator's run time and of the harness, compiled once for all models."""
    flags = _include_flags(verilator, trace)
    key = _digest(_harness_text(), verilator.version, compiler_version(), names, _COMMON, _OPT_RUNTIME, trace)
    home = root / f"runtime-{key}"
    done = home / "done"
    if not done.is_file():
        with _locked(root / f"runtime-{key}.lock"):
            if not done.is_file():
                home.mkdir(exist_ok=True)
                hooks = ("-include", str(_HARNESS / "vl_hooks.h"))
                jobs = [_Job(verilator.include / f"{name}.cpp", home / f"{name}.o", (*flags, *_OPT_RUNTIME, *hooks))
                        for name in names]
                jobs += [_Job(_HARNESS / name, home / f"{Path(name).stem}.o", (*flags, *_OPT_RUNTIME))
                         for name in _RUNTIME_SOURCES]
                _compile(jobs, workers, home)
                done.touch()
    return sorted(home.glob("*.o"))


def _hide_anonymous(verilog: str) -> str:
    """Names that Yosys made up (``\\$12``) get a leading underscore, which keeps them out of the waves: they are half of
    all signals and nobody looks at them."""
    return verilog.replace("\\$", "\\_$")


def _verilate(work: Path, verilator: Verilator, trace: bool, workers: int) -> dict[str, list[str]]:
    """Runs Verilator in ``work``; returns its lists of sources (without suffix) by the name of the make variable."""
    arguments = [*_VERILATE, "--Mdir", "obj", "-j", str(workers)]
    if trace:
        arguments += ["--trace-fst", "--trace-max-width", "4096"]
    result = verilator.run([*arguments, "rnic.v", "shell.v"], work)
    if result.returncode:
        tail = "\n".join((result.stdout + result.stderr).splitlines()[:40])
        raise BuildError(f"verilator failed:\n{tail}")
    classes = (work / "obj" / "Vrnic_classes.mk").read_text()
    blocks = re.findall(r"^(VM_\w+) \+= \\\n((?:\s+\S+ \\\n)*)", classes, re.M)
    return {name: re.findall(r"\S+(?= \\)", block) for name, block in blocks}


def _model_jobs(work: Path, sources: dict[str, list[str]], flags: tuple[str, ...]) -> tuple[list[_Job], list[_Job]]:
    """(precompiled headers, objects) of the Verilated model and its glue."""
    obj = work / "obj"
    flags = (*flags, f"-I{obj}")
    levels = {"fast": _OPT_FAST, "slow": _OPT_SLOW}
    groups = {"fast": sources["VM_CLASSES_FAST"] + sources["VM_SUPPORT_FAST"],
              "slow": sources["VM_CLASSES_SLOW"] + sources["VM_SUPPORT_SLOW"]}
    headers, jobs = [], []
    for kind, names in groups.items():
        header = obj / f"Vrnic__pch.h.{kind}"
        headers.append(_Job(obj / "Vrnic__pch.h", Path(f"{header}.gch"), (*flags, *levels[kind], "-x", "c++-header")))
        jobs += [_Job(obj / f"{name}.cpp", obj / f"{name}.o", (*flags, *levels[kind], "-include", str(header)))
                 for name in names]
    glue = work / "glue.cpp"
    jobs.append(_Job(glue, glue.with_suffix(".o"), (*flags, "-O1")))
    return headers, jobs


def _link(objects: list[Path], target: Path, trace: bool, verilator: Verilator) -> None:
    libraries = ["-llz4", "-lz"] if trace and not verilator.bundled_fst else []
    listing = target.with_suffix(".objects")
    listing.write_text("\n".join(f'"{path}"' for path in objects))
    _call([need_tool("g++"), "-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-o", str(target),
           f"@{listing}", *libraries], target.parent)
    listing.unlink()


def build_known(sources: Iterable[Path], facts: str, make: Callable[[], tuple[str, dict]]) -> Path:
    """`build_model` of what ``make()`` returns (Verilog and manifest), which is not even called when the outcome is known.

    It is known while neither the Python files below the directories ``sources``, nor ``facts``, nor any tool has changed.
    Files changed after this process began, or just before, are not trusted to be the ones it runs: then it is made.
    """
    files = sorted(path for directory in sources for path in directory.rglob("*.py"))
    files += [Path(__file__).with_name(name) for name in _MAKERS]
    if max(path.stat().st_mtime for path in files) > _LOADED - _SETTLED:
        return build_model(*make())
    text = "".join(f"{path.name}\n{path.read_text()}" for path in files)
    key = _digest(text, facts, _harness_text(), find_verilator().version, compiler_version(), version("amaranth"))
    note = build_root() / "sim" / f"{key}.model"
    home = note.parent / note.read_text() if note.is_file() else None
    if home is None or not (home / _LIBRARY).is_file():
        home = build_model(*make())
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(home.name)
        draft.replace(note)
    return home


def build_model(verilog_text: str, manifest: dict, *, trace: bool = True, jobs: int = 2) -> Path:
    """Compiles a NIC; returns the directory of the model, to be given to `World`.

    Parameters: ``verilog_text`` holds module ``rnic`` and everything below it; ``manifest`` see `Manifest` (it is stored
    beside the library, with keys of its own if it has some); ``trace`` compiles waves in (off at run time until asked
    for); ``jobs`` compilers at a time. The same input returns the cached result at once, also from another process that
    is building it. Raises ManifestError, BuildError, MissingTool.
    """
    facts = Manifest.of(manifest)
    ports = find_ports(verilog_text)
    check_ports(ports, facts)
    verilator = find_verilator()
    options = [_VERILATE, _COMMON, _OPT_FAST, _OPT_SLOW, _OPT_RUNTIME, trace]
    verilog_text = name_enums(verilog_text, manifest.get("states", {}))
    shell, glue = make_shell(ports, facts, manifest.get("probe_names", []), manifest.get("probe_taps")), make_glue(ports, facts)
    key = _digest(verilog_text, shell, glue, manifest, _harness_text(), verilator.version, compiler_version(), options)
    root = build_root() / "sim"
    home = root / key
    if (home / _LIBRARY).is_file():
        return home
    with _locked(root / f"{key}.lock"):
        if (home / _LIBRARY).is_file():
            return home
        started = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=root))
        try:
            (work / "rnic.v").write_text(_hide_anonymous(verilog_text))
            (work / "shell.v").write_text(shell)
            (work / "glue.cpp").write_text(glue)
            sources = _verilate(work, verilator, trace, jobs)
            verilated = time.monotonic()
            runtime = _runtime(root, sources["VM_GLOBAL_FAST"] + sources["VM_GLOBAL_SLOW"], verilator, trace, jobs)
            runtime_done = time.monotonic()
            headers, objects = _model_jobs(work, sources, _include_flags(verilator, trace))
            _compile(headers, jobs, work)
            _compile(objects, jobs, work)
            _link([job.target for job in objects] + runtime, work / _LIBRARY, trace, verilator)
            ended = time.monotonic()
            seconds = {"verilate": verilated - started, "runtime": runtime_done - verilated, "compile": ended - runtime_done}
            stored = manifest | asdict(facts) | {"build_seconds": {k: round(v, 2) for k, v in seconds.items()}}
            (work / "manifest.json").write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
            shutil.rmtree(work / "obj")
            work.rename(home)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return home
