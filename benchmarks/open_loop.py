"""Latency at fixed rates: shares of what each system answered in closed loop."""

from collections.abc import Sequence

import numpy as np

from benchmarks import load
from benchmarks.grid import Plan
from benchmarks.histogram import percentiles
from benchmarks.load import LoadResult
from benchmarks.results import (
    ECHO,
    SERVICE,
    TORCHSERVE,
    TRITON,
    Cell,
    Index,
    Measurement,
    OpenLoopMeasurement,
)
from benchmarks.summary import of, sequence_rate
from benchmarks.systems import Served

SYSTEMS = (SERVICE, TRITON, TORCHSERVE, ECHO)


def unary_systems(served: Sequence[Served]) -> list[Served]:
    """The systems whose latency is compared at fixed rates."""
    return [system for system in served if system.name in SYSTEMS]


def measure_open_loop(
    cell: Cell, systems: Sequence[Served], plan: Plan, grid: Sequence[Measurement]
) -> list[OpenLoopMeasurement]:
    """Every share of the closed-loop rate, in rounds, one system after the other."""
    index = Index(tuple(grid))
    capacities = {system.name: of(index, cell, system.name, sequence_rate) for system in systems}
    found = []
    for share in plan.shares:
        rates = {name: capacity.median * share for name, capacity in capacities.items() if capacity}
        results: dict[str, list[LoadResult]] = {name: [] for name in rates}
        for seed in range(plan.rounds):
            for system in systems:
                if system.name in rates:
                    results[system.name].append(_issue(system, cell, rates[system.name], plan, seed))
        found += [_merge(cell, name, share, rates[name], results[name]) for name in rates]
    return found


def _issue(system: Served, cell: Cell, rate: float, plan: Plan, seed: int) -> LoadResult:
    job = system.generator.submit(load.open_loop, system.endpoint(cell), rate, plan.open_seconds, seed)
    return job.result()


def _merge(
    cell: Cell, system: str, share: float, rate: float, results: Sequence[LoadResult]
) -> OpenLoopMeasurement:
    return OpenLoopMeasurement(
        cell=cell,
        system=system,
        share=share,
        rate=rate,
        failures=sum(result.failures for result in results),
        latency=percentiles(np.concatenate([result.latencies for result in results])),
    )
