"""Measures the service beside its ceilings and other servers, on a GPU too, and compares two checkouts."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from attention_serving.server.engine.run import cuda as driver
from attention_serving.server.engine.run.provider import Provider, ProviderError
from benchmarks import report, run
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.load import MeasurementWindow
from benchmarks.markdown import text
from benchmarks.processes import environment, worker
from benchmarks.systems import MeasurementError, Served, agree, measure_in_rounds, median_of, ratio
from benchmarks.wire import Api
from benchmarks.workload import BATCH_REQUEST, FULL, MIDDLE, MIXED, NARROW, QUICK, SHORT, WIDE, Cell, Plan
from scripts.local_server import serving

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=__doc__,
)
console = Console(highlight=False)

CACHE, RESULTS = Path("build/bench"), Path("benchmarks/results")
CUDA_CACHE = Path("build/cuda")
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
        typer.Option(help=f"Folder of the report; that of the pages is {RESULTS}.  [default: {CACHE}]"),
    ] = None,
    cache: Cache = CACHE,
    server_option: ServerOption = None,
) -> None:
    """Measure the service beside its ceilings, and write a report.

    The full run takes about a quarter of an hour on two cores.
    """
    plan, options = QUICK if quick else FULL, server_option or ()
    peers = dict(option.split("=", 1) for option in peer or ())

    def steps(findings: run.Findings) -> None:
        run.run(plan, cache, options, peers, findings, console.print)

    conditions = {"server options": " ".join(options) or "defaults"}
    write_report(steps, plan, conditions, out or cache)


@app.command("cuda")
def prove_and_measure(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Few models and sizes, in a minute or two.")] = False,
    device: Annotated[Provider, typer.Option(help="cpu tries the program itself.")] = Provider.CUDA,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder of the report.  [default: {RESULTS}/cuda; if quick or on the CPU {CUDA_CACHE}]"
        ),
    ] = None,
    cache: Cache = CUDA_CACHE,
) -> None:
    """Prove and measure the service on one NVIDIA GPU, and write a report. Takes up to ten minutes.

    Exports every preset in fp32, fp16 and bf16, compares each graph on the device with eager PyTorch on the
    CPU over the parity grid, and measures rates as `run` does. Exits with 1 if a graph misses its tolerance.

    Needs an NVIDIA driver, a PyTorch with CUDA, and the extras `gpu` and `export` of this repository. The
    wheels onnxruntime and onnxruntime-gpu contain the same module: install the second in place of the first.
    """
    from benchmarks import cuda  # noqa: PLC0415 - loads PyTorch

    plan = replace(cuda.QUICK if quick else cuda.FULL, device=device)
    conditions = {"device": "the CPU: nothing here says anything about a GPU"}
    with report_failures():
        if device is Provider.CUDA:
            conditions = {"name": driver.find_device().name, "cuda": driver.cuda_version()}

    def steps(findings: run.Findings) -> None:
        for row in cuda.prove_all(cache / "proof", device, quick=quick):
            console.print(f"proof: {', '.join(row)}")
            findings.proof.append(row)
        run.run(plan, cache, (), {}, findings, console.print)

    on_gpu = device is Provider.CUDA
    folder = out or (RESULTS / "cuda" if on_gpu and not quick else cache)
    findings = write_report(steps, plan, conditions, folder)
    if on_gpu and not all("holds" in row for row in findings.proof):
        raise typer.Exit(1)


def write_report(
    steps: Callable[[run.Findings], None], plan: Plan, conditions: dict[str, str], folder: Path
) -> run.Findings:
    """Runs what fills findings, and writes their report, also of a run that is interrupted."""
    findings, started = run.Findings(), time.monotonic()
    conditions = {
        **environment(),
        **conditions,
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "extent": f"{plan.rounds} rounds of {plan.seconds:g} s each",
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }
    with report_failures():
        try:
            steps(findings)
        finally:
            conditions["duration"] = f"{time.monotonic() - started:,.0f} s"
            console.print(f"wrote {report.write(findings, conditions, folder)}")
    return findings


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
    with report_failures(), ExitStack() as stack:
        generator = stack.enter_context(worker())
        servers = {}
        for name, checkout in checkouts.items():
            repository, log = checkout.models((NARROW, WIDE), cache), work / f"{name}.log"
            program = {"root": checkout.root, "python": checkout.python}
            server = stack.enter_context(serving(repository, log, *(server_option or ()), **program))
            servers[name] = server.target, server.process.pid
        table = Table("load", "system", title=f"medians of {rounds} rounds")
        for column in ("sequences/s", "this / other (range)", "server µs each", "failed rounds"):
            table.add_column(column, justify="right")
        for api, cell in COMPARED:
            systems = [Served(name, *server, api, generator, window) for name, server in servers.items()]
            contest(table, cell, systems, rounds)
        console.print(table)


def contest(table: Table, cell: Cell, systems: Sequence[Served], rounds: int) -> None:
    """Measures systems in rounds, and compares the first with each."""
    name = f"{cell.name}, stream" if systems[0].api is Api.ATTENTION_STREAM else cell.name
    console.print(f"measuring {name}")
    answers = [system.first_response(cell) for system in systems]
    if not all(agree(answer, answers[0], cell.model.precision) for answer in answers):
        raise MeasurementError(f"{name}: the servers return different context vectors")
    results = measure_in_rounds(cell, systems, rounds, [])
    table.add_section()
    for system in systems:
        rate, cost = (median_of(results, system.name, m) for m in ("sequences_per_second", "server_us"))
        against = ratio(results, systems[0].name, system.name)
        table.add_row(name, system.name, *map(text, (rate, against, cost, results[system.name].count(None))))


@contextmanager
def report_failures() -> Iterator[None]:
    """Turns expected failures into one message and exit status 1."""
    try:
        yield
    except (CallFailedError, MeasurementError, OSError, ProviderError, RuntimeError) as error:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(f"error: {error}")
        raise typer.Exit(1) from error


if __name__ == "__main__":
    import signal

    # Leaving by an exception stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
