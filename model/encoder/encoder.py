"""A text encoder: from token ids to token vectors and to one embedding for each sequence.

Shapes: B batch, T tokens, L layers, H heads, d width.
"""

import torch
from torch import Tensor, nn

from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.encoder.embeddings import TokenEmbeddings
from attention_serving.model.encoder.layer import EncoderLayer
from attention_serving.model.encoder.pooling import Pooling
from attention_serving.model.encoder.relative_bias import RelativeBias
from attention_serving.model.norm import make_norm


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
        self.layers = nn.ModuleList(
            [
                EncoderLayer(config, attention, is_first=index == 0)
                for index, attention in enumerate(config.layers)
            ]
        )
        self.final_norm = None
        if config.final_norm:
            self.final_norm = make_norm(
                config.norm, config.width, epsilon=config.norm_epsilon, bias=config.norm_bias
            )
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
        may_attend = self._may_attend(token_ids, key_lengths)  # (B, 1, T, T)
        bias = None
        if self.relative_bias is not None:
            bias = self.relative_bias(token_ids.shape[1])  # (1, H, T, T)
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

    def _may_attend(self, token_ids: Tensor, key_lengths: Tensor | None) -> Tensor | None:
        """The mask that hides padding; None if there is none, or if causality hides it."""
        if key_lengths is None or self.config.causal:
            return None
        batch, length = token_ids.shape
        within = torch.arange(length, device=token_ids.device) < key_lengths[:, None]  # (B, T)
        return within[:, None, None, :].expand(batch, 1, length, length)
