"""From the rows of each sequence to one vector, and the functions that stand between linear layers.

Shapes: B batch, T tokens, d width. Rows at and after the length of a sequence are padding.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.model.encoder.config import DenseConfig, EncoderConfig


class Sequences(NamedTuple):
    """What pooling reads.

    Attributes:
        rows: (B, T, d).
        token_ids: (B, T).
        lengths: (B,); None if no sequence has padding.
        end_id: The id of the end token.
    """

    rows: Tensor
    token_ids: Tensor
    lengths: Tensor | None
    end_id: int

    @property
    def within(self) -> Tensor | None:
        """(B, T) booleans: whether a row is not padding; None if no row is."""
        if self.lengths is None:
            return None
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.lengths[:, None]

    @property
    def counts(self) -> Tensor:
        """The number of rows of each sequence: (1 or B, 1)."""
        if self.lengths is None:
            return torch.ones_like(self.rows[:1, :, 0]).sum(dim=1, keepdim=True)
        return self.lengths[:, None].to(self.rows.dtype)

    @property
    def valid_rows(self) -> Tensor:
        """(B, T, d), with zeros for padding."""
        within = self.within
        return self.rows if within is None else self.rows * within[:, :, None].to(self.rows.dtype)

    def at(self, indices: Tensor) -> Tensor:
        """The row (B, d) at one index for each sequence, (B,)."""
        width = self.rows.shape[2]
        return self.rows.gather(1, indices[:, None, None].expand(-1, 1, width)).squeeze(1)


def _cls(given: Sequences) -> Tensor:
    return given.rows[:, 0]


def _mean(given: Sequences) -> Tensor:
    return given.valid_rows.sum(dim=1) / given.counts


def _mean_sqrt_length(given: Sequences) -> Tensor:
    return given.valid_rows.sum(dim=1) / given.counts**0.5


def _max(given: Sequences) -> Tensor:
    within = given.within
    rows = given.rows if within is None else given.rows.masked_fill(~within[:, :, None], float("-inf"))
    return rows.amax(dim=1)


def _weighted_mean(given: Sequences) -> Tensor:
    length = given.rows.shape[1]
    weights = torch.arange(1, length + 1, device=given.rows.device)[None]  # (1, T)
    if (within := given.within) is not None:
        weights = weights * within  # (B, T)
    weights = weights.to(given.rows.dtype)[:, :, None]  # (1 or B, T, 1)
    return (given.rows * weights).sum(dim=1) / weights.sum(dim=1)


def _last(given: Sequences) -> Tensor:
    return given.rows[:, -1] if given.lengths is None else given.at(given.lengths - 1)


def _end_token(given: Sequences) -> Tensor:
    return given.at((given.token_ids == given.end_id).int().argmax(dim=1))  # the first of several


def _highest_token(given: Sequences) -> Tensor:
    return given.at(given.token_ids.int().argmax(dim=1))


FUNCTIONS_BY_POOLING: Final[Mapping[str, Callable[[Sequences], Tensor]]] = {
    "cls": _cls,
    "mean": _mean,
    "mean_sqrt_length": _mean_sqrt_length,
    "max": _max,
    "weighted_mean": _weighted_mean,
    "last": _last,
    "end_token": _end_token,
    "highest_token": _highest_token,
}


def _quick_gelu(values: Tensor) -> Tensor:
    """Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), the approximation by a sigmoid."""
    return values * torch.sigmoid(1.702 * values)


# The keys are `ACTIVATIONS` of the configuration.
ACTIVATION_FUNCTIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": nn.Identity(),
}


class Dense(nn.Module):
    """A linear layer and a function."""

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.linear = nn.Linear(config.d_in, config.d_out, bias=config.bias)
        self.function = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, d_in) to (B, d_out)."""
        return self.function(self.linear(vectors))


class Pooling(nn.Module):
    """Pools, applies the linear layers that follow, and normalises if configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.functions = [FUNCTIONS_BY_POOLING[name] for name in config.pooling]
        self.end_id = config.end_id
        self.dense = nn.ModuleList([Dense(layer) for layer in config.dense])
        self.normalised = config.normalised

    def forward(self, rows: Tensor, token_ids: Tensor, lengths: Tensor | None) -> Tensor:
        """(B, T, d) rows of (B, T) ids and (B,) lengths to the embeddings (B, embedding_width)."""
        given = Sequences(rows, token_ids, lengths, self.end_id)
        parts = [pool(given) for pool in self.functions]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        for layer in self.dense:
            pooled = layer(pooled)
        return F.normalize(pooled, dim=1) if self.normalised else pooled
