"""The plots of a report."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.results import BATCH, Index, MemoryCurve, Results
from benchmarks.summary import Metric, of, p50, token_rate
from benchmarks.workload import AttentionKind, Cell

mpl.use("Agg")
MIB = 1 << 20
MINUTE = 60
LATENCY, THROUGHPUT, OPEN, GROWTH, MEMORY = (
    "latency-against-length.png",
    "throughput-against-load.png",
    "latency-against-load.png",
    "cost-growth.png",
    "memory.png",
)


def draw(results: Results, memory: MemoryCurve | None, folder: Path) -> list[str]:
    """Writes each plot for which there are measurements; returns the names of the files."""
    grid, growth = Index(results.grid), Index(results.growth)
    drawn = [_latency(grid, folder), _throughput(grid, folder)]
    if results.open_loop:
        drawn.append(_open_loop(results, folder))
    if results.growth:
        drawn.append(_growth(growth, folder))
    if memory is not None:
        drawn.append(_memory(memory, folder))
    return drawn


def _latency(grid: Index, folder: Path) -> str:
    cells = [cell for cell in _self_attention(grid) if cell.in_flight == 1 and not cell.lengths.mixed]
    return _against_length(grid, cells, "one request in flight", 10, folder / LATENCY)


def _against_length(index: Index, cells: list[Cell], load: str, base: int, file: Path) -> str:
    """Plots the p50 of every system, one panel for each width; `base` is the base of the length axis."""
    widths = _widths(cells)
    figure, axes = _panels(len(widths))
    for ax, width in zip(axes, widths, strict=True):
        own = [cell for cell in cells if cell.model.width == width]
        for system in index.systems():
            _line(ax, system, ((cell.lengths.longest, _median(index, cell, system, p50)) for cell in own))
        _label(ax, f"d {width}, {load}", "length", "p50, µs")
        ax.set_xscale("log", base=base)
        ax.set_yscale("log")
    return _save(figure, file.parent, file.name)


def _throughput(grid: Index, folder: Path) -> str:
    cells = _self_attention(grid)
    panels = list(dict.fromkeys((cell.model.width, cell.lengths.name) for cell in cells))
    figure, axes = _panels(len(panels))
    for ax, (width, lengths) in zip(axes, panels, strict=True):
        own = [cell for cell in cells if (cell.model.width, cell.lengths.name) == (width, lengths)]
        for system in grid.systems():
            if system != BATCH:
                points = ((cell.in_flight, _median(grid, cell, system, token_rate)) for cell in own)
                _line(ax, system, points)
        _label(ax, f"d {width}, length {lengths}", "in flight", "tokens/s")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
    return _save(figure, folder, THROUGHPUT)


def _open_loop(results: Results, folder: Path) -> str:
    cells = list(dict.fromkeys(one.cell for one in results.open_loop))
    figure, axes = _panels(len(cells))
    for ax, cell in zip(axes, cells, strict=True):
        own = [one for one in results.open_loop if one.cell == cell]
        for at, system in enumerate(dict.fromkeys(one.system for one in own)):
            chosen = [one for one in own if one.system == system]
            for style, name in (("-", "p50"), (":", "p99")):
                points = [(one.rate, getattr(one.latency, name)) for one in chosen]
                _line(ax, f"{system}, {name}", points, style=style, colour=f"C{at}")
        _label(ax, f"d {cell.model.width}, length {cell.lengths.name}", "requests/s due", "latency, µs")
        ax.set(xscale="log", yscale="log")
    return _save(figure, folder, OPEN)


def _growth(growth: Index, folder: Path) -> str:
    return _against_length(growth, list(growth.cells()), "one sequence at a time", 2, folder / GROWTH)


def _memory(memory: MemoryCurve, folder: Path) -> str:
    figure, (ax,) = _panels(1)
    points = [(one.seconds / MINUTE, one.resident_bytes / MIB) for one in memory.samples]
    _line(ax, "service", points, marker="")
    ax.set_ylim(bottom=0)
    _label(ax, memory.load, "minutes", "resident, MiB")
    return _save(figure, folder, MEMORY)


def _self_attention(grid: Index) -> list[Cell]:
    return [cell for cell in grid.cells() if cell.model.kind is AttentionKind.SELF and cell.per_request == 1]


def _widths(cells: Iterable[Cell]) -> list[int]:
    return list(dict.fromkeys(cell.model.width for cell in cells))


def _median(index: Index, cell: Cell, system: str, metric: Metric) -> float | None:
    found = of(index, cell, system, metric)
    return found.median if found else None


def _line(
    ax: Axes,
    label: str,
    points: Iterable[tuple[float, float | None]],
    *,
    style: str = "-",
    marker: str = "o",
    colour: str | None = None,
) -> None:
    known = [(x, y) for x, y in points if y is not None]
    if known:
        x, y = zip(*known, strict=True)
        ax.plot(x, y, style, marker=marker, markersize=4, color=colour, label=label)


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 4)
    rows = -(-count // max(1, columns))
    figure, grid = plt.subplots(rows, columns, figsize=(5 * columns, 3.8 * rows), squeeze=False)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def _label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set(title=title, xlabel=x, ylabel=y)
    ax.tick_params(axis="x", which="minor", labelbottom=False)
    ax.title.set_fontsize(9)
    ax.grid(visible=True, alpha=0.3)
    ax.legend(fontsize=6)


def _save(figure: Figure, folder: Path, name: str) -> str:
    figure.tight_layout()
    figure.savefig(folder / name, dpi=110)
    plt.close(figure)
    return name
