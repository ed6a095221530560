"""The functions between linear layers, by the names of `ACTIVATIONS`."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(values: Tensor) -> Tensor:
    return F.gelu(values, approximate="tanh")


def _quick_gelu(values: Tensor) -> Tensor:
    """Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the approximation by a sigmoid."""
    return values * torch.sigmoid(1.702 * values)


def _identity(values: Tensor) -> Tensor:
    return values


FUNCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": _identity,
}
