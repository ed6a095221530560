"""A learned bias of the scores for the distance of two rows.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
(2020), section 2.1. Small distances have a bias each, larger ones share a bias with others of about the same
logarithm.
"""

import math

import torch
from torch import Tensor, nn

# Distances from here on share one bias.
FARTHEST = 128


def bucket(distance: int, buckets: int) -> int:
    """The row of the table for a key that is `distance` rows after its query; before it if negative."""
    half = buckets // 2
    start, size = (half if distance > 0 else 0), abs(distance)
    exact = half // 2
    if size < exact:
        return start + size
    # In float32, as the models were trained: an exact logarithm puts some distances into the next bucket.
    logarithm = torch.log(torch.tensor(size, dtype=torch.float32, device="cpu") / exact)
    shared = int(logarithm / math.log(FARTHEST / exact) * (half - exact))
    return start + min(exact + shared, half - 1)


class RelativeBias(nn.Module):
    """One table of biases for all layers."""

    def __init__(self, buckets: int, heads: int, *, max_tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.max_tokens = max_tokens
        rows = [bucket(distance, buckets) for distance in range(1 - max_tokens, max_tokens)]
        self.register_buffer("rows", torch.tensor(rows), persistent=False)  # (2 * max_tokens - 1,)
        self.rows: Tensor

    def forward(self, length: int) -> Tensor:
        """The bias of every pair of `length` rows: (1, H, T, T)."""
        at = torch.arange(length, device=self.rows.device)
        distances = at[None, :] - at[:, None]  # (T, T): key minus query
        biases: Tensor = self.table(self.rows[distances + (self.max_tokens - 1)])  # (T, T, H)
        return biases.permute(2, 0, 1)[None]
