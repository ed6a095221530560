"""Modules that take `attention_mask` (B, T), 1 = attend, as Hugging Face models do.

The exported graphs build the mask from key lengths instead: the graph PLAIN with ones, the graph LENGTHS from
`key_lengths` (B,). The server can then run sequences of different lengths together.
"""

import torch
from torch import Tensor, nn

MASK_DIMENSIONS = 2  # (B, T)


class KeyLengthsToMask(nn.Module):
    """Calls a module with an `attention_mask` made from key lengths."""

    def __init__(self, module: nn.Module, *, rows: str, dtype: torch.dtype) -> None:
        """Wraps a module.

        Args:
            module: Takes `attention_mask`.
            rows: An input (B, T, ...) that gives the mask its shape.
            dtype: Element type of the mask.
        """
        super().__init__()
        self.module = module
        self.rows = rows
        self.dtype = dtype

    def forward(self, *, key_lengths: Tensor | None = None, **inputs: Tensor) -> object:
        """Calls the module; without key lengths, every row may be attended to."""
        rows = inputs[self.rows]
        batch, length = rows.shape[:2]
        if key_lengths is None:
            mask = torch.ones(batch, length, dtype=self.dtype, device=rows.device)
        else:
            mask = (torch.arange(length, device=rows.device) < key_lengths[:, None]).to(self.dtype)
        return self.module(**inputs, attention_mask=mask)
