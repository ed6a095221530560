"""Measures the service beside its ceilings and other servers, and compares two checkouts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import compare as comparison
from benchmarks import enrichment, peers, report, threads, variants
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.environment import Environment, Setup, export_models, open_environment
from benchmarks.processes import library_versions, machine, now, processor_ticks, stolen_share, worker
from benchmarks.results import ENRICHMENT_FILE, MEMORY_FILE, RESULTS_FILE, Conditions, Results, save
from benchmarks.runner import Findings, measure_memory, run, steps
from benchmarks.summary import Spread, enrichment_ratio, spread
from benchmarks.systems import MeasurementError
from benchmarks.tables import number, with_range
from benchmarks.workload import FULL, NARROW, QUICK

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

CACHE = Path("build/bench")
# Threads that use less of a core are not shown.
LEAST_SHARE = 0.01
FULL_REPORT, QUICK_REPORT = Path("benchmarks/results"), CACHE / "quick"

Out = Annotated[
    Path | None,
    typer.Option(
        help=f"Folder for report.md and the plots.  [default: {FULL_REPORT}; with --quick {QUICK_REPORT}]"
    ),
]
Cache = Annotated[Path, typer.Option(help="Folder for measurements (JSON), exported models and logs.")]
Minutes = Annotated[float, typer.Option(help="Duration of the memory measurement, in minutes.", min=0.1)]
Quick = Annotated[bool, typer.Option("--quick", help="Measure fewer cells, in a few minutes.")]
ServerOption = Annotated[
    list[str] | None,
    typer.Option(help="Further option of `python -m server`, such as --threads=1. May be repeated."),
]


@app.command("run")
def measure(
    *,
    quick: Quick = False,
    memory: Annotated[bool, typer.Option("--memory", help="Measure memory as well.")] = False,
    minutes: Minutes = 10.0,
    out: Out = None,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Measure the service beside its ceilings and the installed peers, and write the report.

    The full run takes about half an hour on two cores. PEERS_HOME is the folder of the peers, and
    TRITON_BACKENDS that of Triton's own backends; see benchmarks/peers/install.sh. Peers that are not
    installed are skipped, and the report names them.
    """
    setup = Setup(QUICK if quick else FULL, cache, tuple(server_option or ()))
    with _failures_reported():
        _measure_grid(setup)
        if memory:
            _measure_memory(setup, minutes)
        _write_report(setup, out)


@app.command("memory")
def measure_memory_only(
    *, minutes: Minutes = 10.0, out: Out = None, cache: Cache = CACHE, server_option: ServerOption = None
) -> None:
    """Measure the server's memory under mixed lengths up to 2,048, and update the report if there is one."""
    setup = Setup(FULL, cache, tuple(server_option or ()))
    with _failures_reported():
        _measure_memory(setup, minutes)
        if (_measurements(setup) / RESULTS_FILE).exists():
            _write_report(setup, out)


@app.command("enrichment")
def measure_enrichment(*, out: Out = None, cache: Cache = CACHE) -> None:
    """Measure enrichment through one server and in process, and update the report if there is one."""
    setup = Setup(FULL, cache)
    with _failures_reported():
        setup.work.mkdir(parents=True, exist_ok=True)
        with worker() as torch_worker:
            repository = export_models(Checkout(), (NARROW,), cache, torch_worker)
        found = enrichment.measure(repository, setup.work, console.print)
        save(found, _measurements(setup) / ENRICHMENT_FILE)
        console.print(f"through one server / in process: {with_range(enrichment_ratio(found))}")
        if (_measurements(setup) / RESULTS_FILE).exists():
            _write_report(setup, out)


@app.command("report")
def render(*, quick: Quick = False, out: Out = None, cache: Cache = CACHE) -> None:
    """Write report and plots again from the measurements of the last run."""
    with _failures_reported():
        _write_report(Setup(QUICK if quick else FULL, cache), out)


@app.command("compare")
def compare(
    other: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Root folder of the other checkout.")
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="5 rounds of 0.25 s, not 15 of 0.5 s.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Number of rounds in each cell.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.05, help="Duration of each measurement, in seconds.")
    ] = None,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Compare the rates of this checkout's server with those of another checkout, such as a git worktree.

    Both servers run at the same time and receive load in turn. A ratio above 1 means that this checkout is
    faster. A round fails if a server refuses requests or does not answer within 60 seconds.
    """
    base = comparison.QUICK if quick else comparison.FULL
    plan = comparison.ComparisonPlan(rounds or base.rounds, seconds or base.seconds)
    table = Table("sequences per second, medians", title=f"{plan.rounds} rounds of {plan.seconds:g} s")
    for column in ("this checkout", "other checkout", "ratio (range)", "failed rounds"):
        table.add_column(column, justify="right")
    with _failures_reported(), comparison.open_pair(other, cache, tuple(server_option or ())) as servers:
        for cell in comparison.CELLS:
            console.print(f"measuring {cell.name}")
            found = comparison.compare_cell(cell, plan, *servers)
            rates = [_median(rates) for rates in (found.this, found.other)]
            failed = " / ".join(map(str, found.failures))
            table.add_row(cell.name, *rates, with_range(found.ratio), failed)
    console.print(table)


@app.command("threads")
def show_threads(
    *,
    seconds: Annotated[float, typer.Option(min=0.05, help="Duration of each measurement, in seconds.")] = 3,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Show what each thread of the server does under load, and how much of the machine is idle."""
    table = Table("load", "thread", title=f"{os.cpu_count()} cores, {seconds:g} s for each load")
    for column in ("cores, own code", "cores, kernel", "switches per sequence"):
        table.add_column(column, justify="right")
    cache.mkdir(parents=True, exist_ok=True)
    log = cache.resolve() / "threads.log"
    with (
        _failures_reported(),
        worker() as generator,
        comparison.serving(Checkout(), cache, log, tuple(server_option or ())) as server,
    ):
        for cell in comparison.CELLS:
            console.print(f"measuring {cell.name}")
            found = threads.trace(cell, seconds, generator, server)
            table.add_section()
            rate = (
                f"{number(found.rate)}/s, {number(found.microseconds)} us each, {found.idle:.2f} cores idle"
            )
            table.add_row(cell.name, rate)
            for use in found.threads:
                if use.user + use.system >= LEAST_SHARE:
                    shares = f"{use.user:.2f}", f"{use.system:.2f}", f"{use.switches:.2f}"
                    table.add_row("", use.name, *shares)
    console.print(table)


