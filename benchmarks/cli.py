"""The commands: run, memory, report."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import memory as soak
from benchmarks import peers, report
from benchmarks.campaign import Findings, run, steps
from benchmarks.fleet import Fleet, Setup, open_fleet
from benchmarks.grid import FULL, QUICK, Plan
from benchmarks.machine import machine, now, processor_ticks, stolen_share, versions
from benchmarks.results import FILE, MEMORY_FILE, Environment, Results, save
from benchmarks.targets import NARROW, WIDE

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console(highlight=False)

Out = Annotated[Path, typer.Option(help="Folder of results.json, report.md and the plots.")]
Peers = Annotated[Path, typer.Option(envvar=peers.FOLDER_VARIABLE, help="Folder of the peers' scripts.")]
Cache = Annotated[Path, typer.Option(help="Folder of exported models, logs and temporary files.")]
Minutes = Annotated[float, typer.Option(help="Length of the memory soak.", min=0)]
ServerOption = Annotated[
    list[str] | None, typer.Option(help="Further option of the server; may be repeated.")
]

OUT = Path("benchmarks/results")
CACHE = Path("build/bench")
MINUTES = 10.0


@app.command("run")
def measure(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, some minutes.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="The memory soak as well.")] = False,
    out: Out = OUT,
    peers_folder: Annotated[
        Path, typer.Option("--peers", envvar=peers.FOLDER_VARIABLE)
    ] = peers.DEFAULT_FOLDER,
    cache: Cache = CACHE,
    minutes: Minutes = MINUTES,
    server_option: ServerOption = None,
) -> None:
    """Measures the service beside its ceilings and its peers, and writes the report."""
    setup = _setup(QUICK if quick else FULL, cache, peers_folder, server_option)
    out.mkdir(parents=True, exist_ok=True)
    _grid(setup, out)
    if memory:
        _soak(setup, minutes, out)
    console.print(f"wrote {report.write(out)}")


@app.command("memory")
def measure_memory(
    *,
    out: Out = OUT,
    cache: Cache = CACHE,
    minutes: Minutes = MINUTES,
    server_option: ServerOption = None,
) -> None:
    """Keeps the service busy with mixed lengths up to 2,048 and writes its memory curve."""
    out.mkdir(parents=True, exist_ok=True)
    _soak(_setup(QUICK, cache, peers.DEFAULT_FOLDER, server_option), minutes, out)
    if (out / FILE).exists():
        console.print(f"wrote {report.write(out)}")


@app.command("report")
def render(*, out: Out = OUT) -> None:
    """Writes report and plots once more from the results in a folder."""
    console.print(f"wrote {report.write(out)}")


def _setup(plan: Plan, cache: Path, peers_folder: Path, server_options: list[str] | None) -> Setup:
    return Setup(
        plan=plan,
        repository=cache / "models",
        work=(cache / "work").resolve(),
        peers=peers_folder.resolve(),
        server_options=tuple(server_options or ()),
    )


def _grid(setup: Setup, out: Path) -> None:
    """Measures, and writes what was measured even where the run breaks off."""
    date, started = now(), time.monotonic()
    before, load = processor_ticks(), os.getloadavg()[0]
    findings = Findings()
    try:
        with open_fleet(setup) as fleet:
            _run(fleet, findings)
    finally:
        conditions = {
            "load average before": f"{load:.2f}",
            "processor time taken by the host": f"{stolen_share(before, processor_ticks()):.1%}",
        }
        environment = _environment(setup, date, time.monotonic() - started, conditions)
        save(_results(environment, findings), out / FILE)


def _run(fleet: Fleet, findings: Findings) -> None:
    if not console.is_terminal:
        run(fleet, findings, console.print)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # Without redraws between cells: the bar's thread would take its share of the cores.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=steps(fleet.setup.plan))

        def say(what: str) -> None:
            progress.update(task, advance=1, description=what, refresh=True)

        run(fleet, findings, say)


def _environment(setup: Setup, date: str, seconds: float, conditions: dict[str, str]) -> Environment:
    plan = setup.plan
    options = " ".join(setup.server_options) or "defaults"
    return Environment(
        date=date,
        seconds=seconds,
        machine=machine(),
        versions=versions() | peers.versions(setup.peers),
        settings={
            "extent": f"{plan.name}, {plan.rounds} rounds, {plan.window.seconds:g} s for each measurement",
            "server options": options,
            **conditions,
        },
        absent=peers.absent(setup.peers),
    )


def _results(environment: Environment, findings: Findings) -> Results:
    return Results(
        environment=environment,
        grid=tuple(findings.grid),
        growth=tuple(findings.growth),
        open_loop=tuple(findings.open_loop),
        failures=tuple(findings.failures),
    )


def _soak(setup: Setup, minutes: float, out: Path) -> None:
    """A fresh server, so that its memory holds nothing of what was measured before."""
    console.print(f"memory: {minutes:g} minutes")
    with open_fleet(setup) as fleet:
        found = soak.measure(fleet.workers.generator, fleet.service, (NARROW, WIDE), minutes * 60)
    save(found, out / MEMORY_FILE)
