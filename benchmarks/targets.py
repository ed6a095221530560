"""The performance targets: what each compares, its bound, and whether a run met it."""

from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.results import (
    BATCH,
    ECHO,
    ONNX,
    SERVICE,
    STREAM,
    TORCHSERVE,
    TRITON,
    TYPED,
    Index,
    Measurement,
    MemoryCurve,
)
from benchmarks.summary import (
    Spread,
    combined,
    graph_ratios,
    memory_growth,
    p50,
    ratio,
    sequence_rate,
    spread,
    token_rate,
)
from benchmarks.workload import BATCH_REQUEST, MIDDLE, MIXED, NARROW, SHORT, WIDE, Cell

MICROSECONDS = 1e6


@dataclass(frozen=True)
class Target:
    """A line of the table of targets: `value` must be at least `bound`, or at most if `at_most` is set."""

    case: str
    what: str
    bound: float
    value: Spread | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        """`met` or `missed`, decided by the median; or `not measured`."""
        if self.value is None:
            return "not measured"
        met = self.value.median <= self.bound if self.at_most else self.value.median >= self.bound
        return "met" if met else "missed"


def targets(grid: Index, memory: MemoryCurve | None, cores: int) -> list[Target]:
    """Returns all targets in the order of the report."""
    growth = None if memory is None else memory_growth(memory)
    what = "resident memory at the end / after one minute"
    return [
        *_single_request(grid),
        *_loaded(grid, cores),
        *_short(grid),
        *_batch_requests(grid),
        *_graph(grid),
        Target("ten minutes of mixed lengths up to 2,048", what, 1.1, growth, at_most=True),
    ]


def _single_request(grid: Index) -> list[Target]:
    cell = Cell(WIDE, SHORT, 1)

    def formula(service: Measurement, call: Measurement, echo: Measurement) -> float | None:
        parts = (service.latency.p50, call.latency.p50, echo.latency.p50)
        return None if None in parts else parts[0] / (parts[1] + parts[2])  # type: ignore[operator]

    floor = combined(grid, cell, (SERVICE, ONNX, ECHO), formula)
    triton = ratio(grid, cell, SERVICE, TRITON, p50)
    return [
        Target(cell.name, "p50 / (p50 in process + p50 of the echo)", 1.25, floor, at_most=True),
        Target(cell.name, f"p50 / p50 of {TRITON}", 0.6, triton, at_most=True),
    ]


def _loaded(grid: Index, cores: int) -> list[Target]:
    cell, mixed = Cell(WIDE, MIDDLE, 8), Cell(WIDE, MIXED, 32)
    allowed = combined(grid, cell, (SERVICE, ONNX, ECHO), partial(share_of_ceiling, cores=cores))
    triton = ratio(grid, cell, SERVICE, TRITON, sequence_rate)
    tokens = ratio(grid, mixed, SERVICE, TRITON, token_rate)
    return [
        Target(cell.name, "rate / ceiling of compute and transport together", 0.9, allowed),
        Target(cell.name, f"rate / rate of {TRITON}", 1.1, triton),
        Target(mixed.name, f"tokens per second / those of {TRITON}", 1.25, tokens),
    ]


def share_of_ceiling(service: Measurement, call: Measurement, echo: Measurement, *, cores: int) -> float:
    """Returns the service's rate divided by the highest rate that compute and transport allow together.

    A request costs the run, which uses all cores, and the transport: the processor time that load generator
    and echo spend on the same bytes, divided by the number of cores.
    """
    transport = (echo.client_us + echo.server_us) / MICROSECONDS / cores
    ceiling = 1 / (1 / call.sequences_per_second + transport)
    return service.sequences_per_second / ceiling


def _short(grid: Index) -> list[Target]:
    found = []
    for model in (WIDE, NARROW):
        cell = Cell(model, SHORT, 32)
        for peer, bound in ((TRITON, 1.0), (TORCHSERVE, 2.5)):
            value = ratio(grid, cell, SERVICE, peer, sequence_rate)
            found.append(Target(cell.name, f"rate / rate of {peer}", bound, value))
    return found


def _batch_requests(grid: Index) -> list[Target]:
    narrow, wide = (Cell(model, MIXED, BATCH_REQUEST, BATCH_REQUEST) for model in (NARROW, WIDE))
    stream = Cell(NARROW, SHORT, 32)
    peer = ratio(grid, narrow, BATCH, TRITON, sequence_rate)
    ceiling = ratio(grid, wide, BATCH, ONNX, token_rate)
    unary = ratio(grid, stream, STREAM, TYPED, sequence_rate)
    return [
        Target(narrow.name, f"rate / rate of {TRITON} with one sequence in a request", 8.0, peer),
        Target(wide.name, "tokens per second / those in process", 0.9, ceiling),
        Target(stream.name, "rate on a stream / rate of unary calls, attention.v1", 1.5, unary),
    ]


def _graph(grid: Index) -> list[Target]:
    ratios = graph_ratios(grid)
    lowest = spread([min(ratios.values())]) if ratios else None
    middle = spread([median(ratios.values())]) if ratios else None
    case, what = "exported graph in process, whole grid", "tokens per second / those of eager PyTorch"
    return [
        Target(case, f"{what}, lowest cell", 1.0, lowest),
        Target(case, f"{what}, median cell", 1.2, middle),
    ]
