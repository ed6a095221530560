"""Functions of rows that are not attention: normalisation, and what stands between linear layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
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


def _quick_gelu(values: Tensor) -> Tensor:
    """Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the approximation by a sigmoid."""
    return values * torch.sigmoid(1.702 * values)


def _identity(values: Tensor) -> Tensor:
    return values


# The keys are `ACTIVATIONS` of the encoder's configuration.
ACTIVATION_FUNCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": _identity,
}
