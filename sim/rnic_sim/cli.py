"""The `rnic` command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

__all__ = ["app", "main"]

# ClickException of the click that typer uses, its own or the package
_CommandLineError = cast("type[typer.BadParameter]", typer.BadParameter.__bases__[0].__bases__[0])

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="rnic: a cycle-level RDMA NIC (RoCEv2).")  # fmt: skip
sim = typer.Typer(no_args_is_help=True, help="Run two RNICs back to back.")
app.add_typer(sim, name="sim")

ConfigOption = Annotated[str, typer.Option("--config", help="tiny, gigabit or hundred")]
SeedOption = Annotated[int, typer.Option(min=0, help="page placement and every random choice")]
MtuOption = Annotated[int, typer.Option(help="path MTU: 256, 512, 1024, 2048 or 4096")]
Ipv6Option = Annotated[bool, typer.Option("--ipv6", help="IPv6 instead of IPv4")]
HostOption = Annotated[int, typer.Option(metavar="CYCLES", min=1, help="host bus, AR to the first R beat")]
LinkOption = Annotated[int, typer.Option(metavar="CYCLES", min=1, help="link, one way")]
WavesOption = Annotated[Path | None, typer.Option(metavar="FILE", help="waves (FST), and a GTKWave view beside them")]
PcapOption = Annotated[Path | None, typer.Option(metavar="FILE", help="frames with cycle time stamps")]
TraceOption = Annotated[Path | None, typer.Option(metavar="FILE", help="every work request step by step, for ui.perfetto.dev")]
JsonOption = Annotated[Path | None, typer.Option(metavar="FILE", help="the result")]


@sim.command()
def demo(
    config: ConfigOption = "tiny",
    payload: Annotated[int, typer.Option("--bytes", min=1, max=4096, help="bytes of the WRITE")] = 1000,
    mtu: MtuOption = 1024,
    ipv6: Ipv6Option = False,
    host_latency: HostOption = 64,
    link_latency: LinkOption = 8,
    seed: SeedOption = 1,
    waves: WavesOption = None,
    pcap: PcapOption = None,
    trace: TraceOption = None,
    json: JsonOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="every event under its step")] = False,
) -> None:
    """SEND/RECV of an address and a key, then an RDMA WRITE there, step by step."""
    from .demo import run_demo
    from .files import Files

    console = Console()
    console.print(f"Building the {config} model (cached after the first time) ...", highlight=False)
    result = run_demo(config, payload=payload, mtu=mtu, ipv6=ipv6, seed=seed, host_latency=host_latency,
                      link_latency=link_latency, files=Files(waves, pcap, trace, json), verbose=verbose,
                      console=console)  # fmt: skip
    console.print(
        f"Data, guard bytes and completions, compared by software: all right. {result.frames} frames, {result.cycles} cycles, "
        f"built in {result.sim['build_seconds']:.1f} s, run in {result.sim['run_seconds']:.1f} s.", highlight=False,
    )  # fmt: skip
    for kind, file in result.files.items():
        console.print(f"{kind}: {file}", highlight=False)


def _workload(kind: str, default_bytes: int, text: str) -> None:
    """Register ``rnic sim <kind>``."""

    def command(
        config: ConfigOption = "tiny",
        payload: Annotated[int, typer.Option("--bytes", metavar="N", help="bytes of a message")] = default_bytes,
        count: Annotated[int, typer.Option(metavar="N", help="messages, over all QPs")] = 16,
        qps: Annotated[int, typer.Option(metavar="N", help="queue pairs, in turn")] = 1,
        mtu: MtuOption = 1024,
        outstanding: Annotated[int, typer.Option(metavar="N", help="messages of a QP posted and not completed")] = 16,
        inline: Annotated[bool, typer.Option("--inline", help="data in the work request")] = False,
        sge: Annotated[int, typer.Option(metavar="N", help="pieces of the local buffer")] = 1,
        ipv6: Ipv6Option = False,
        host_latency: HostOption = 64,
        link_latency: LinkOption = 8,
        seed: SeedOption = 1,
        waves: WavesOption = None,
        pcap: PcapOption = None,
        trace: TraceOption = None,
        json: JsonOption = None,
        script: Annotated[Path | None, typer.Option(metavar="FILE", help="post what the file says (docs/script.md)")] = None,
    ) -> None:
        from .files import Files
        from .script import read_script
        from .workload import Options, WorkloadError, run_workload

        options = Options(config=config, bytes=payload, count=count, qps=qps, mtu=mtu, outstanding=outstanding, inline=inline,
                          sge=sge, ipv6=ipv6, host_latency=host_latency, link_latency=link_latency, seed=seed)  # fmt: skip
        plan = None if script is None else read_script(script, default_bytes=payload, default_sge=sge)
        console = Console()
        with _Bar(console) as bar:
            report = run_workload(kind, options, plan, files=Files(waves, pcap, trace, json), progress=bar.update)
        if not report.data_ok:
            raise WorkloadError(report.error)
        console.print(
            f"{report.count} messages, {report.payload_bytes} bytes in {report.cycles} cycles: {report.bytes_per_cycle:.2f} "
            f"bytes a cycle, latency p50 {report.latency_cycles['p50']}, p99 {report.latency_cycles['p99']}, "
            f"max {report.latency_cycles['max']} cycles; {report.frames} frames. Data, guard bytes and completions are right.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    sim.command(kind, help=text)(command)


_workload("send", 64, "SENDs from host A into receive buffers of host B.")
_workload("write", 64, "RDMA WRITEs from host A into memory of host B.")
_workload("read", 64, "RDMA READs by host A of memory of host B.")
_workload("atomic", 8, "Fetch-and-add and compare-and-swap by host A in memory of host B, 8 bytes each.")
_workload("mix", 64, "All operations at random, each of up to --bytes bytes.")


class _Bar:
    """A progress bar that shows itself when a run takes longer than two seconds, on a terminal only."""

    def __init__(self, console: Console):
        self._console, self._started = console, time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` messages."""
        if self._bar is None:
            if not self._console.is_terminal or time.monotonic() - self._started < 2:
                return
            self._bar = Progress(console=self._console, transient=True)
            self._task = self._bar.add_task("messages", total=total)
            self._bar.start()
        if self._task is not None:
            self._bar.update(self._task, completed=done)


