"""A run: starts the systems, measures every cell in rounds, and keeps the results."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks import compute, load
from benchmarks.channel import CallFailedError
from benchmarks.checkout import Checkout
from benchmarks.load import MeasurementWindow
from benchmarks.markdown import text
from benchmarks.processes import worker
from benchmarks.systems import InProcess, Rounds, Served, agree, measure_in_rounds, median_of, percentiles
from benchmarks.wire import Api
from benchmarks.workload import MIXED, Array, Cell, Model, Plan
from scripts.local_server import ROOT, serving

ONNX, EAGER, ECHO = "ONNX Runtime in process", "eager PyTorch in process", "bare gRPC echo"
SERVICE, TYPED, STREAM = "service", "service, attention.v1", "service, stream"
Grid = dict[Cell, Rounds]


@dataclass
class Findings:
    """What a run has measured so far.

    Attributes:
        grid: The measurements of each cell.
        at_rates: Rows of the report: one system at a fixed rate, all rounds together.
        failures: What could not be measured, and why.
    """

    grid: Grid = field(default_factory=dict)
    at_rates: list[tuple[str, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """Runs the transport ceiling, and yields its address and process."""
    command = [sys.executable, "-m", "benchmarks.echo"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            port = process.stdout.readline().strip() if process.stdout else ""
            yield f"127.0.0.1:{port}", process.pid
        finally:
            process.kill()


def run(
    plan: Plan,
    cache: Path,
    options: Sequence[str],
    peers: dict[str, str],
    findings: Findings,
    report_progress: Callable[[str], None],
) -> None:
    """Measures all models of a plan. A system that fails in a cell is recorded and skipped.

    Args:
        plan: What is measured.
        cache: Folder for exported models and logs.
        options: Further options of `python -m server`.
        peers: Addresses of running servers of the Open Inference Protocol, by their names in reports.
        findings: Filled during the run, so that an interrupted run keeps what it measured.
        report_progress: Called with the name of each step before it starts.
    """
    work = (cache / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    repository = Checkout().models(plan.models, cache)
    options = ("--provider=cpu", *options)
    with ExitStack() as stack:
        generator, onnx, torch = (stack.enter_context(worker()) for _ in range(3))
        server = stack.enter_context(serving(repository, work / "service.log", *options))
        service = server.target, server.process.pid
        window = MeasurementWindow(plan.seconds, plan.warm_seconds)
        served = [
            Served(ECHO, *stack.enter_context(echo()), Api.ECHO, generator, window),
            Served(SERVICE, *service, Api.OPEN_INFERENCE, generator, window),
            Served(TYPED, *service, Api.ATTENTION, generator, window),
            Served(STREAM, *service, Api.ATTENTION_STREAM, generator, window),
        ]
        for name, address in peers.items():
            served.append(Served(name, address, 0, Api.OPEN_INFERENCE, generator, window))
        alone = [
            InProcess(ONNX, onnx, compute.onnx_run, repository, plan.compute_seconds),
            InProcess(EAGER, torch, compute.eager_run, repository, plan.compute_seconds),
        ]
        for model in plan.models:
            report_progress(f"{model.name}: first answers")
            try:
                expected = onnx.submit(compute.expected_context, repository, model, MIXED).result()
            except Exception as error:  # ONNX Runtime raises many types
                findings.failures.append(f"{ONNX}, {model.name}, all cells: {str(error)[:300]}")
                continue
            valid = _valid(model, served, expected, findings.failures)
            for cell in plan.cells(model):
                report_progress(cell.name)
                systems: list[Served | InProcess] = [*alone, *valid]
                findings.grid[cell] = measure_in_rounds(cell, systems, plan.rounds, findings.failures)
            for cell in plan.open_cells:
                if cell.model == model:
                    report_progress(f"{cell.name}, at fixed rates")
                    findings.at_rates += _at_rates(cell, valid, plan, findings.grid[cell])


def _valid(
    model: Model, served: Sequence[Served], expected: list[Array], failures: list[str]
) -> list[Served]:
    """Returns the systems that answer a first request with the right values."""
    valid = []
    for system in served:
        try:
            first = system.first_response(Cell(model, MIXED, 1))
        except (CallFailedError, ValueError) as error:
            failures.append(f"{system.name}, {model.name}, all cells: {error}")
            continue
        if system.api is Api.ECHO or agree(first, expected, model.precision):
            valid.append(system)
        else:
            failures.append(
                f"{system.name}, {model.name}: other context vectors than those computed in process"
            )
    return valid


def _at_rates(
    cell: Cell, served: Sequence[Served], plan: Plan, closed_loop: Rounds
) -> Iterator[tuple[str, ...]]:
    """Measures latency at shares of each system's closed-loop rate, in rounds; yields rows of the report."""
    # Streams answer in order, and the echo computes nothing.
    systems = [system for system in served if system.api is Api.OPEN_INFERENCE]
    for share in plan.shares:
        for system in systems:
            capacity = median_of(closed_loop, system.name, "sequences_per_second")
            if capacity is None:
                continue
            rate, endpoint = capacity * share, system.endpoint(replace(cell, per_request=1))
            results = [
                system.generator.submit(load.open_loop, endpoint, rate, plan.open_seconds, seed).result()
                for seed in range(plan.rounds)
            ]
            latencies = np.concatenate([result.latencies for result in results])
            yield (
                f"{cell.lengths.name} x {cell.model.width}",
                system.name,
                f"{text(rate)} ({share:.0%})",
                *map(text, percentiles(latencies)),
                f"{len(latencies):,}",
                str(sum(result.failures for result in results)),
            )
