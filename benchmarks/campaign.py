"""A run: measures every cell in rounds, one system after the other, model by model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.channel import CallFailedError
from benchmarks.fleet import Fleet
from benchmarks.grid import Plan
from benchmarks.open_loop import measure_open_loop, unary_systems
from benchmarks.results import EAGER, ONNX, SERVICE, Cell, Measurement, OpenLoopMeasurement
from benchmarks.systems import MeasurementError, Served, System
from benchmarks.workload import Model

Say = Callable[[str], None]
GROWTH_SYSTEMS = (ONNX, EAGER, SERVICE)


@dataclass
class Findings:
    """What a run has measured so far."""

    grid: list[Measurement] = field(default_factory=list)
    growth: list[Measurement] = field(default_factory=list)
    open_loop: list[OpenLoopMeasurement] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run(fleet: Fleet, findings: Findings, say: Say) -> None:
    """Measures all models of the plan; what fails is written down and left out.

    Args:
        fleet: What is measured.
        findings: Filled as the run goes on, so that one which breaks off leaves what it has.
        say: Told what is measured now, once for each cell.
    """
    for model in fleet.setup.plan.models:
        say(f"{model.name}: starting the peers")
        with fleet.others(model) as others:
            served = _valid(fleet, model, [*fleet.own(model.kind), *others], findings.failures)
            _measure(fleet, model, served, findings, say)


def steps(plan: Plan) -> int:
    """How often `run` says something."""
    cells = sum(len(plan.cells(model)) + len(plan.growth_cells(model)) for model in plan.models)
    return len(plan.models) + cells + len(plan.open_cells)


def _valid(fleet: Fleet, model: Model, served: list[Served], failures: list[str]) -> list[Served]:
    """The systems that answer, and answer rightly."""
    found = []
    for system in served:
        try:
            fleet.validate(system, model)
        except (CallFailedError, MeasurementError, ValueError) as error:
            failures.append(f"{system.name} is left out for {model.name}: {error}")
        else:
            found.append(system)
    return found


def _measure(fleet: Fleet, model: Model, served: list[Served], findings: Findings, say: Say) -> None:
    plan = fleet.setup.plan
    systems: list[System] = [*fleet.in_process(), *served]
    for cell in plan.cells(model):
        say(cell.name)
        findings.grid += in_rounds(cell, systems, plan.rounds, findings.failures)
    growing = [system for system in systems if system.name in GROWTH_SYSTEMS]
    for cell in plan.growth_cells(model):
        say(f"cost growth: {cell.name}")
        findings.growth += in_rounds(cell, growing, plan.rounds, findings.failures)
    for cell in plan.open_cells:
        if cell.model == model:
            say(f"open loop: {cell.name}")
            findings.open_loop += measure_open_loop(cell, unary_systems(served), plan, findings.grid)


def in_rounds(cell: Cell, systems: Sequence[System], rounds: int, failures: list[str]) -> list[Measurement]:
    """Measures a cell: every system once in each round, each round beginning with another one."""
    taking_part = [system for system in systems if system.measures(cell)]
    found = []
    for at in range(rounds):
        first = at % max(1, len(taking_part))
        for system in taking_part[first:] + taking_part[:first]:
            try:
                found.append(system.measure(cell, at))
            except (CallFailedError, MeasurementError) as error:
                failures.append(str(error))
    return found