@app.command()
def waves(
    view: Annotated[Path, typer.Argument(metavar="FILE", help="view (.gtkw, .sucl) that --waves left beside its FST")],
) -> None:
    """Open waves with GTKWave or Surfer."""
    if not view.is_file():
        raise FileNotFoundError(f"no file {view}")
    if view.suffix == ".sucl":  # <waves>.<operation>.sucl, for Surfer alone
        if (viewer := shutil.which("surfer")) is None:
            raise LookupError("no Surfer: put it on PATH")
        fst = view.with_suffix("").with_suffix(".fst").name
        subprocess.run([viewer, "--command-file", view.name, fst], cwd=view.parent, check=True)
    elif viewer := shutil.which("gtkwave"):
        subprocess.run([viewer, view.name], cwd=view.parent, check=True)  # the paths in the view are relative
    elif viewer := shutil.which("surfer"):
        subprocess.run([viewer, view.with_suffix(".fst").name], cwd=view.parent, check=True)
    else:
        raise LookupError("no wave viewer: install the package gtkwave (or surfer) and put it on PATH")


@app.command()
def bench(
    config: Annotated[list[str] | None, typer.Option("--config", help="hundred, gigabit or tiny; may be repeated")] = None,
    json: Annotated[Path | None, typer.Option(help="write the rows as JSON")] = None,
) -> None:
    """Measure every budget of the RNIC at its ports. Rows over their budget are printed, not judged."""
    from .bench import print_table, run_bench, write_json

    console = Console()
    results = {}
    for name in config or ["hundred", "gigabit"]:
        with console.status(f"{name} ...") as status:
            results[name] = run_bench(name, progress=status.update)
        print_table(console, name, results[name])
    if json is not None:
        write_json(json, results)


@app.command()
def verilog(
    output: Annotated[Path, typer.Option("-o", "--output", help="file to write")],
    config: ConfigOption = "gigabit",
    assertions: Annotated[bool, typer.Option("--assertions", help="keep assertions and prints")] = False,
) -> None:
    """Write the RNIC as one Verilog file (top module `rnic`, plain AXI names)."""
    from rnic.config import named_config
    from rnic.verilog import nic_verilog

    text = nic_verilog(named_config(config), assertions=assertions)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)


@app.command()
def abi(
    markdown: Annotated[bool, typer.Option("--markdown", help="one Markdown page")] = False,
    c_header: Annotated[bool, typer.Option("--c-header", help="a C99 header")] = False,
) -> None:
    """Print the contract between software and hardware."""
    from rnic.abi import export

    if markdown == c_header:
        raise typer.BadParameter("give --markdown or --c-header")
    print(export.markdown() if markdown else export.c_header(), end="")


def main() -> None:
    """Entry point: a wrong command line or configuration is one line and exit 2, a failed run one line and exit 1."""
    from .native import SimError

    try:
        app(standalone_mode=False)
    except _CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(error.format_message())
        else:
            print(f"rnic: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        print(f"rnic: {error}", file=sys.stderr)
        sys.exit(2)
    except (AssertionError, LookupError, TimeoutError, OSError, SimError, RuntimeError) as error:
        name = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        print(f"rnic: {name}{error}", file=sys.stderr)
        sys.exit(1)
