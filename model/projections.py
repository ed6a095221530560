"""Projections from input rows to the queries, keys and values of each head.

Shapes: B batch, Tq query rows, Tk key rows, H query heads, Hkv key and value heads, d_k and d_v widths
of one head. Each class returns q (B, H, Tq, d_k), k (B, Hkv, Tk, d_k) and v (B, Hkv, Tk, d_v); `queries` and
`keys_and_values` return parts of them.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.model.config import AttentionConfig

Heads = tuple[Tensor, Tensor, Tensor]
KeysAndValues = tuple[Tensor, Tensor]


def make_projections(config: AttentionConfig) -> "Projections":
    """The projections of a configuration."""
    if config.projections == "fused":
        return FusedProjection(config)
    return StackedProjections(config) if config.projections == "stacked" else SeparateProjections(config)


class SeparateProjections(nn.Module):
    """One linear layer each for query, key and value; without projections, the inputs themselves."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.query: nn.Module
        self.key: nn.Module
        self.value: nn.Module
        if config.projections == "none":
            self.query, self.key, self.value = nn.Identity(), nn.Identity(), nn.Identity()
            return
        keys, values = config.num_kv_heads * config.d_k, config.num_kv_heads * config.d_v
        self.query = nn.Linear(config.d_query, config.num_heads * config.d_k, bias=config.qkv_bias)
        self.key = nn.Linear(config.d_key, keys, bias=config.qkv_bias)
        self.value = nn.Linear(config.d_value, values, bias=config.qkv_bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        """Projects (B, T, d) inputs."""
        return split_heads(self.config, self.query(query), self.key(key), self.value(value))

    def queries(self, query: Tensor) -> Tensor:
        """Projects the (B, Tq, d) query."""
        return _split(self.query(query), self.config.num_heads, self.config.d_k)

    def keys_and_values(self, key: Tensor, value: Tensor) -> KeysAndValues:
        """Projects (B, Tk, d) inputs."""
        keys, values = self.key(key), self.value(value)
        heads = self.config.num_kv_heads
        return _split(keys, heads, self.config.d_k), _split(values, heads, self.config.d_v)


class FusedProjection(nn.Module):
    """One linear layer whose output is split into query, key and value, in this order."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        keys, values = config.num_kv_heads * config.d_k, config.num_kv_heads * config.d_v
        self.widths = [config.num_heads * config.d_k, keys, values]
        self.fused = nn.Linear(config.d_query, sum(self.widths), bias=config.qkv_bias)

    def forward(self, query: Tensor, _key: Tensor, _value: Tensor) -> Heads:
        """Projects the (B, T, d) query, which is also the key and the value."""
        return split_heads(self.config, *self.fused(query).split(self.widths, dim=-1))

    def queries(self, query: Tensor) -> Tensor:
        """Projects the (B, Tq, d) query."""
        return _split(self._part(query, slice(self.widths[0])), self.config.num_heads, self.config.d_k)

    def keys_and_values(self, key: Tensor, _value: Tensor) -> KeysAndValues:
        """Projects the (B, Tk, d) key, which is also the value."""
        joined, heads = self._part(key, slice(self.widths[0], None)), self.config.num_kv_heads
        keys, values = joined[..., : self.widths[1]], joined[..., self.widths[1] :]
        return _split(keys, heads, self.config.d_k), _split(values, heads, self.config.d_v)

    def _part(self, rows: Tensor, columns: slice) -> Tensor:
        bias = None if self.fused.bias is None else self.fused.bias[columns]
        return F.linear(rows, self.fused.weight[columns], bias)


class StackedProjections(nn.Module):
    """One (H, d_head, d) stack with the weights of all heads each for query, key and value."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.query = _Stack(heads, config.d_k, config.d_query, bias=config.qkv_bias)
        self.key = _Stack(kv_heads, config.d_k, config.d_key, bias=config.qkv_bias)
        self.value = _Stack(kv_heads, config.d_v, config.d_value, bias=config.qkv_bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        """Projects (B, T, d) inputs, each with one batched product."""
        return self.query(query), self.key(key), self.value(value)

    def queries(self, query: Tensor) -> Tensor:
        """Projects the (B, Tq, d) query."""
        projected: Tensor = self.query(query)
        return projected

    def keys_and_values(self, key: Tensor, value: Tensor) -> KeysAndValues:
        """Projects (B, Tk, d) inputs."""
        return self.key(key), self.value(value)


class _Stack(nn.Module):
    """Multiplies rows with the weights of all heads in one batched product."""

    def __init__(self, heads: int, d_head: int, d_input: int, *, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(d_input)  # as in nn.Linear
        self.weight = nn.Parameter(torch.empty(heads, d_head, d_input).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, 1, d_head).uniform_(-bound, bound)) if bias else None

    def forward(self, rows: Tensor) -> Tensor:
        """(B, T, d) to (B, H, T, d_head)."""
        projected = rows[:, None] @ self.weight.transpose(1, 2)  # (B, 1, T, d) @ (H, d, d_head)
        return projected if self.bias is None else projected + self.bias


Projections = SeparateProjections | FusedProjection | StackedProjections


def split_heads(config: AttentionConfig, query: Tensor, key: Tensor, value: Tensor) -> Heads:
    """(B, T, heads * d_head) each to (B, heads, T, d_head)."""
    return (
        _split(query, config.num_heads, config.d_k),
        _split(key, config.num_kv_heads, config.d_k),
        _split(value, config.num_kv_heads, config.d_v),
    )


def _split(rows: Tensor, heads: int, width: int) -> Tensor:
    batch, length, _ = rows.shape
    return rows.view(batch, length, heads, width).transpose(1, 2)
