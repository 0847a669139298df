"""The `rnic` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console

__all__ = ["app", "main"]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="rnic: a cycle-level RDMA NIC (RoCEv2).")  # fmt: skip
sim = typer.Typer(no_args_is_help=True, help="Run two RNICs back to back.")
app.add_typer(sim, name="sim")

ConfigOption = Annotated[str, typer.Option("--config", help="tiny, gigabit or hundred")]


@sim.command()
def demo(
    config: ConfigOption = "tiny",
    payload: Annotated[int, typer.Option("--bytes", min=1, max=4096, help="bytes of the WRITE")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    host_latency: Annotated[int, typer.Option(min=1, help="cycles from AR to the first R beat")] = 64,
    link_latency: Annotated[int, typer.Option(min=1, help="cycles one way")] = 8,
    waves: Annotated[Path | None, typer.Option(help="write waves (FST) and a GTKWave view beside it")] = None,
    pcap: Annotated[Path | None, typer.Option(help="write the frames with cycle time stamps")] = None,
    json: Annotated[Path | None, typer.Option(help="write the result as JSON")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="every event under its step")] = False,
) -> None:
    """SEND/RECV of an address and a key, then an RDMA WRITE there, step by step."""
    from .demo import run_demo

    console = Console()
    console.print(f"Building the {config} model (cached after the first time) ...", highlight=False)
    result = run_demo(config, payload=payload, seed=seed, host_latency=host_latency, link_latency=link_latency, waves=waves,
                      pcap=pcap, json_file=json, verbose=verbose, console=console)  # fmt: skip
    console.print(
        f"data, guard bytes and completions compared by software: all right. {result.frames} frames, {result.cycles} cycles, "
        f"built in {result.sim['build_seconds']:.1f} s, run in {result.sim['run_seconds']:.1f} s", highlight=False,
    )  # fmt: skip
    for kind, file in result.files.items():
        console.print(f"{kind}: {file}", highlight=False)


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
        raise click.UsageError("give --markdown or --c-header")
    print(export.markdown() if markdown else export.c_header(), end="")


def main() -> None:
    """Entry point: a wrong command line or configuration is one line and exit 2, a failed run one line and exit 1."""
    from .native import SimError

    try:
        app(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.ClickException as error:
        print(f"rnic: {error.format_message()}", file=sys.stderr)
        sys.exit(2)
    except ValueError as error:
        print(f"rnic: {error}", file=sys.stderr)
        sys.exit(2)
    except (AssertionError, LookupError, TimeoutError, OSError, SimError, RuntimeError) as error:
        print(f"rnic: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
