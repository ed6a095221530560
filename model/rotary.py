"""Rotary position embedding (Su et al., "RoFormer", 2021, section 3.2.2)."""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Turns pairs of elements of a query or key by angles that grow with the row's position.

    The product of a turned query and a turned key then depends on the distance between their rows.
    Pair i of a row at position p is turned by p * theta ** (-2 i / width).
    """

    def __init__(self, width: int, *, theta: float, interleaved: bool) -> None:
        """Computes the frequencies.

        Args:
            width: Elements of one head, even.
            theta: Base frequency.
            interleaved: Whether a pair is (2 i, 2 i + 1), rather than (i, i + width / 2).
        """
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        # Numbers rather than a buffer: they stay float32 in a module that computes in half precision, and the
        # exported graph holds these very values, for an error in their last place grows with the position.
        self.frequencies: list[float] = (1.0 / theta**exponents).tolist()
        self.interleaved = interleaved

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """(B, H, T, width) heads at (B, T) integer positions to turned (B, H, T, width)."""
        frequencies = torch.tensor(self.frequencies, device=heads.device)  # (width / 2,)
        angles = positions[:, None, :, None] * frequencies  # (B, 1, T, width / 2)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        if self.interleaved:
            pairs = heads.reshape(*heads.shape[:-1], len(self.frequencies), 2)
            first, second = pairs.unbind(dim=-1)  # (B, H, T, width / 2) each
        else:
            first, second = heads.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(turned, dim=-1).flatten(-2) if self.interleaved else torch.cat(turned, dim=-1)
