"""The performance targets: what each compares, its bound, and whether a run met it."""

from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.results import (
    BATCH,
    ECHO,
    INT8,
    LOWEST,
    ONNX,
    SERVICE,
    STREAM,
    TRITON_CPP,
    TRITON_CPP_SINGLE,
    TYPED,
    EnrichmentRates,
    Index,
    Measurement,
    MemoryCurve,
)
from benchmarks.summary import (
    Spread,
    combined,
    enrichment_ratio,
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
BEST = "Triton's C++ backend at its best"


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


def targets(
    grid: Index, memory: MemoryCurve | None, enrichment: EnrichmentRates | None, cores: int
) -> list[Target]:
    """Returns all targets in the order of the report."""
    growth = None if memory is None else memory_growth(memory)
    rows = None if enrichment is None else enrichment_ratio(enrichment)
    what = "resident memory at the end / after one minute"
    return [
        *_beside_triton(grid),
        *_batch_requests(grid),
        *_own(grid, cores),
        *_graph(grid),
        Target("enrichment, rows of 6 x 64", "rows per second through one server / in process", 0.75, rows),
        Target("ten minutes of mixed lengths up to 2,048", what, 1.1, growth, at_most=True),
    ]


def _beside_triton(grid: Index) -> list[Target]:
    """The service beside the faster configuration of Triton's C++ backend, round by round."""
    loads = (
        (Cell(WIDE, MIDDLE, 8), SERVICE, 1.05),
        (Cell(WIDE, MIXED, 32), SERVICE, 1.05),
        (Cell(WIDE, SHORT, 32), SERVICE, 0.85),
        (Cell(NARROW, SHORT, 32), SERVICE, 0.75),
        (Cell(NARROW, SHORT, 32), STREAM, 0.95),
    )
    single = Cell(WIDE, SHORT, 1)
    latency = ratio(grid, single, LOWEST, TRITON_CPP_SINGLE, p50)
    return [
        *(
            Target(cell.name, f"rate of {system} / rate of {BEST}", bound, beside_best(grid, cell, system))
            for cell, system, bound in loads
        ),
        Target(single.name, f"p50 of {LOWEST} / p50 of {TRITON_CPP_SINGLE}", 1.15, latency, at_most=True),
    ]


def beside_best(grid: Index, cell: Cell, system: str) -> Spread | None:
    """Tokens per second of a system divided by those of the faster configuration of Triton's C++ backend."""

    def formula(own: Measurement, batching: Measurement, single: Measurement) -> float:
        return token_rate(own) / max(token_rate(batching), token_rate(single))

    return combined(grid, cell, (system, TRITON_CPP, TRITON_CPP_SINGLE), formula)


def _batch_requests(grid: Index) -> list[Target]:
    narrow, wide = (Cell(model, MIXED, BATCH_REQUEST, BATCH_REQUEST) for model in (NARROW, WIDE))
    peer = f"rate / rate of {TRITON_CPP} with one sequence in a request"
    in_process = "tokens per second / those in process"
    return [
        Target(narrow.name, peer, 3.0, ratio(grid, narrow, BATCH, TRITON_CPP, sequence_rate)),
        Target(narrow.name, in_process, 0.85, ratio(grid, narrow, BATCH, ONNX, token_rate)),
        Target(wide.name, in_process, 0.85, ratio(grid, wide, BATCH, ONNX, token_rate)),
    ]


def _own(grid: Index, cores: int) -> list[Target]:
    """The service beside its ceilings, and its variants beside each other."""
    loaded, short = Cell(WIDE, MIDDLE, 8), Cell(NARROW, SHORT, 32)
    allowed = combined(grid, loaded, (SERVICE, ONNX, ECHO), partial(share_of_ceiling, cores=cores))
    int8 = ratio(grid, loaded, INT8, SERVICE, sequence_rate)
    stream = ratio(grid, short, STREAM, TYPED, sequence_rate)
    return [
        Target(loaded.name, "rate / ceiling of compute and transport together", 0.9, allowed),
        Target(loaded.name, "rate in int8 / rate in fp32", 1.5, int8),
        Target(short.name, "rate on a stream / rate of unary calls, attention.v1", 1.5, stream),
    ]


def share_of_ceiling(service: Measurement, call: Measurement, echo: Measurement, *, cores: int) -> float:
    """Returns the service's rate divided by the highest rate that compute and transport allow together.

    A request costs the run, which uses all cores, and the transport: the processor time that load generator
    and echo spend on the same bytes, divided by the number of cores.
    """
    transport = (echo.client_us + echo.server_us) / MICROSECONDS / cores
    ceiling = 1 / (1 / call.sequences_per_second + transport)
    return service.sequences_per_second / ceiling


def _graph(grid: Index) -> list[Target]:
    ratios = graph_ratios(grid)
    lowest = spread([min(ratios.values())]) if ratios else None
    middle = spread([median(ratios.values())]) if ratios else None
    case, what = "exported graph in process, whole grid", "tokens per second / those of eager PyTorch"
    return [
        Target(case, f"{what}, lowest cell", 1.0, lowest),
        Target(case, f"{what}, median cell", 1.2, middle),
    ]
