"""Tables of a report, in Markdown."""

from collections.abc import Iterable, Sequence

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
    OpenLoopMeasurement,
)
from benchmarks.summary import Figure, Spread, of, p50, ratio, sequence_rate, token_rate
from benchmarks.targets import Target
from benchmarks.workload import Model

NOTHING = "-"
RATIOS = ((SERVICE, TRITON), (SERVICE, TORCHSERVE), (SERVICE, ONNX), (SERVICE, ECHO), (ONNX, EAGER))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, all but its first column to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(value: float | None) -> str:
    """Three significant digits, thousands separated."""
    if value is None:
        return NOTHING
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004 - of three digits
    return f"{float(f'{value:.3g}'):,.{digits}f}"


def with_ratio(value: Spread | None) -> str:
    """The median, and the largest by the smallest round."""
    return NOTHING if value is None else f"{number(value.median)} (x {value.ratio:.2f})"


def with_range(value: Spread | None) -> str:
    """The median of a ratio, and its range."""
    return NOTHING if value is None else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"


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
    return table(("case", "measured", "median (range)", "target", ""), rows)


def figures_table(index: Index, cells: Sequence[Cell], figure: Figure) -> str:
    """One figure of every system that was measured in some of the cells."""
    systems = [name for name in index.systems() if any(index.rounds(cell, name) for cell in cells)]
    rows = [
        (_place(cell), *(with_ratio(of(index, cell, name, figure)) for name in systems)) for cell in cells
    ]
    return table(("length, load", *systems), rows)


def model_tables(grid: Index, model: Model) -> str:
    """Rates and latencies of one model."""
    cells = [cell for cell in grid.cells() if cell.model == model and cell.bulk == 1]
    return "\n\n".join(
        (
            f"### {model.kind} attention, d {model.width}, {model.heads} heads",
            "Sequences per second:",
            figures_table(grid, cells, sequence_rate),
            "p50 of one request (in process: of one run), µs:",
            figures_table(grid, cells, p50),
        )
    )


def ratios_table(grid: Index) -> str:
    """The service beside peers and ceilings, cell by cell."""
    cells = [cell for cell in grid.cells() if cell.bulk == 1]
    rows = [
        (cell.name, *(with_range(ratio(grid, cell, *pair, token_rate)) for pair in RATIOS)) for cell in cells
    ]
    return table(("tokens/s by tokens/s", *(f"{over} / {under}" for over, under in RATIOS)), rows)


def bulk_table(grid: Index) -> str:
    """Many sequences at once: in one request, as single requests, in process."""
    cells = [cell for cell in grid.cells() if cell.bulk > 1]
    rows = [
        (
            cell.name,
            name,
            with_ratio(of(grid, cell, name, sequence_rate)),
            with_ratio(of(grid, cell, name, token_rate)),
            ", ".join(dict.fromkeys(one.how for one in grid.rounds(cell, name))),
        )
        for cell in cells
        for name in (BULK, TRITON, ONNX)
        if grid.rounds(cell, name)
    ]
    return table(("case", "system", "sequences/s", "tokens/s", "best with"), rows)


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
    """Processor time of one request in generator and server."""
    names = [name for name in (ECHO, SERVICE, TYPED, STREAM, TRITON, TORCHSERVE) if name in grid.systems()]
    cells = [cell for cell in grid.cells() if cell.bulk == 1 and cell.in_flight == max(_loads(grid))]
    rows = []
    for cell in cells:
        client = (of(grid, cell, name, lambda one: one.client_us) for name in names)
        server = (of(grid, cell, name, lambda one: one.server_us) for name in names)
        both = zip(client, server, strict=True)
        rows.append((cell.name, *(_sum(one, other) for one, other in both)))
    return table(("generator + server, µs", *names), rows)


def open_loop_table(found: Sequence[OpenLoopMeasurement]) -> str:
    """Percentiles at fixed rates."""
    rows = [
        (
            one.cell.name.rpartition(",")[0],
            one.system,
            f"{number(one.rate)} ({one.share:.0%})",
            *(number(value) for value in _percentiles(one)),
            f"{one.latency.count:,}",
            str(one.failures),
        )
        for one in found
    ]
    header = (
        "case",
        "system",
        "requests/s (of closed loop)",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "requests",
        "failed",
    )
    return table(header, rows)


def _percentiles(one: OpenLoopMeasurement) -> tuple[float | None, ...]:
    latency = one.latency
    return latency.p50, latency.p90, latency.p99, latency.p99_9


def _place(cell: Cell) -> str:
    return f"{cell.lengths.name}, {cell.in_flight} in flight"


def _loads(grid: Index) -> list[int]:
    return [cell.in_flight for cell in grid.cells() if cell.bulk == 1]


def _sum(one: Spread | None, other: Spread | None) -> str:
    if one is None or other is None:
        return NOTHING
    return f"{number(one.median)} + {number(other.median)}"
