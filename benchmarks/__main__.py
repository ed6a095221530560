"""Measures the service beside its ceilings and other servers, and compares two checkouts."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.load import MeasurementWindow
from benchmarks.processes import (
    ServerAddress,
    cores,
    library_versions,
    machine,
    now,
    processor_ticks,
    stolen_share,
    worker,
)
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
LOADS = (Cell(WIDE, SHORT, 1), Cell(WIDE, SHORT, 32), Cell(WIDE, MIDDLE, 8))

Cache = Annotated[Path, typer.Option(help="Folder for exported models and logs.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds of each load.")]
Seconds = Annotated[float | None, typer.Option(min=0.05, help="Seconds of each measurement.")]
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
    started, before, load = time.monotonic(), processor_ticks(), os.getloadavg()[0]
    conditions = {"date": now(), **machine(), **library_versions()}
    with failures_reported():
        try:
            run.run(plan, cache, server_option or (), peers, findings, console.print)
        finally:  # an interrupted run reports what it measured
            conditions |= {
                "extent": f"{plan.name}, {plan.rounds} rounds, {plan.seconds:g} s for each measurement",
                "duration": f"{time.monotonic() - started:,.0f} s",
                "server options": " ".join(server_option or ()) or "defaults",
                "load average before": f"{load:.2f}",
                "processor time taken by the host": f"{stolen_share(before, processor_ticks()):.1%}",
            }
            folder = out or (cache / "quick" if quick else RESULTS)
            console.print(f"wrote {report.write(findings, conditions, cores(), folder)}")


@app.command("compare")
def compare(
    other: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Root folder of the other checkout.")
    ],
    *,
    quick: Annotated[bool, typer.Option("--quick", help="5 rounds of 0.25 s, not 15 of 0.5 s.")] = False,
    rounds: Rounds = None,
    seconds: Seconds = None,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Compare the rates of this checkout's server with those of another checkout, such as a git worktree.

    Both servers run at the same time and receive load in turn. A ratio above 1 means that this checkout is
    faster. A round fails if a server refuses requests or does not answer within 60 seconds.
    """
    window = MeasurementWindow(seconds or (0.25 if quick else 0.5), WARM_SECONDS)
    names = ("this checkout", "other checkout")
    options = server_option or ()
    with (
        failures_reported(),
        worker() as generator,
        serving(Checkout(), cache, "this", options) as this,
        serving(Checkout(other.resolve()), cache, "other", options) as that,
    ):
        contests = [
            (
                cell,
                [
                    Served(name, at, api, generator, window)
                    for name, at in zip(names, (this, that), strict=True)
                ],
            )
            for api, cell in COMPARED
        ]
        console.print(contest(contests, rounds or (5 if quick else 15), equal=True))


@app.command("variants")
def compare_variants(
    *, rounds: Rounds = 9, seconds: Seconds = 0.3, cache: Cache = CACHE, server_option: ServerOption = None
) -> None:
    """Compare precisions, element types on the wire, and kinds of address, on one server.

    A ratio below 1 means that a variant answers more sequences per second than fp32 over TCP.
    """
    window = MeasurementWindow(seconds or 0.3, WARM_SECONDS)
    # Paths of sockets must be short.
    with failures_reported(), worker() as generator, TemporaryDirectory() as folder:
        options = (f"--unix-socket={folder}/socket", *(server_option or ()))
        with serving(Checkout(), cache, "variants", options) as server:
            base = Served("fp32", server, Api.OPEN_INFERENCE, generator, window)
            socket = ServerAddress(f"unix:{folder}/socket", server.pid)
            variants = [
                base,
                replace(base, name="fp16, computed in fp32 on CPUs", precision="fp16"),
                replace(base, name="int8", precision="int8"),
                replace(base, name="fp32, FP16 on the wire", data_type="FP16"),
                replace(base, name="fp32, BF16 on the wire", data_type="BF16"),
                replace(base, name="fp32, Unix domain socket", server=socket),
            ]
            console.print(contest([(cell, variants) for cell in LOADS], rounds or 9, equal=False))


@contextmanager
def serving(checkout: Checkout, cache: Path, name: str, options: Sequence[str]) -> Iterator[ServerAddress]:
    """Exports the models of a comparison with a checkout's exporter, and serves them."""
    work = (cache / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    low = [replace(WIDE, precision=precision) for precision in ("fp16", "int8")] if name == "variants" else []
    repository = checkout.models((NARROW, WIDE, *low), cache)
    with checkout.serving(repository, work / f"{name}.log", *options) as server:
        yield server


def contest(contests: Sequence[tuple[Cell, Sequence[Served]]], rounds: int, *, equal: bool) -> Table:
    """Measures the systems of each cell in rounds, and compares each with the first.

    Args:
        contests: Cells and their systems.
        rounds: Number of rounds.
        equal: Whether different context vectors are an error.
    """
    table = Table("load", "system", title=f"medians of {rounds} rounds")
    for column in ("sequences/s", "first / this (range)", "server µs each", "difference", "failed rounds"):
        table.add_column(column, justify="right")
    from benchmarks.report import middle, with_range  # noqa: PLC0415

    for cell, systems in contests:
        name = f"{cell.name}, stream" if systems[0].api is Api.ATTENTION_STREAM else cell.name
        console.print(f"measuring {name}")
        answers = [system.first_response(cell) for system in systems]
        if equal and not all(agree(answer, answers[0]) for answer in answers):
            raise MeasurementError(f"{name}: the servers return different context vectors")
        found = measure_in_rounds(cell, systems, rounds, [])
        table.add_section()
        for system, answer in zip(systems, answers, strict=True):
            rate = of(found, system.name, sequences_per_second)
            cost = of(found, system.name, lambda one: one.server_us)
            difference = max(np.abs(a - b).max() for a, b in zip(answer, answers[0], strict=True))
            against = with_range(ratio(found, systems[0].name, system.name))
            failed = str(found[system.name].count(None))
            row = (middle(rate), against, middle(cost), f"{difference:.1e}", failed)
            table.add_row(name, system.name, *row)
    return table


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
