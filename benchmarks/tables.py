"""The tables of a report, in Markdown."""

from collections.abc import Iterable, Sequence

from benchmarks.results import (
    BATCH,
    EAGER,
    ECHO,
    LOWEST,
    ONNX,
    SERVICE,
    STREAM,
    TORCHSERVE,
    TRITON,
    TRITON_CPP,
    TRITON_CPP_SINGLE,
    TYPED,
    Index,
    OpenLoopMeasurement,
)
from benchmarks.summary import Metric, Spread, of, p50, ratio, sequence_rate, token_rate
from benchmarks.targets import BEST, Target, beside_best
from benchmarks.workload import MIDDLE, MIXED, NARROW, SHORT, WIDE, Cell, Model

NOTHING = "-"
PEERS = (TRITON, TRITON_CPP, TRITON_CPP_SINGLE, TORCHSERVE)
HEADLINE_CELLS = (
    Cell(WIDE, SHORT, 1),
    Cell(WIDE, SHORT, 32),
    Cell(WIDE, MIDDLE, 8),
    Cell(WIDE, MIXED, 32),
    Cell(NARROW, SHORT, 1),
    Cell(NARROW, SHORT, 32),
    Cell(NARROW, MIXED, 32),
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; all columns but the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Formats a number with three significant digits and thousands separators."""
    if value is None:
        return NOTHING
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - of three digits
    return f"{float(f'{value:.3g}'):,.{digits}f}"


def with_ratio(value: Spread | None) -> str:
    """Formats a median, and the largest round divided by the smallest."""
    return NOTHING if value is None else f"{number(value.median)} (x {value.ratio:.2f})"


def with_range(value: Spread | None) -> str:
    """Formats the median of a ratio and its range."""
    return NOTHING if value is None else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"


def rates_table(grid: Index) -> str:
    """The service beside the peers in the most important cells, in sequences per second."""
    peers = [name for name in PEERS if name in grid.systems()]
    systems = [SERVICE, *(name for name in (STREAM,) if name in grid.systems()), *peers]
    rows = [
        (
            cell.name,
            *(with_ratio(of(grid, cell, name, sequence_rate)) for name in systems),
            *(with_range(ratio(grid, cell, SERVICE, name, token_rate)) for name in peers),
        )
        for cell in HEADLINE_CELLS
        if grid.rounds(cell, SERVICE)
    ]
    return table(("case", *systems, *(f"{SERVICE} / {name}" for name in peers)), rows)


def single_latency_table(grid: Index) -> str:
    """The median latency of one request in flight, in microseconds: self-attention, service and peers."""
    systems = [name for name in (SERVICE, LOWEST, STREAM, *PEERS) if name in grid.systems()]
    cells = [
        cell
        for cell in grid.cells()
        if cell.in_flight == 1 and cell.per_request == 1 and cell.model in (WIDE, NARROW)
    ]
    rows = [(cell.name, *(with_ratio(of(grid, cell, name, p50)) for name in systems)) for cell in cells]
    return table(("p50, µs", *systems), rows)


def targets_table(targets: Sequence[Target]) -> str:
    """Value, bound and verdict of each target."""
    rows = [
        (
            target.case,
            target.what,
            with_range(target.value),
            f"{'≤' if target.at_most else '≥'} {target.bound:g}",
            f"**{target.verdict}**" if target.verdict == "missed" else target.verdict,
        )
        for target in targets
    ]
    return table(("case", "measured", "median (range)", "target", "verdict"), rows)


def metric_table(index: Index, cells: Sequence[Cell], metric: Metric) -> str:
    """One metric of every system that was measured in some of the cells."""
    systems = [name for name in index.systems() if any(index.rounds(cell, name) for cell in cells)]
    rows = [
        (
            f"{cell.lengths.name}, {cell.load}",
            *(with_ratio(of(index, cell, name, metric)) for name in systems),
        )
        for cell in cells
    ]
    return table(("length, load", *systems), rows)


def generator_table(found: Index) -> str:
    """Rates and latencies from another load generator: requests per second, and the p50 in microseconds."""
    systems = found.systems()
    rows = [
        (
            cell.name,
            *(
                f"{with_ratio(of(found, cell, name, sequence_rate))}; {_middle(of(found, cell, name, p50))}"
                for name in systems
            ),
            with_range(beside_best(found, cell, SERVICE)),
        )
        for cell in found.cells()
    ]
    return table(("requests/s; p50, µs", *systems, f"{SERVICE} / {BEST}"), rows)


def model_tables(grid: Index, model: Model) -> str:
    """Rates and latencies of one model."""
    cells = [cell for cell in grid.cells() if cell.model == model and cell.per_request == 1]
    return "\n\n".join(
        (
            f"### {model.kind} attention, d {model.width}, {model.heads} heads",
            "Sequences per second:",
            metric_table(grid, cells, sequence_rate),
            "Median latency of one request (in process: of one call), µs:",
            metric_table(grid, cells, p50),
        )
    )


def ratios_table(grid: Index) -> str:
    """The service divided by peers and ceilings in every cell."""
    peers = [(SERVICE, name) for name in PEERS if name in grid.systems()]
    pairs = [*peers, (SERVICE, ONNX), (SERVICE, ECHO), (ONNX, EAGER)]
    cells = [cell for cell in grid.cells() if cell.per_request == 1]
    rows = [
        (cell.name, *(with_range(ratio(grid, cell, *pair, token_rate)) for pair in pairs)) for cell in cells
    ]
    return table(("tokens per second", *(f"{over} / {under}" for over, under in pairs)), rows)


def batch_requests_table(grid: Index) -> str:
    """Many sequences at a time: in one request, as requests of one sequence, and in process."""
    cells = [cell for cell in grid.cells() if cell.per_request > 1]
    rows = [
        (
            cell.name,
            name,
            with_ratio(of(grid, cell, name, sequence_rate)),
            with_ratio(of(grid, cell, name, token_rate)),
            " or ".join(sorted({one.how for one in grid.rounds(cell, name)})),
        )
        for cell in cells
        for name in (BATCH, TRITON, TRITON_CPP, ONNX)
        if grid.rounds(cell, name)
    ]
    return table(("case", "system", "sequences/s", "tokens/s", "fastest with"), rows)


def streams_table(grid: Index) -> str:
    """Streams beside unary calls of the same API."""
    cells = [cell for cell in grid.cells() if grid.rounds(cell, STREAM)]
    rows = [
        (
            cell.name,
            with_ratio(of(grid, cell, TYPED, sequence_rate)),
            with_ratio(of(grid, cell, STREAM, sequence_rate)),
            with_range(ratio(grid, cell, STREAM, TYPED, sequence_rate)),
        )
        for cell in cells
    ]
    return table(("case", "unary, sequences/s", "stream, sequences/s", "stream / unary"), rows)


def processor_table(grid: Index) -> str:
    """Processor time of one request in the load generator and in the server, at the highest load."""
    names = [name for name in (ECHO, SERVICE, TYPED, STREAM, *PEERS) if name in grid.systems()]
    highest = max((cell.in_flight for cell in grid.cells() if cell.per_request == 1), default=0)
    cells = [cell for cell in grid.cells() if cell.per_request == 1 and cell.in_flight == highest]
    rows = []
    for cell in cells:
        client = (of(grid, cell, name, lambda one: one.client_us) for name in names)
        server = (of(grid, cell, name, lambda one: one.server_us) for name in names)
        both = zip(client, server, strict=True)
        rows.append((cell.name, *(_sum(one, other) for one, other in both)))
    return table(("generator + server, µs", *names), rows)


def open_loop_table(found: Sequence[OpenLoopMeasurement]) -> str:
    """Percentiles of the service and the peers at fixed rates, in microseconds."""
    rows = []
    for one in (one for one in found if one.system != ECHO):
        percentiles = (one.latency.p50, one.latency.p90, one.latency.p99, one.latency.p99_9)
        case, rate = one.cell.name.rpartition(",")[0], f"{number(one.rate)} ({one.share:.0%})"
        counts = (f"{one.latency.count:,}", str(one.failures))
        rows.append((case, one.system, rate, *map(number, percentiles), *counts))
    rate_column = "requests/s (share of closed-loop rate)"
    header = ("case", "system", rate_column, "p50", "p90", "p99", "p99.9", "requests", "failed")
    return table(header, rows)


def _middle(value: Spread | None) -> str:
    return number(value.median if value else None)


def _sum(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None:
        return NOTHING
    return f"{number(one.median)} + {number(other.median)}"
