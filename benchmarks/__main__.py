"""Measures the service beside its ceilings and other servers, on a GPU too, and compares two checkouts."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from attention_serving.export.verify import read_help
from attention_serving.server.engine.run.provider import Provider, ProviderError
from benchmarks import late_interaction, report, run
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.cuda.settings import Settings
from benchmarks.load import MeasurementWindow
from benchmarks.markdown import text
from benchmarks.processes import environment, worker
from benchmarks.systems import MeasurementError, Served, agree, measure_in_rounds, median_of, ratio
from benchmarks.wire import Api
from benchmarks.workload import BATCH_REQUEST, FULL, MIDDLE, MIXED, NARROW, QUICK, SHORT, WIDE, Cell
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


@app.command("run")
@partial(read_help, results=RESULTS, cache=CACHE)
def measure(
    *,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    peer: list[str] | None = None,
    out: Path | None = None,
    cache: Path = CACHE,
    server_option: list[str] | None = None,
) -> None:
    """Measure the service beside its ceilings, and write a report.

    The full run takes about a quarter of an hour on two cores.

    Options:
        quick: Measure fewer cells, in a few minutes.
        peer: NAME=HOST:PORT of a running server of the Open Inference Protocol that serves the models of
            build/bench/models under the same names. May be repeated.
        out: Folder of the report; that of the pages is {results}.  [default: {cache}]
        cache: Folder for exported models and logs.
        server_option: Further option of `python -m server`, such as --threads=1. May be repeated.
    """
    plan, options = QUICK if quick else FULL, server_option or ()
    peers = dict(option.split("=", 1) for option in peer or ())
    findings, started = run.Findings(), time.monotonic()
    conditions = {
        **environment(),
        "server options": " ".join(options) or "defaults",
        "command": f"python -m benchmarks {' '.join(sys.argv[1:])}",
        "extent": f"{plan.rounds} rounds of {plan.seconds:g} s each",
        "load average before": f"{os.getloadavg()[0]:.2f}",
    }
    with report_failures():
        try:
            run.run(plan, cache, options, peers, findings, console.print)
        finally:  # also of a run that is interrupted
            conditions["duration"] = f"{time.monotonic() - started:,.0f} s"
            console.print(f"wrote {report.write(findings, conditions, out or cache)}")


@app.command("cuda")
@read_help
def run_kit(
    *,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    device: Provider = Provider.CUDA,
    only: list[str] | None = None,
    again: list[str] | None = None,
    cache: Path = CUDA_CACHE,
) -> None:
    """Prove and measure the service on one NVIDIA GPU, step by step. Takes up to ten minutes.

    Each step has a process and a limit of its own. Results are kept: a second run takes up what is missing.
    Artifacts that `cuda-pack` has not made are exported first, which takes a quarter of an hour on two cores.
    Exits with 1 if an answer is wrong or a graph misses its tolerance.

    Needs an NVIDIA driver, a PyTorch with CUDA, and the extras `gpu` and `encoders` of this repository. The
    wheels onnxruntime and onnxruntime-gpu contain the same module: install the second in place of the first.

    Options:
        quick: Few models and sizes, in two minutes.
        device: cpu tries the program itself.
        only: A step that may run; all if none is named. May be repeated.
        again: A step that runs although its result is there. May be repeated.
        cache: Folder of artifacts, results and the report.
    """
    from benchmarks.cuda import kit  # noqa: PLC0415 - loads ONNX Runtime

    if unknown := {*(only or ()), *(again or ())} - kit.STEPS.keys():
        steps = ", ".join(kit.STEPS)
        raise typer.BadParameter(f"{sorted(unknown)[0]!r} is not a step; the steps are: {steps}")
    settings, page = Settings(cache.resolve(), device, quick), cache / "report.md"
    results: dict[str, kit.Result] = {}
    with report_failures():
        kit.device_name(settings)
        prepare(settings)
        try:
            kit.run(settings, results, console.print, only=only or (), again=again or ())
        finally:
            page.write_text(kit.write_report(settings, results))
            console.print(f"wrote {page}")
    if problems := kit.missed(results):
        console.print("\n".join(problems))
        raise typer.Exit(1)


@app.command("cuda-pack")
@read_help
def pack_kit(
    folder: Annotated[Path, typer.Argument()],
    *,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    python: str = "3.12",
    cache: Path = CUDA_CACHE,
) -> None:
    """Pack what `cuda` needs on a machine without a network: wheels, artifacts and fixed answers.

    The parts are below 64 MiB. Carry this checkout and the folder, and start `FOLDER/run.sh` in the checkout.

    Options:
        folder: Folder of the parts.
        quick: Pack what `cuda --quick` needs.
        python: Version of Python there.
        cache: Folder of the artifacts.
    """
    from benchmarks.cuda import pack  # noqa: PLC0415

    settings = Settings(cache.resolve(), Provider.CUDA, quick)
    with report_failures():
        prepare(settings)
        for file in pack.pack(settings, folder, python):
            console.print(f"{file}: {file.stat().st_size:,} bytes")


def prepare(settings: Settings) -> None:
    """Makes the artifacts of the kit that are not there."""
    if settings.missing:
        from benchmarks.cuda import artifacts  # noqa: PLC0415 - loads PyTorch

        artifacts.prepare(settings, console.print)


@app.command("compare")
@read_help
def compare(
    other: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    *,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    rounds: Annotated[int, typer.Option(min=1)] = 15,
    seconds: Annotated[float, typer.Option(min=0.05)] = 0.5,
    cache: Path = CACHE,
    server_option: list[str] | None = None,
) -> None:
    """Compare the rates of this checkout's server with those of another checkout, such as a git worktree.

    Both servers run at the same time and receive load in turn. A ratio above 1 means that this checkout is
    faster. A round fails if a server refuses requests or does not answer within 60 seconds.

    Options:
        other: Root folder of the other checkout.
        quick: 5 rounds of 0.25 s.
        rounds: Number of rounds of each load.
        seconds: Seconds of each measurement.
        cache: Folder for exported models and logs.
        server_option: Further option of `python -m server`, such as --threads=1. May be repeated.
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


@app.command("maxsim")
@read_help
def measure_maxsim(
    repository: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    *,
    model: str = "colbert",
    cache: Path = CACHE,
) -> None:
    """Compare a query with stored documents, by a server and by NumPy in this process, in turn.

    Options:
        repository: Model repository.
        model: Name of a multi-vector encoder.
        cache: Folder of the server's log.
    """
    log = (cache / "work/maxsim.log").resolve()
    log.parent.mkdir(parents=True, exist_ok=True)
    with report_failures(), serving(repository, log) as server:
        console.print(late_interaction.compare(server.target, model))


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
