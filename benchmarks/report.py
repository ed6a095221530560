"""The report of a run in Markdown: rates, latencies, ratios, the method; of a GPU also the proof."""

from collections import Counter
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.markdown import table, text
from benchmarks.run import EAGER, ECHO, ONNX, SERVICE, STREAM, TYPED, Findings
from benchmarks.systems import (
    PERCENTS,
    Measurement,
    Metric,
    Spread,
    of,
    ratio,
    sequences_per_second,
)
from benchmarks.workload import Cell

mpl.use("Agg")
METHOD = Path(__file__).with_name("method.md")
PROOF = ("model", "precision", "outputs compared", "largest error", "tolerance", "operators on the host")
Grid = dict[Cell, dict[str, list[Measurement | None]]]


def write(findings: Findings, conditions: dict[str, str], folder: Path) -> Path:
    """Writes report.md and a plot into a folder, and returns the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    grid = findings.grid
    plot(grid, folder / "rates.png")
    counted = Counter(findings.failures).items()
    sections = {
        "Proof: graphs compared with eager PyTorch": table(PROOF, findings.proof) if findings.proof else "",
        "Sequences per second": metric_table(grid, sequences_per_second),
        "Median latency of one request (in process: of one call), µs": metric_table(
            grid, lambda one: one.p50
        ),
        "At fixed rates, µs": _at_rates(findings),
        "Ratios": _ratios(grid),
        "Plot": "![Sequences per second by the number of requests in flight](rates.png)",
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


def plot(grid: Grid, path: Path) -> None:
    """Plots the rates of every system by the number of requests in flight, for each kind of sequence."""
    panels: dict[str, list[Cell]] = {}
    for cell in grid:
        panels.setdefault(f"{cell.lengths.name} x {cell.model.width}", []).append(cell)
    figure, axes = plt.subplots(1, max(1, len(panels)), figsize=(4.5 * max(1, len(panels)), 4), squeeze=False)
    for ax, (title, cells) in zip(axes.flat, panels.items(), strict=False):
        for system in systems_of(grid):
            rates = [(cell.in_flight, of(grid[cell], system, sequences_per_second)) for cell in cells]
            if found := sorted((in_flight, rate.median) for in_flight, rate in rates if rate):
                ax.plot(*zip(*found, strict=True), "o-", markersize=4, label=system)
        ax.set(title=title, xlabel="requests in flight", ylabel="sequences/s", xscale="log", yscale="log")
        ax.grid(visible=True, alpha=0.3)
    axes[0, 0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratios(grid: Grid) -> str:
    """The service divided by its ceilings and by the peers."""
    own = (ONNX, EAGER, ECHO, SERVICE, TYPED, STREAM)
    peers = [name for name in systems_of(grid) if name not in own]
    pairs = [(SERVICE, name) for name in (ONNX, ECHO, *peers)]
    pairs += [(TYPED, ONNX), (STREAM, TYPED), (ONNX, EAGER)]
    rows = [(c.name, *(with_range(ratio(rounds, *pair)) for pair in pairs)) for c, rounds in grid.items()]
    return table(("rows per second", *(f"{over} / {under}" for over, under in pairs)), rows)


def _at_rates(findings: Findings) -> str:
    if not findings.at_rates:
        return ""
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
