"""The plots of a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cuda.records import Record

if TYPE_CHECKING:  # the machine may lack it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RATES, SERVICE = "rates-in-process.png", "rates-through-the-server.png"


def draw(found: Mapping[str, list[Record]], folder: Path) -> list[str]:
    """Writes each plot for which there are findings; returns the names of the files."""
    measured = [one for step in ("onnx", "torch") for one in found[step] if "median" in one]
    served = [one for one in found["service"] if "rate" in one]
    drawn = [_rates(measured, folder)] if measured else []
    return drawn + ([_service(served, folder)] if served else [])


def _rates(records: list[Record], folder: Path) -> str:
    """Rows per second against the length, a panel for each precision and batch."""
    panels = list(dict.fromkeys((one["precision"], one["batch"]) for one in records))
    columns = len({batch for _, batch in panels})
    figure, axes = _panels(len(panels), columns)
    for ax, (precision, batch) in zip(axes, panels, strict=False):
        own = [one for one in records if (one["precision"], one["batch"]) == (precision, batch)]
        for system in dict.fromkeys(one["system"] for one in own):
            points = sorted((one["length"], one["median"]) for one in own if one["system"] == system)
            lengths = [length for length, _ in points]
            ax.plot(lengths, [batch * length / seconds for length, seconds in points], "o-", label=system)
        ax.set(
            title=f"{precision}, batch {batch}", xlabel="length", ylabel="rows/s", xscale="log", yscale="log"
        )
    return _save(figure, axes, folder, RATES)


def _service(records: list[Record], folder: Path) -> str:
    """Sequences per second of each load, a bar for each precision."""
    loads = list(dict.fromkeys((one["in_flight"], one["per_request"], one["length"]) for one in records))
    precisions = list(dict.fromkeys(one["precision"] for one in records))
    figure, axes = _panels(1, 1)
    width = 0.8 / len(precisions)
    for at, precision in enumerate(precisions):
        rates = {
            (one["in_flight"], one["per_request"], one["length"]): one["rate"]
            for one in records
            if one["precision"] == precision
        }
        places = [index + at * width for index in range(len(loads))]
        axes[0].bar(places, [rates.get(load, 0.0) for load in loads], width, label=precision)
    axes[0].set(ylabel="sequences/s", yscale="log", title="requests in flight x sequences x length")
    axes[0].set_xticks(range(len(loads)), [" x ".join(map(str, load)) for load in loads], rotation=30)
    return _save(figure, axes, folder, SERVICE)


def _panels(count: int, columns: int) -> tuple["Figure", list["Axes"]]:
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = -(-count // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    return figure, list(grid.flat)


def _save(figure: "Figure", axes: list["Axes"], folder: Path, name: str) -> str:
    for ax in axes:
        ax.grid(visible=True, alpha=0.3)
        if ax.has_data():
            ax.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(folder / name, dpi=110)
    return name
