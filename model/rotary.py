"""Rotary position embedding (Su et al., "RoFormer", 2021, section 3.2.2)."""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Rotates pairs of elements of a query or key by angles proportional to the row's position.

    The product of a rotated query and a rotated key depends on the distance between their rows. Pair i of a
    row at position p is rotated by p * theta ** (-2 i / width).
    """

    def __init__(self, width: int, *, theta: float, interleaved: bool) -> None:
        """Computes the frequencies.

        Args:
            width: Number of elements of one head, even.
            theta: Base frequency.
            interleaved: Whether pair i is (2 i, 2 i + 1). Otherwise it is (i, i + width / 2).
        """
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        # Numbers instead of a buffer: a buffer would be cast in a module of half precision. The exported
        # graph holds the same values, because an error in the last place grows with the position.
        self.frequencies: list[float] = (1.0 / theta**exponents).tolist()
        self.interleaved = interleaved

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """(B, H, T, width) heads at (B, T) integer positions to rotated (B, H, T, width)."""
        frequencies = torch.tensor(self.frequencies, device=heads.device)  # (width / 2,)
        angles = positions[:, None, :, None] * frequencies  # (B, 1, T, width / 2)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        if self.interleaved:
            pairs = heads.reshape(*heads.shape[:-1], len(self.frequencies), 2)
            first, second = pairs.unbind(dim=-1)  # (B, H, T, width / 2) each
        else:
            first, second = heads.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(rotated, dim=-1).flatten(-2) if self.interleaved else torch.cat(rotated, dim=-1)
