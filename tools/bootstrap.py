#!/usr/bin/env python3
"""Make .venv with everything rnic needs from PyPI. Runs on a bare Python; what is missing is named in one line."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
TOOLS = {"g++": "g++", "make": "make", "perl": "perl", "git": "git"}  # command: Debian package


def fail(text: str) -> None:
    print(f"rnic: {text}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs before any requirement is checked)
        fail(f"Python is {sys.version.split()[0]}, 3.11 or newer is needed (package: python3)")
    for command, package in TOOLS.items():
        if shutil.which(command) is None:
            fail(f"{command} is missing (Debian package: {package})")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        fail("the venv module is missing (Debian package: python3-venv)")
    if not (VENV / "bin" / "python").exists():
        print("rnic: making .venv", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    print("rnic: installing rnic and its requirements into .venv", flush=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "-e", f"{ROOT}[dev]"]
    if subprocess.run(pip, cwd=ROOT).returncode:
        fail("pip could not install the requirements (see above)")
    (VENV / "ready").touch()


if __name__ == "__main__":
    main()
