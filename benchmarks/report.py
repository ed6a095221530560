"""The report of a run in Markdown: targets, rates, latencies, ratios, plots, and the method."""

from collections import Counter
from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.markdown import table, text
from benchmarks.run import EAGER, ECHO, ONNX, SERVICE, STREAM, TYPED, Findings
from benchmarks.systems import (
    PERCENTS,
    Measurement,
    Metric,
    Rounds,
    Spread,
    of,
    ratio,
    sequences_per_second,
    spread,
    tokens_per_second,
)
from benchmarks.workload import BATCHES, NARROW, SHORT, AttentionKind, Cell

METHOD = Path(__file__).with_name("method.md")
Grid = dict[Cell, dict[str, list[Measurement | None]]]


def write(findings: Findings, conditions: dict[str, str], folder: Path) -> Path:
    """Writes report.md and the plots into a folder, and returns the report's path."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    grid = findings.grid
    plots = [
        _plot(grid, folder, "throughput-against-load", "requests in flight", tokens_per_second),
        _plot(grid, folder, "latency-against-length", "length", lambda one: one.p50),
    ]
    counted = Counter(findings.failures).items()
    sections = {
        "Targets": table(("case", "measured", "median (range)", "target", "verdict"), targets(grid)),
        "Sequences per second": metric_table(grid, sequences_per_second),
        "Median latency of one request (in process: of one call), µs": metric_table(
            grid, lambda one: one.p50
        ),
        "At fixed rates, µs": _at_rates(findings),
        "Ratios": _ratios(grid),
        "Plots": "\n\n".join(f"![{name}]({name}.png)" for name in plots),
        "Not measured": "\n".join(f"- {failure} ({count} times)" for failure, count in counted),
        "How it was measured": METHOD.read_text().rstrip(),
        "Conditions": "\n".join(f"- {name}: {value}" for name, value in conditions.items()),
    }
    body = "".join(f"\n## {title}\n\n{body}\n" for title, body in sections.items() if body)
    path = folder / "report.md"
    path.write_text(
        "# Benchmark\n\nA case names the length and width of a sequence and the load; the load generator "
        "uses the same cores. Figures are medians over rounds; ratios are taken round by round, with their "
        f"range in parentheses.\n{body}"
    )
    return path


def middle(value: Spread | None) -> str:
    """Formats a median."""
    return text(value.median if value else None)


def with_range(value: Spread | None) -> str:
    """Formats the median of a ratio and its range."""
    return "-" if value is None else f"{value.median:.2f} ({value.low:.2f} to {value.high:.2f})"


def systems_of(grid: Grid) -> list[str]:
    """Returns each system once, in the order of measurement."""
    return list(dict.fromkeys(name for rounds in grid.values() for name in rounds))


def metric_table(grid: Grid, metric: Metric) -> str:
    """One metric of every system in every cell."""
    names = systems_of(grid)
    rows = [(c.name, *(middle(of(rounds, name, metric)) for name in names)) for c, rounds in grid.items()]
    return table(("case", *names), rows)


def _ratios(grid: Grid) -> str:
    """The service divided by its ceilings and by the peers."""
    own = (ONNX, EAGER, ECHO, SERVICE, TYPED, STREAM)
    pairs = [(SERVICE, name) for name in (ONNX, ECHO, *systems_of(grid)) if name not in own[1:]]
    pairs = [*dict.fromkeys(pairs), (STREAM, TYPED), (ONNX, EAGER)]
    rows = [(c.name, *(with_range(ratio(rounds, *pair)) for pair in pairs)) for c, rounds in grid.items()]
    return table(("rows per second", *(f"{over} / {under}" for over, under in pairs)), rows)


def _at_rates(findings: Findings) -> str:
    rows = [
        (
            f"{one.cell.lengths.name} x {one.cell.model.width}",
            one.system,
            f"{text(one.rate)} ({one.share:.0%})",
            *map(text, one.latencies),
            f"{one.requests:,}",
            str(one.failures),
        )
        for one in findings.at_rates
    ]
    header = ("case", "system", "requests/s (share of closed-loop rate)")
    return table((*header, *(f"p{percent:g}" for percent in PERCENTS), "requests", "failed"), rows)


def targets(grid: Grid) -> list[tuple[str, str, str, str, str]]:
    """Returns the rows of the table of targets."""
    short = Cell(NARROW, SHORT, 32)
    graph = [found.median for rounds in grid.values() if (found := ratio(rounds, ONNX, EAGER))]

    def in_cell(cell: Cell) -> Rounds:
        return grid.get(cell, {})

    lines: list[tuple[str, str, float, Spread | None]] = [
        (short.name, "rate on a stream / rate of unary calls", 1.5, ratio(in_cell(short), STREAM, TYPED)),
        *((cell.name, "rows per second / those in process", 0.85, ratio(in_cell(cell), TYPED, ONNX))
          for cell in BATCHES),
        ("exported graph in process", "rate / eager PyTorch, lowest cell", 1.0,
         spread([min(graph)] if graph else [])),
        ("exported graph in process", "rate / eager PyTorch, median cell", 1.2,
         spread([median(graph)] if graph else [])),
    ]  # fmt: skip
    return [
        (case, what, with_range(found), f"≥ {bound:g}", _verdict(found, bound))
        for case, what, bound, found in lines
    ]


def _verdict(found: Spread | None, bound: float) -> str:
    if found is None:
        return "not measured"
    return "met" if found.median >= bound else "**missed**"


def _plot(grid: Grid, folder: Path, name: str, axis: str, metric: Metric) -> str:
    """Plots a metric of self-attention: of one request in flight by length, or by the number in flight."""
    by_length = axis == "length"
    own = [cell for cell in grid if cell.model.kind is AttentionKind.SELF and cell.per_request == 1]
    if by_length:
        own = [cell for cell in own if cell.in_flight == 1 and not cell.lengths.mixed]
    panels: dict[str, list[Cell]] = {}
    for cell in own:
        width = cell.model.width
        panels.setdefault(f"width {width}" if by_length else f"{cell.lengths.name} x {width}", []).append(
            cell
        )
    figure, axes = plt.subplots(1, max(1, len(panels)), figsize=(4.5 * max(1, len(panels)), 4), squeeze=False)
    for ax, (title, cells) in zip(axes.flat, panels.items(), strict=False):
        for system in systems_of(grid):
            found = [
                (cell.lengths.longest if by_length else cell.in_flight, value.median)
                for cell in cells
                if (value := of(grid[cell], system, metric))
            ]
            ax.plot(*zip(*sorted(found), strict=True), "o-", markersize=4, label=system) if found else None
        ax.set(
            title=title, xlabel=axis, ylabel="p50, µs" if by_length else "rows/s", xscale="log", yscale="log"
        )
        ax.grid(visible=True, alpha=0.3)
        ax.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=110)
    plt.close(figure)
    return name
