"""Measures each cell in rounds, one system after the other; and the server's memory during a long load."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from benchmarks import load, perf_analyzer
from benchmarks.channel import CallFailedError
from benchmarks.environment import Environment
from benchmarks.load import Endpoint, LoadResult
from benchmarks.processes import now, process_tree, resident_bytes
from benchmarks.results import (
    EAGER,
    ECHO,
    ONNX,
    SERVICE,
    TORCHSERVE,
    TRITON,
    TRITON_CPP,
    TRITON_CPP_SINGLE,
    Index,
    Measurement,
    MemoryCurve,
    MemorySample,
    OpenLoopMeasurement,
    Percentiles,
)
from benchmarks.summary import of, sequence_rate
from benchmarks.systems import MeasurementError, Served, System
from benchmarks.wire import Api
from benchmarks.workload import BenchmarkPlan, Cell, Lengths, Model

Progress = Callable[[str], None]
GROWTH_SYSTEMS = (ONNX, EAGER, SERVICE)
OPEN_LOOP_SYSTEMS = (SERVICE, TRITON, TRITON_CPP, TORCHSERVE, ECHO)
SOAK_LENGTHS = Lengths(2048, mixed=True)
SOAK_IN_FLIGHT = 8
SAMPLE_SECONDS = 1.0


@dataclass
class Findings:
    """What a run has measured so far."""

    grid: list[Measurement] = field(default_factory=list)
    growth: list[Measurement] = field(default_factory=list)
    open_loop: list[OpenLoopMeasurement] = field(default_factory=list)
    perf_analyzer: list[Measurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(environment: Environment, findings: Findings, report_progress: Progress) -> None:
    """Measures all models of the plan. A system that fails in a cell is recorded and skipped.

    Args:
        environment: The running systems.
        findings: Filled during the run, so that an interrupted run keeps what it measured.
        report_progress: Called with the name of each step before it starts.
    """
    for model in environment.setup.plan.models:
        report_progress(f"{model.name}: starting the peers")
        with environment.peers(model) as others:
            served = _valid(environment, model, [*environment.own(model), *others], findings.failures)
            _measure_model(environment, model, served, findings, report_progress)


def steps(plan: BenchmarkPlan) -> int:
    """Returns how often `run` reports progress."""
    cells = sum(len(plan.cells(model)) + len(plan.growth_cells(model)) for model in plan.models)
    second = len(plan.perf_analyzer_cells) if perf_analyzer.is_installed() else 0
    return len(plan.models) + cells + len(plan.open_cells) + second


def _valid(environment: Environment, model: Model, served: list[Served], failures: list[str]) -> list[Served]:
    """Returns the systems that answer with the right values."""
    found = []
    for system in served:
        try:
            environment.validate(system, model)
        except (CallFailedError, MeasurementError, ValueError) as error:
            failures.append(f"{system.name}, {model.name}, all cells: {error}")
        else:
            found.append(system)
    return found


def _measure_model(
    environment: Environment,
    model: Model,
    served: list[Served],
    findings: Findings,
    report_progress: Progress,
) -> None:
    plan = environment.setup.plan
    systems: list[System] = [*environment.in_process(), *served]
    for cell in plan.cells(model):
        report_progress(cell.name)
        findings.grid += measure_in_rounds(cell, systems, plan.rounds, findings.failures)
    growing = [system for system in systems if system.name in GROWTH_SYSTEMS]
    for cell in plan.growth_cells(model):
        report_progress(f"growth of cost: {cell.name}")
        findings.growth += measure_in_rounds(cell, growing, plan.rounds, findings.failures)
    for cell in plan.open_cells:
        if cell.model == model:
            report_progress(f"open loop: {cell.name}")
            findings.open_loop += _measure_open_loop(cell, served, plan, Index(tuple(findings.grid)))
    if perf_analyzer.is_installed():
        for cell in plan.perf_analyzer_cells:
            if cell.model == model:
                report_progress(f"{perf_analyzer.NAME}: {cell.name}")
                findings.perf_analyzer += _measure_with_perf_analyzer(cell, served, plan, findings.failures)


def measure_in_rounds(
    cell: Cell, systems: Sequence[System], rounds: int, failures: list[str]
) -> list[Measurement]:
    """Measures each system once in each round. Each round begins with another system."""
    measured = [system for system in systems if system.measures(cell)]
    found = []
    for at in range(rounds):
        first = at % max(1, len(measured))
        for system in measured[first:] + measured[:first]:
            try:
                found.append(system.measure(cell, at))
            except (CallFailedError, MeasurementError) as error:
                failures.append(f"{system.name}, {cell.name}: {error}")
    return found


def _measure_open_loop(
    cell: Cell, served: Sequence[Served], plan: BenchmarkPlan, grid: Index
) -> list[OpenLoopMeasurement]:
    """Measures latency at shares of each system's closed-loop rate, in rounds."""
    systems = [system for system in served if system.name in OPEN_LOOP_SYSTEMS]
    capacities = {system.name: of(grid, cell, system.name, sequence_rate) for system in systems}
    found = []
    for share in plan.shares:
        rates = {name: capacity.median * share for name, capacity in capacities.items() if capacity}
        results: dict[str, list[LoadResult]] = {name: [] for name in rates}
        for seed in range(plan.rounds):
            for system in systems:
                if system.name in rates:
                    rate, endpoint = rates[system.name], system.endpoint(cell)
                    job = system.generator.submit(load.open_loop, endpoint, rate, plan.open_seconds, seed)
                    results[system.name].append(job.result())
        found += [_merge(cell, name, share, rates[name], results[name]) for name in rates]
    return found


