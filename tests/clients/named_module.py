"""A module with inputs and outputs of every type and number of axes that models have."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attention_serving.export import export_module
from tests.support.artifacts import ModelSet
from tests.support.eager import Array

CAPTION = "caption"
WIDTH, IDS = 4, 11
LARGE = 1e9


class Caption(nn.Module):
    """Rows of an image attend to the words of its caption that a mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, WIDTH)

    def forward(self, x: Tensor, ids: Tensor, caption_mask: Tensor) -> tuple[Tensor, ...]:
        """(B, Tx, d), (B, Tk) and (B, Tk) to (B, Tx, d), (B, Tx, Tk), (B, d), (B,) and (B, Tk)."""
        words = self.embedding(ids)
        scores = x @ words.transpose(1, 2) - LARGE * (~caption_mask).float()[:, None]
        weights = scores.softmax(dim=-1)
        context = weights @ words
        return context, weights, context.mean(dim=1), caption_mask.sum(dim=1), caption_mask & (ids > 0)


OUTPUTS = ("context", "attention_weights", "pooled", "count", "kept")
EXAMPLES = {
    "x": torch.zeros(2, 3, WIDTH),
    "ids": torch.full((2, 5), IDS - 1),
    "caption_mask": torch.ones(2, 5, dtype=torch.bool),
}
AXES = {name: {0: "batch", 1: axis} for name, axis in zip(EXAMPLES, ("rows", "words", "words"), strict=True)}


def caption() -> Caption:
    """The module, with weights that never change."""
    torch.manual_seed(6)
    return Caption().eval()


def export_caption(folder: Path) -> None:
    """Writes the module's artifact."""
    export_module(caption(), EXAMPLES, AXES, out=folder, name=CAPTION, output_names=OUTPUTS)


NAMED = ModelSet("named", [export_caption], [Path(__file__)], ["named"])


def inputs(rows: int, words: int, *leading: int, seed: int = 0) -> dict[str, Array]:
    """Random inputs of one sequence, or of a batch."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((*leading, rows, WIDTH), np.float32),
        "ids": rng.integers(0, IDS, (*leading, words)),
        "caption_mask": rng.random((*leading, words)) < 0.7,
    }


def expected(given: dict[str, Array]) -> dict[str, Array]:
    """The outputs of eager PyTorch for a batch."""
    with torch.inference_mode():
        found = caption()(**{name: torch.from_numpy(array) for name, array in given.items()})
    return {name: output.numpy() for name, output in zip(OUTPUTS, found, strict=True)}
