"""A text encoder: from token ids to token vectors and to one embedding for each sequence.

Shapes: B batch, T tokens, L layers, H heads, d width.
"""

import math
from typing import Final

import torch
from torch import Tensor, nn

from attention_serving.model.attention import MultiHeadAttention, mask_of_lengths
from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.encoder.pooling import ACTIVATION_FUNCTIONS, Pooling

# Distances from here on share one bias.
FARTHEST: Final = 128


def _norm(config: EncoderConfig) -> nn.Module:
    """A normalisation of rows; that by the root mean square never adds a bias."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_epsilon)
    return nn.LayerNorm(config.width, eps=config.norm_epsilon, bias=config.norm_bias)


class TokenEmbeddings(nn.Module):
    """The sum of an embedding for each token, its position and its type, normalised if configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width) if config.positions else None
        self.token_types = nn.Embedding(config.token_types, config.width) if config.token_types else None
        self.padding_id = config.padding_id
        self.norm = _norm(config) if config.embedding_norm else None

    def forward(self, token_ids: Tensor) -> Tensor:
        """(B, T) ids to (B, T, d) rows."""
        rows: Tensor = self.tokens(token_ids)  # (B, T, d)
        if self.token_types is not None:
            rows = rows + self.token_types.weight[0]  # a single text has the first type only
        if self.positions is not None:
            rows = rows + self._positions(self.positions, token_ids)
        return rows if self.norm is None else self.norm(rows)

    def _positions(self, table: nn.Embedding, token_ids: Tensor) -> Tensor:
        """(T, d) if positions count from 0, otherwise (B, T, d)."""
        if self.padding_id is None:
            return table.weight[: token_ids.shape[1]]
        counted = (token_ids != self.padding_id).long()  # (B, T)
        positions: Tensor = table(counted.cumsum(dim=1) * counted + self.padding_id)
        return positions


class RelativeBias(nn.Module):
    """A learned bias of the scores for the distance of two rows: one table for all layers.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
    (2020), section 2.1. Small distances have a bias each, larger ones share a bias with others of about the
    same logarithm.
    """

    def __init__(self, buckets: int, heads: int, *, max_tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.max_tokens = max_tokens
        rows = [_bucket(distance, buckets) for distance in range(1 - max_tokens, max_tokens)]
        self.register_buffer("rows", torch.tensor(rows), persistent=False)  # (2 * max_tokens - 1,)
        self.rows: Tensor

    def forward(self, length: int) -> Tensor:
        """The bias of every pair of `length` rows: (1, H, T, T)."""
        at = torch.arange(length, device=self.rows.device)
        distances = at[None, :] - at[:, None]  # (T, T): key minus query
        biases: Tensor = self.table(self.rows[distances + (self.max_tokens - 1)])  # (T, T, H)
        return biases.permute(2, 0, 1)[None]


def _bucket(distance: int, buckets: int) -> int:
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


class FeedForward(nn.Module):
    """Two linear layers with a function between them, for each row by itself.

    With a gate, the function's result is multiplied by a third linear layer (Shazeer, "GLU Variants Improve
    Transformer", 2020).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, inner, bias = config.width, config.feed_forward, config.feed_forward_bias
        self.inner = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if config.gated else None
        self.outer = nn.Linear(inner, width, bias=bias)
        self.function = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, rows: Tensor) -> Tensor:
        """(B, T, d) to (B, T, d)."""
        inner = self.function(self.inner(rows))  # (B, T, feed_forward)
        if self.gate is not None:
            inner = inner * self.gate(rows)
        outer: Tensor = self.outer(inner)
        return outer


class EncoderLayer(nn.Module):
    """Attention and a feed-forward part, each added to its input and normalised before or after."""

    def __init__(self, config: EncoderConfig, attention: AttentionConfig, *, is_first: bool) -> None:
        super().__init__()
        has_attention_norm = not (config.norm_first and is_first) or config.first_attention_norm
        self.attention = MultiHeadAttention(attention)
        self.attention_norm = _norm(config) if has_attention_norm else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)
        self.norm_first = config.norm_first

    def forward(
        self, rows: Tensor, may_attend: Tensor | None, bias: Tensor | None, *, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the rows of the next layer.

        Args:
            rows: (B, T, d).
            may_attend: (B, 1, T, T) booleans; None if every row may attend to every other.
            bias: (1, H, T, T), added to the scores; None for none.
            return_weights: Whether to return the attention weights.

        Returns:
            (B, T, d), and attention weights (B, H, T, T) or None.
        """
        given = self.attention_norm(rows) if self.norm_first else rows
        context, weights = self.attention(
            given, attention_mask=may_attend, score_bias=bias, return_weights=return_weights
        )
        rows = rows + context
        if self.norm_first:
            return rows + self.feed_forward(self.feed_forward_norm(rows)), weights
        rows = self.attention_norm(rows)
        return self.feed_forward_norm(rows + self.feed_forward(rows)), weights


class TextEncoder(nn.Module):
    """Embeds tokens, applies layers of attention, and pools.

    The families differ in their configuration: where rows are normalised, how positions are known, what the
    feed-forward part computes, and what a row may attend to.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = TokenEmbeddings(config)
        self.relative_bias = None
        if config.relative_buckets:
            self.relative_bias = RelativeBias(
                config.relative_buckets, config.num_heads, max_tokens=config.max_tokens
            )
        layers = enumerate(config.layers)
        self.layers = nn.ModuleList([EncoderLayer(config, own, is_first=index == 0) for index, own in layers])
        self.final_norm = _norm(config) if config.final_norm else None
        self.pooling = Pooling(config)

    def forward(
        self,
        token_ids: Tensor,
        key_lengths: Tensor | None = None,
        *,
        return_tokens: bool = False,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Computes the embeddings, and on request what they are made of.

        Args:
            token_ids: (B, T) int64, from 0 to below the size of the vocabulary.
            key_lengths: (B,) integers; tokens at and after the length of a sequence are padding.
            return_tokens: Whether to return the token vectors.
            return_weights: Whether to return the attention weights of every layer.

        Returns:
            Embeddings (B, embedding_width); token vectors (B, T, d) or None; attention weights
            (B, L, H, T, T) or None. Vectors and weights of padding are finite and mean nothing.
        """
        rows = self.embeddings(token_ids)  # (B, T, d)
        length = token_ids.shape[1]
        may_attend = None  # as without padding, and where causality hides it
        if key_lengths is not None and not self.config.causal:
            may_attend = mask_of_lengths(key_lengths, length, length)  # (B, 1, T, T)
        bias = None
        if self.relative_bias is not None:
            bias = self.relative_bias(length)  # (1, H, T, T)
        weights: list[Tensor] = []
        for layer in self.layers:
            rows, own = layer(rows, may_attend, bias, return_weights=return_weights)
            if own is not None:
                weights.append(own)
        if self.final_norm is not None:
            rows = self.final_norm(rows)
        embeddings = self.pooling(rows, token_ids, key_lengths)
        stacked = torch.stack(weights, dim=1) if weights else None  # (B, L, H, T, T)
        return embeddings, rows if return_tokens else None, stacked
