"""The report of a run in Markdown: rates, latencies, ratios, the method."""

from collections import Counter
from pathlib import Path

from benchmarks.markdown import table, text
from benchmarks.run import EAGER, ECHO, ONNX, SERVICE, STREAM, TYPED, Findings, Grid
from benchmarks.systems import PERCENTS, median_of, ratio

METHOD = Path(__file__).with_name("method.md")
PERCENTILES = [f"p{percent:g}" for percent in PERCENTS]
AT_RATES = ("case", "system", "requests/s (share of closed-loop rate)", *PERCENTILES, "requests", "failed")


def write(findings: Findings, conditions: dict[str, str], folder: Path) -> Path:
    """Writes report.md into a folder, and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    grid = findings.grid
    counted = Counter(findings.failures).items()
    sections = {
        "Sequences per second": metric_table(grid, "sequences_per_second"),
        "Median latency of one request (in process: of one call), µs": metric_table(grid, "p50"),
        "At fixed rates, µs": table(AT_RATES, findings.at_rates) if findings.at_rates else "",
        "Ratios": _ratios(grid),
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


def systems_of(grid: Grid) -> list[str]:
    """Returns each system once, in the order of measurement."""
    return list(dict.fromkeys(name for rounds in grid.values() for name in rounds))


def metric_table(grid: Grid, metric: str) -> str:
    """One metric of every system in every cell."""
    systems = systems_of(grid)
    rows = [
        (cell.name, *(text(median_of(rounds, system, metric)) for system in systems))
        for cell, rounds in grid.items()
    ]
    return table(("case", *systems), rows)


def _ratios(grid: Grid) -> str:
    """The service divided by its ceilings and by the peers."""
    peers = [name for name in systems_of(grid) if name not in (ONNX, EAGER, ECHO, SERVICE, TYPED, STREAM)]
    pairs = [(SERVICE, name) for name in (ONNX, ECHO, *peers)]
    pairs += [(TYPED, ONNX), (STREAM, TYPED), (ONNX, EAGER)]
    rows = [(cell.name, *(text(ratio(rounds, *pair)) for pair in pairs)) for cell, rounds in grid.items()]
    return table(("rows per second", *(f"{over} / {under}" for over, under in pairs)), rows)