def _measure_with_perf_analyzer(
    cell: Cell, served: Sequence[Served], plan: BenchmarkPlan, failures: list[str]
) -> list[Measurement]:
    """Measures the servers of the Open Inference Protocol, in rounds."""
    systems = [one for one in served if one.api is Api.OPEN_INFERENCE and one.only is None]
    found = []
    for at in range(plan.rounds):
        for system in systems if at % 2 == 0 else reversed(systems):
            batch_axis = system.name == TRITON_CPP_SINGLE
            try:
                found.append(
                    perf_analyzer.measure(
                        cell,
                        system.name,
                        system.server,
                        at,
                        seconds=plan.perf_analyzer_seconds,
                        batch_axis=batch_axis,
                    )
                )
            except MeasurementError as error:
                failures.append(f"{system.name}, {cell.name}: {error}")
    return found


def _merge(
    cell: Cell, system: str, share: float, rate: float, results: Sequence[LoadResult]
) -> OpenLoopMeasurement:
    return OpenLoopMeasurement(
        cell=cell,
        system=system,
        share=share,
        rate=rate,
        failures=sum(result.failures for result in results),
        latency=Percentiles.of(np.concatenate([result.latencies for result in results])),
    )


def measure_memory(environment: Environment, seconds: float) -> MemoryCurve:
    """Sends requests to all models of the plan in turn, and samples the server's resident memory."""
    service, models = environment.service, environment.setup.plan.models
    endpoints = tuple(
        Endpoint(service.address, service.pid, Api.OPEN_INFERENCE, model, SOAK_LENGTHS) for model in models
    )
    generator = environment.workers.generator
    answered: Future[int] = generator.submit(load.soak, endpoints, SOAK_IN_FLIGHT, seconds)
    date, started, samples = now(), time.monotonic(), []
    while not answered.done():
        elapsed = time.monotonic() - started
        samples.append(MemorySample(elapsed, resident_bytes(process_tree(service.pid))))
        time.sleep(SAMPLE_SECONDS)
    names = " and ".join(model.name for model in models)
    text = (
        f"lengths {SOAK_LENGTHS.name} (lognormal), {names} in turn, {SOAK_IN_FLIGHT} in flight, closed loop"
    )
    return MemoryCurve(date, text, time.monotonic() - started, answered.result(), tuple(samples))