@app.command("variants")
def compare_variants(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds under each load.")] = (
        variants.PLAN.rounds
    ),
    seconds: Annotated[float, typer.Option(min=0.05, help="Duration of each measurement, in seconds.")] = (
        variants.PLAN.seconds
    ),
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Compare precisions, element types on the wire, and kinds of address, on one server.

    A ratio above 1 means that a variant answers more sequences per second than fp32 over TCP.
    """
    plan = comparison.ComparisonPlan(rounds, seconds)
    table = Table("load", "variant", title=f"{rounds} rounds of {seconds:g} s")
    for column in ("sequences per second", "ratio (range)", "server us each", "difference from fp32"):
        table.add_column(column, justify="right")
    cache.mkdir(parents=True, exist_ok=True)
    with (
        _failures_reported(),
        variants.serving(cache, tuple(server_option or ())) as server,
        worker() as generator,
    ):
        for load in variants.LOADS:
            console.print(f"measuring {load.name}")
            table.add_section()
            for found in variants.measure(load, plan, generator, server):
                rate, microseconds = (_middle(value) for value in (found.rate, found.microseconds))
                difference = f"{found.difference:.1e}"
                table.add_row(
                    load.name, found.variant, rate, with_range(found.ratio), microseconds, difference
                )
    console.print(table)


def _middle(value: Spread | None) -> str:
    return number(value.median if value else None)


def _median(rates: tuple[float | None, ...]) -> str:
    return _middle(spread(rates))


@contextmanager
def _failures_reported() -> Iterator[None]:
    """Turns expected failures into one message and exit status 1."""
    try:
        yield
    except (CallFailedError, MeasurementError, OSError, RuntimeError) as error:
        errors.print(f"error: {error}")
        raise typer.Exit(1) from error


def _measurements(setup: Setup) -> Path:
    """Returns the folder of the JSON files, which are too large for the repository."""
    folder = setup.cache / setup.plan.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_report(setup: Setup, out: Path | None) -> None:
    folder = out or (FULL_REPORT if setup.plan is FULL else QUICK_REPORT)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"wrote {report.write(_measurements(setup), folder)}")


def _measure_grid(setup: Setup) -> None:
    """Measures, and writes what was measured even if the run is interrupted."""
    date, started = now(), time.monotonic()
    before, load = processor_ticks(), os.getloadavg()[0]
    findings = Findings()
    if missing := peers.absent():
        console.print(f"peers that are not installed and will be skipped: {', '.join(missing)}")
    try:
        with open_environment(setup) as environment:
            _run(environment, findings)
    finally:
        settings = {
            "load average before": f"{load:.2f}",
            "processor time taken by the host": f"{stolen_share(before, processor_ticks()):.1%}",
        }
        conditions = _conditions(setup, date, time.monotonic() - started, settings)
        save(_results(conditions, findings), _measurements(setup) / RESULTS_FILE)


def _run(environment: Environment, findings: Findings) -> None:
    if not console.is_terminal:
        run(environment, findings, console.print)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # The display is refreshed between cells only: a refreshing thread would use a share of the cores.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=steps(environment.setup.plan))

        def report_progress(step: str) -> None:
            progress.update(task, advance=1, description=step, refresh=True)

        run(environment, findings, report_progress)


def _conditions(setup: Setup, date: str, seconds: float, settings: dict[str, str]) -> Conditions:
    plan = setup.plan
    return Conditions(
        date=date,
        seconds=seconds,
        machine=machine(),
        versions=library_versions() | peers.versions(),
        settings={
            "extent": f"{plan.name}, {plan.rounds} rounds, {plan.seconds:g} s for each measurement",
            "server options": " ".join(setup.server_options) or "defaults",
            **settings,
        },
        absent=peers.absent(),
    )


def _results(conditions: Conditions, findings: Findings) -> Results:
    return Results(
        conditions=conditions,
        grid=tuple(findings.grid),
        growth=tuple(findings.growth),
        open_loop=tuple(findings.open_loop),
        perf_analyzer=tuple(findings.perf_analyzer),
        failures=tuple(findings.failures),
    )


def _measure_memory(setup: Setup, minutes: float) -> None:
    """Uses a new server, so that its memory holds nothing from other measurements."""
    console.print(f"memory: {minutes:g} minutes")
    small = Setup(QUICK, setup.cache, setup.server_options)
    with open_environment(small) as environment:
        found = measure_memory(environment, minutes * 60)
    save(found, _measurements(setup) / MEMORY_FILE)
