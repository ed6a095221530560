"""Normalisation of the rows of a tensor by their root mean square."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divides each row by its root mean square, and multiplies it by a weight for each element.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), section 3. The mean is computed
    in float32, because squares exceed the range of float16.
    """

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        numbers = rows.float()
        mean_square = numbers.pow(2).mean(dim=-1, keepdim=True)  # (..., 1)
        normalised: Tensor = self.weight * (numbers * torch.rsqrt(mean_square + self.epsilon)).to(rows.dtype)
        return normalised


def make_norm(kind: str, width: int, *, epsilon: float, bias: bool = True) -> nn.Module:
    """A normalisation of rows: "layer" for `nn.LayerNorm`, "rms" for `RMSNorm`, which never adds a bias."""
    if kind == "rms":
        return RMSNorm(width, epsilon=epsilon)
    return nn.LayerNorm(width, eps=epsilon, bias=bias)
