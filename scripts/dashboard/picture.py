"""Draws the dashboard from what Prometheus has stored: its own panels, queries and layout."""

from io import BytesIO
from math import isfinite
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, Formatter, MaxNLocator, PercentFormatter
from PIL import Image

from scripts.dashboard.panels import Panel, Query, Row, rows
from scripts.dashboard.prometheus import Points, Prometheus, Series

# Size of the picture in inches: of its width, of one unit of Grafana's grid, and of the title of a row.
WIDTH, UNIT, TITLE = 16.0, 0.36, 0.42
GRID_COLUMNS = 24
DPI = 100
# What is left free around the axes of a panel, in inches.
LEFT, RIGHT, TOP, BOTTOM = 0.62, 0.14, 0.32, 0.68
ROW_SIZE, TITLE_SIZE, TEXT_SIZE, STAT_SIZE, NAME_SIZE = 13, 10, 8, 24, 11
MOST_SERIES, LEGEND_COLUMNS, LEGEND_LENGTH = 4, 2, 26
POINTS, MOST_TICKS = 200, 6
COLOURS = 64
FORMATS: dict[str, Formatter] = {
    "percentunit": PercentFormatter(1.0, decimals=1),
    "s": EngFormatter("s", places=0, sep=" "),
    "bytes": EngFormatter("B", sep=" "),
}
Found = list[tuple[Query, Series]]


def draw(prometheus: Prometheus, start: float, end: float, rate_interval: str, file: Path) -> None:
    """Writes a PNG of the dashboard.

    Args:
        prometheus: Where the data is.
        start: Begin of the time shown, in seconds since 1970.
        end: Its end.
        rate_interval: The window of rates, such as `15s`.
        file: The picture.
    """
    step = max(1.0, (end - start) / POINTS)

    def data(panel: Panel) -> Found:
        return [
            (query, series)
            for query in panel.queries
            for series in prometheus.query_range(query.expanded(rate_interval), start, end, step)
            if any(isfinite(value) for _, value in series.points)
        ]

    drawn = rows()
    height = sum(_height(row) for row in drawn)
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    top = height
    for row in drawn:
        figure.text(
            0.01, (top - TITLE / 2) / height, row.title, fontsize=ROW_SIZE, weight="bold", va="center"
        )
        top -= TITLE
        for line in row.lines:
            for panel in line:
                _draw_panel(_axes(figure, panel, top, height), panel, data(panel), start)
            top -= _line_height(line)
    _save(figure, file)


def _height(row: Row) -> float:
    """Height of a row in inches."""
    return TITLE + sum(_line_height(line) for line in row.lines)


def _line_height(line: tuple[Panel, ...]) -> float:
    return max(panel.place[2] for panel in line) * UNIT


def _axes(figure: Figure, panel: Panel, top: float, height: float) -> Axes:
    """The axes of a panel whose upper edge is so many inches above the lower edge of the picture."""
    x, w, h = panel.place
    left, width = x * WIDTH / GRID_COLUMNS, w * WIDTH / GRID_COLUMNS
    inner = (width - LEFT - RIGHT) / WIDTH, (h * UNIT - TOP - BOTTOM) / height
    return figure.add_axes(((left + LEFT) / WIDTH, (top - h * UNIT + BOTTOM) / height, *inner))


def _draw_panel(axes: Axes, panel: Panel, found: Found, start: float) -> None:
    axes.set_title(panel.title, fontsize=TITLE_SIZE, loc="left")
    axes.tick_params(labelsize=TEXT_SIZE)
    if not found:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no data", ha="center", va="center", fontsize=TITLE_SIZE, color="gray")
    elif panel.kind == "stat":
        _draw_stat(axes, panel, found)
    elif panel.kind == "heatmap":
        _draw_heatmap(axes, [series for _, series in found], start)
    else:
        _draw_lines(axes, panel, found, start)


def _draw_lines(axes: Axes, panel: Panel, found: Found, start: float) -> None:
    """The series with the highest values."""
    for query, series in sorted(found, key=lambda each: -_peak(each[1].points))[:MOST_SERIES]:
        name = query.name(series.labels)
        label = name if len(name) <= LEGEND_LENGTH else f"{name[: LEGEND_LENGTH - 1]}…"
        minutes = [(at - start) / 60 for at, _ in series.points]
        axes.plot(minutes, [value for _, value in series.points], linewidth=1.2, label=label)
    if panel.unit in FORMATS:
        axes.yaxis.set_major_formatter(FORMATS[panel.unit])
    _show_minutes(axes)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, linewidth=0.3)
    axes.legend(
        fontsize=TEXT_SIZE - 0.5,
        loc="upper left",
        bbox_to_anchor=(-0.12, -0.14),
        ncols=LEGEND_COLUMNS,
        frameon=False,
        handlelength=1,
        columnspacing=1,
        labelspacing=0.2,
    )


def _draw_stat(axes: Axes, panel: Panel, found: Found) -> None:
    axes.set_axis_off()
    (query, series), *_ = found
    named = "{{" in query.legend
    text = query.name(series.labels) if named else _value(series.points[-1][1], panel.unit)
    size = NAME_SIZE if named else STAT_SIZE
    axes.text(0.5, 0.5, text.replace(", ", "\n"), ha="center", va="center", fontsize=size)


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
    minutes = [(at - start) / 60 for at in times]
    axes.pcolormesh(minutes, np.arange(len(ordered)), shown, cmap="Blues", norm=LogNorm(), shading="nearest")
    labels = [f"{series.labels['le']} s" for series in ordered]
    axes.set_yticks(range(0, len(ordered), 2), labels[::2])
    _show_minutes(axes)


def _show_minutes(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(MOST_TICKS))
    axes.xaxis.set_major_formatter("{x:g} min")


def _peak(points: Points) -> float:
    return max((value for _, value in points if isfinite(value)), default=0.0)


def _save(figure: Figure, file: Path) -> None:
    """Writes the figure with few colours, which makes the file small."""
    FigureCanvasAgg(figure)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)
