"""Draws the dashboard's panels from what Prometheus has stored, with the dashboard's own queries."""

from io import BytesIO
from math import ceil, isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, PercentFormatter
from PIL import Image

from scripts.dashboard.panels import Panel, Query, panels
from scripts.dashboard.prometheus import Points, Prometheus, Series

COLUMNS = 5
WIDTH, HEIGHT, DPI = 3.6, 2.3, 100
MOST_SERIES = 8
COLOURS = 64
FORMATS: dict[str, Formatter] = {
    "percentunit": PercentFormatter(1.0, decimals=1),
    "s": EngFormatter("s", sep=" "),
    "bytes": EngFormatter("B", sep=" "),
}


def draw(prometheus: Prometheus, start: float, end: float, rate_interval: str, file: Path) -> None:
    """Writes a PNG of all panels that have data.

    Args:
        prometheus: Where the data is.
        start: Begin of the time shown, in seconds since 1970.
        end: Its end.
        rate_interval: The window of rates, such as `15s`.
        file: The picture.
    """
    step = max(1.0, (end - start) / 150)
    drawn = []
    for panel in panels():
        found = [
            (query, series)
            for query in panel.queries
            for series in prometheus.query_range(query.expanded(rate_interval), start, end, step)
        ]
        if any(isfinite(value) for _, series in found for _, value in series.points):
            drawn.append((panel, found))
    figure = Figure(figsize=(WIDTH * COLUMNS, HEIGHT * ceil(len(drawn) / COLUMNS)), dpi=DPI)
    for index, (panel, found) in enumerate(drawn):
        axes = figure.add_subplot(ceil(len(drawn) / COLUMNS), COLUMNS, index + 1)
        _draw_panel(axes, panel, found, start)
    figure.tight_layout(pad=0.6)
    _save(figure, file)


def _draw_panel(axes: Axes, panel: Panel, found: list[tuple[Query, Series]], start: float) -> None:
    axes.set_title(panel.title, fontsize=8, loc="left")
    axes.tick_params(labelsize=6)
    if panel.kind == "stat":
        _draw_stat(axes, panel, found)
        return
    if panel.kind == "heatmap":
        _draw_heatmap(axes, [series for _, series in found], start)
        return
    for query, series in sorted(found, key=lambda each: -_peak(each[1].points))[:MOST_SERIES]:
        times = [at - start for at, _ in series.points]
        axes.plot(times, [value for _, value in series.points], linewidth=1, label=query.name(series.labels))
    if panel.unit in FORMATS:
        axes.yaxis.set_major_formatter(FORMATS[panel.unit])
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(fontsize=5, loc="upper left", framealpha=0.6)


def _draw_stat(axes: Axes, panel: Panel, found: list[tuple[Query, Series]]) -> None:
    axes.set_axis_off()
    (query, series), *_ = found
    named = "{{" in query.legend
    text = query.name(series.labels) if named else _value(series.points[-1][1], panel.unit)
    axes.text(0.5, 0.5, text.replace(", ", "\n"), ha="center", va="center", fontsize=8 if named else 16)


def _value(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.1%}"
    return FORMATS[unit](value) if unit in FORMATS else f"{value:.4g}"


def _draw_heatmap(axes: Axes, found: list[Series], start: float) -> None:
    """Counts of each bucket by time: Prometheus' buckets contain the smaller ones."""
    ordered = sorted(found, key=lambda series: float(series.labels["le"]))
    times = sorted({at for series in ordered for at, _ in series.points})
    counts = np.zeros((len(ordered), len(times)))
    for row, series in enumerate(ordered):
        for at, value in series.points:
            counts[row, times.index(at)] = value
    counts = np.diff(counts, axis=0, prepend=0)
    shown = np.ma.masked_less_equal(counts, 0)
    image = axes.pcolormesh(
        [at - start for at in times],
        np.arange(len(ordered)),
        shown,
        cmap="Blues",
        norm=LogNorm(),
        shading="nearest",
    )
    axes.set_yticks(range(len(ordered)), [series.labels["le"] for series in ordered])
    axes.figure.colorbar(image, ax=axes).ax.tick_params(labelsize=6)


def _peak(points: Points) -> float:
    return max((value for _, value in points if isfinite(value)), default=0.0)


def _save(figure: Figure, file: Path) -> None:
    """Writes the figure with few colours, which makes the file small."""
    FigureCanvasAgg(figure)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)
