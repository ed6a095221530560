"""Draws attention weights as heat maps. Needs matplotlib, the extra `plot`.

Notation: H heads, Tq query rows, Tk key rows.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from attention_client._values import FloatArray

_COLOURS = "Blues"  # one hue: darker means larger, also in print and for colour-blind readers
_DARK = 0.55  # above this weight the number is white
DPI = 100
# Side of one heat map in inches, by the number of words.
_PER_WORD, _SMALLEST, _LARGEST = 0.42, 2.0, 5.0
_MOST_WORDS_WITH_NUMBERS = 11  # with more, the numbers do not fit into their cells


def draw(weights: FloatArray, heads: Sequence[int], labels: Sequence[str], title: str) -> Figure:
    """Draws one heat map for each head, with one colour bar.

    Args:
        weights: (H, Tq, Tk), from 0 to 1.
        heads: Number of each head.
        labels: One word for each row and for each column.
        title: Title of the figure.
    """
    columns = math.ceil(math.sqrt(len(weights)))
    rows = math.ceil(len(weights) / columns)
    side = min(max(_PER_WORD * len(labels), _SMALLEST), _LARGEST)
    figure = Figure(figsize=(columns * side + 1.9, rows * side + 1.5), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    words = [label.replace("$", r"\$") for label in labels]  # a word with dollar signs is not a formula
    for axes, head, head_weights in zip(panels, heads, weights, strict=False):
        image = axes.imshow(head_weights, cmap=_COLOURS, vmin=0.0, vmax=1.0)
        axes.set_title(f"head {head}", fontsize=10)
        axes.set_xticks(range(len(words)), words, fontsize=9, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(words)), words, fontsize=9)
        if len(words) <= _MOST_WORDS_WITH_NUMBERS:
            for (row, column), weight in np.ndenumerate(head_weights):
                colour = "white" if weight > _DARK else "black"
                axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
    for axes in panels[len(weights) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=panels, shrink=0.7, aspect=25, label="attention weight")
    figure.suptitle(title, fontsize=12, parse_math=False)
    figure.supxlabel("key", fontsize=10)
    figure.supylabel("query", fontsize=10)
    return figure
