"""Draws attention weights as heat maps. Needs matplotlib, the extra `plot`.

Notation: H heads, Tq query rows, Tk key rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from attention_client._values import FloatArray

_COLOURS = "Blues"  # one hue: darker means larger, also in print and for colour-blind readers
_DARK = 0.55  # above this weight the number is white
_DPI = 100
# Side of one heat map in inches, by the number of words.
_PER_WORD, _SMALLEST, _LARGEST = 0.42, 2.0, 5.0
_MOST_WORDS_WITH_NUMBERS = 11  # with more, the numbers do not fit into their cells


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMaps:
    """The contents of a figure.

    Attributes:
        weights: One heat map for each head: (H, Tq, Tk), from 0 to 1.
        heads: Number of each head.
        labels: One word for each row and for each column.
        title: Title of the figure.
    """

    weights: FloatArray
    heads: Sequence[int]
    labels: Sequence[str]
    title: str


def save(maps: HeatMaps, path: Path) -> None:
    """Draws one heat map for each head, with one colour bar, into a file of the type that its suffix names.

    Raises:
        OSError: The file cannot be written.
        ValueError: Matplotlib does not write files with this suffix.
    """
    draw(maps).savefig(path, dpi=_DPI, bbox_inches="tight")  # a long title widens the picture


def draw(maps: HeatMaps) -> Figure:
    """Draws the figure without writing it."""
    columns = math.ceil(math.sqrt(len(maps.weights)))
    rows = math.ceil(len(maps.weights) / columns)
    side = min(max(_PER_WORD * len(maps.labels), _SMALLEST), _LARGEST)
    figure = Figure(figsize=(columns * side + 1.9, rows * side + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    words = [label.replace("$", r"\$") for label in maps.labels]  # a word with dollar signs is not a formula
    for axes, head, weights in zip(panels, maps.heads, maps.weights, strict=False):
        image = axes.imshow(weights, cmap=_COLOURS, vmin=0.0, vmax=1.0)
        axes.set_title(f"head {head}", fontsize=10)
        axes.set_xticks(range(len(words)), words, fontsize=9, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(words)), words, fontsize=9)
        if len(words) <= _MOST_WORDS_WITH_NUMBERS:
            _write_numbers(axes, weights)
    for axes in panels[len(maps.weights) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=panels, shrink=0.7, aspect=25, label="attention weight")
    figure.suptitle(maps.title, fontsize=12, parse_math=False)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    return figure


def _write_numbers(axes: Axes, weights: FloatArray) -> None:
    for (row, column), weight in np.ndenumerate(weights):
        colour = "white" if weight > _DARK else "black"
        axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
