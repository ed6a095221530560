"""Measures the service beside its ceilings and other servers, and compares two checkouts."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.load import MeasurementWindow
from benchmarks.processes import library_versions, machine, now, worker
from benchmarks.systems import (
    MeasurementError,
    Served,
    agree,
    measure_in_rounds,
    of,
    ratio,
    sequences_per_second,
)
from benchmarks.wire import Api
from benchmarks.workload import BATCH_REQUEST, FULL, MIDDLE, MIXED, NARROW, QUICK, SHORT, WIDE, Cell

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, help=__doc__)
console = Console(highlight=False)

CACHE, RESULTS = Path("build/bench"), Path("benchmarks/results")
WARM_SECONDS = 0.1
COMPARED = (
    (Api.OPEN_INFERENCE, Cell(WIDE, SHORT, 1)),
    (Api.OPEN_INFERENCE, Cell(WIDE, SHORT, 32)),
    (Api.OPEN_INFERENCE, Cell(NARROW, SHORT, 32)),
    (Api.OPEN_INFERENCE, Cell(WIDE, MIDDLE, 8)),
    (Api.OPEN_INFERENCE, Cell(WIDE, MIXED, 32)),
    (Api.ATTENTION, Cell(WIDE, MIXED, 2, BATCH_REQUEST)),
    (Api.ATTENTION_STREAM, Cell(NARROW, SHORT, 32)),
)

Cache = Annotated[Path, typer.Option(help="Folder for exported models and logs.")]
ServerOption = Annotated[
    list[str] | None,
    typer.Option(help="Further option of `python -m server`, such as --threads=1. May be repeated."),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=HOST:PORT of a running server of the Open Inference Protocol that serves the models of"
        " build/bench/models under the same names. May be repeated."
    ),
]


@app.command("run")
def measure(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer cells, in a few minutes.")] = False,
    peer: Peer = None,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder of the report.  [default: {RESULTS}; with --quick {CACHE}/quick]"),
    ] = None,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Measure the service beside its ceilings, and write a report with plots.

    The full run takes about half an hour on two cores.
    """
    from benchmarks import report, run  # noqa: PLC0415 - plots need matplotlib

    plan, findings = QUICK if quick else FULL, run.Findings()
    peers = dict(one.split("=", 1) for one in peer or ())
    started, load = time.monotonic(), os.getloadavg()[0]
    conditions = {"date": now(), **machine(), **library_versions()}
    with failures_reported():
        try:
            run.run(plan, cache, server_option or (), peers, findings, console.print)
        finally:  # an interrupted run reports what it measured
            conditions |= {
                "extent": f"{'quick' if quick else 'full'}, {plan.rounds} rounds of {plan.seconds:g} s each",
                "duration": f"{time.monotonic() - started:,.0f} s",
                "server options": " ".join(server_option or ()) or "defaults",
                "load average before": f"{load:.2f}",
            }
            folder = out or (cache / "quick" if quick else RESULTS)
            console.print(f"wrote {report.write(findings, conditions, folder)}")


@app.command("compare")
def compare(
    other: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Root folder of the other checkout.")
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="5 rounds of 0.25 s.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of each load.")] = 15,
    seconds: Annotated[float, typer.Option(min=0.05, help="Seconds of each measurement.")] = 0.5,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Compare the rates of this checkout's server with those of another checkout, such as a git worktree.

    Both servers run at the same time and receive load in turn. A ratio above 1 means that this checkout is
    faster. A round fails if a server refuses requests or does not answer within 60 seconds.
    """
    rounds, seconds = (5, 0.25) if quick else (rounds, seconds)
    window = MeasurementWindow(seconds, WARM_SECONDS)
    checkouts = {"this checkout": Checkout(), "other checkout": Checkout(other.resolve())}
    work = (cache / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    with failures_reported(), ExitStack() as stack:
        generator = stack.enter_context(worker())
        servers = {}
        for name, checkout in checkouts.items():
            repository, log = checkout.models((NARROW, WIDE), cache), work / f"{name}.log"
            servers[name] = stack.enter_context(checkout.serving(repository, log, *(server_option or ())))
        table = Table("load", "system", title=f"medians of {rounds} rounds")
        for column in ("sequences/s", "this / other (range)", "server µs each", "failed rounds"):
            table.add_column(column, justify="right")
        for api, cell in COMPARED:
            contest(table, cell, [Served(*own, api, generator, window) for own in servers.items()], rounds)
        console.print(table)


def contest(table: Table, cell: Cell, systems: Sequence[Served], rounds: int) -> None:
    """Measures systems in rounds, and compares the first with each."""
    from benchmarks.report import middle, with_range  # noqa: PLC0415 - needs matplotlib

    name = f"{cell.name}, stream" if systems[0].api is Api.ATTENTION_STREAM else cell.name
    console.print(f"measuring {name}")
    answers = [system.first_response(cell) for system in systems]
    if not all(agree(answer, answers[0]) for answer in answers):
        raise MeasurementError(f"{name}: the servers return different context vectors")
    found = measure_in_rounds(cell, systems, rounds, [])
    table.add_section()
    for system in systems:
        rate = of(found, system.name, sequences_per_second)
        cost = of(found, system.name, lambda one: one.server_us)
        against = with_range(ratio(found, systems[0].name, system.name))
        failed = str(found[system.name].count(None))
        table.add_row(name, system.name, middle(rate), against, middle(cost), failed)


@contextmanager
def failures_reported() -> Iterator[None]:
    """Turns expected failures into one message and exit status 1."""
    try:
        yield
    except (CallFailedError, MeasurementError, OSError, RuntimeError) as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {error}")
        raise typer.Exit(1) from error


if __name__ == "__main__":
    import signal
    import sys

    # Each server has a process group of its own. Leaving by an exception stops all of them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
