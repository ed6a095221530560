"""The targets: what each compares, its bound, and whether a run met it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.memory import growth_ratio
from benchmarks.results import (
    BULK,
    EAGER,
    ECHO,
    ONNX,
    SERVICE,
    STREAM,
    TORCHSERVE,
    TRITON,
    TYPED,
    Cell,
    Index,
    Measurement,
    Memory,
)
from benchmarks.summary import Figure, Spread, combined, p50, ratio, sequence_rate, spread, token_rate
from benchmarks.workload import Kind, Lengths, Model

NARROW = Model(Kind.SELF, 64, 4)
WIDE = Model(Kind.SELF, 768, 12)
SHORT, MIDDLE, LONG, MIXED = Lengths(6), Lengths(128), Lengths(512), Lengths(512, mixed=True)
BULK_SEQUENCES = 64
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Target:
    """One line of the table: `value` must be at least, or at most, the bound."""

    case: str
    what: str
    bound: float
    value: Spread | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """Met or missed by the median; or not measured."""
        if self.value is None:
            return "not measured"
        met = self.value.median <= self.bound if self.at_most else self.value.median >= self.bound
        return "met" if met else "missed"


def targets(grid: Index, memory: Memory | None, cores: int) -> list[Target]:
    """All targets, in the order of the report."""
    return [
        *_alone(grid),
        *_loaded(grid, cores),
        *_short(grid),
        *_bulk(grid),
        *_graph(grid),
        Target(
            "ten minutes of mixed lengths up to 2,048",
            "resident memory at the end by that after one minute",
            1.1,
            None if memory is None else growth_ratio(memory),
            at_most=True,
        ),
    ]


def _alone(grid: Index) -> list[Target]:
    cell = Cell(WIDE, SHORT, 1)

    def formula(service: Measurement, run: Measurement, echo: Measurement) -> float | None:
        parts = (service.latency.p50, run.latency.p50, echo.latency.p50)
        return None if None in parts else parts[0] / (parts[1] + parts[2])  # type: ignore[operator]

    floor = combined(grid, cell, (SERVICE, ONNX, ECHO), formula)
    triton = ratio(grid, cell, SERVICE, TRITON, p50)
    return [
        Target(
            cell.name, "p50 by that of the run in process plus that of the echo", 1.25, floor, at_most=True
        ),
        Target(cell.name, "p50 by Triton's", 0.6, triton, at_most=True),
    ]


def _loaded(grid: Index, cores: int) -> list[Target]:
    cell, mixed = Cell(WIDE, MIDDLE, 8), Cell(WIDE, MIXED, 32)
    allowed = combined(grid, cell, (SERVICE, ONNX, ECHO), partial(share_of_allowed, cores=cores))
    return [
        Target(cell.name, "rate by what compute allows beside the load generator", 0.9, allowed),
        Target(cell.name, "rate by Triton's", 1.1, ratio(grid, cell, SERVICE, TRITON, sequence_rate)),
        Target(mixed.name, "tokens/s by Triton's", 1.25, ratio(grid, mixed, SERVICE, TRITON, token_rate)),
    ]


def share_of_allowed(service: Measurement, run: Measurement, echo: Measurement, *, cores: int) -> float:
    """The service's rate by the highest that compute and transport together allow on these cores.

    A request costs the run, which holds all cores for its time, and the transport: the processor time that
    the load generator and the echo spend on the same bytes, spread over the cores.
    """
    transport = (echo.client_us + echo.server_us) / MICROSECONDS / cores
    allowed = 1 / (1 / run.sequences_per_second + transport)
    return service.sequences_per_second / allowed


def _short(grid: Index) -> list[Target]:
    found = []
    for model in (WIDE, NARROW):
        cell = Cell(model, SHORT, 32)
        for peer, bound in ((TRITON, 1.0), (TORCHSERVE, 2.5)):
            value = ratio(grid, cell, SERVICE, peer, sequence_rate)
            found.append(Target(cell.name, f"rate by that of {peer}", bound, value))
    return found


def _bulk(grid: Index) -> list[Target]:
    narrow, wide = (Cell(model, MIXED, BULK_SEQUENCES, BULK_SEQUENCES) for model in (NARROW, WIDE))
    stream = Cell(NARROW, SHORT, 32)
    make: Callable[[Cell, str, str, Figure], Spread | None] = partial(ratio, grid)
    return [
        Target(
            narrow.name,
            "sequences/s by Triton's, as requests of one",
            8.0,
            make(narrow, BULK, TRITON, sequence_rate),
        ),
        Target(wide.name, "tokens/s by the compute ceiling", 0.9, make(wide, BULK, ONNX, token_rate)),
        Target(
            stream.name,
            "rate of a stream by unary calls, attention.v1",
            1.5,
            make(stream, STREAM, TYPED, sequence_rate),
        ),
    ]


def _graph(grid: Index) -> list[Target]:
    ratios = graph_ratios(grid)
    least = spread([min(ratios.values())]) if ratios else None
    middle = spread([median(ratios.values())]) if ratios else None
    return [
        Target(
            "exported graph in process, whole grid", "tokens/s by eager PyTorch's, least cell", 1.0, least
        ),
        Target("exported graph in process, whole grid", "the same, median of the cells", 1.2, middle),
    ]


def graph_ratios(grid: Index) -> dict[Cell, float]:
    """Tokens per second of the exported graph by eager PyTorch's, the median of the rounds, by cell."""
    found = {cell: ratio(grid, cell, ONNX, EAGER, token_rate) for cell in grid.cells()}
    return {cell: value.median for cell, value in found.items() if value is not None}
