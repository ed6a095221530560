"""Multi-head attention: one module for self- and cross-attention.

Shapes: B batch, Tq query rows, Tk key rows, H heads, d_k and d_v widths of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import AttentionConfig


class MultiHeadAttention(nn.Module):
    """softmax(q k^T * scale) v for each of H heads, between linear projections.

    The formula is that of Vaswani et al., "Attention Is All You Need" (2017), section 3.2. A query
    row that may attend to no key gets zero weights and a zero context before the output projection.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_heads
        self.query_projection = nn.Linear(config.d_query, heads * config.d_k, bias=config.qkv_bias)
        self.key_projection = nn.Linear(config.d_key, heads * config.d_k, bias=config.qkv_bias)
        self.value_projection = nn.Linear(config.d_value, heads * config.d_v, bias=config.qkv_bias)
        self.output_projection = (
            nn.Linear(heads * config.d_v, config.d_out, bias=config.out_bias) if config.out_proj else None
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the context vectors, and the attention weights where asked for.

        Args:
            query: (B, Tq, d_query).
            key: (B, Tk, d_key); the query where left out.
            value: (B, Tk, d_value); the key where left out.
            key_lengths: (B,) integers; keys at and after a sequence's length are not attended to.
            attention_mask: (B, 1 or H, Tq, Tk) booleans, True = may attend.
            return_weights: whether to return the attention weights.

        Returns:
            Context vectors (B, Tq, d_out), and attention weights (B, H, Tq, Tk) or None.
        """
        key = query if key is None else key
        value = key if value is None else value
        d_k, d_v = self.config.d_k, self.config.d_v
        q = self._split_heads(self.query_projection(query), d_k)  # (B, H, Tq, d_k)
        k = self._split_heads(self.key_projection(key), d_k)  # (B, H, Tk, d_k)
        v = self._split_heads(self.value_projection(value), d_v)  # (B, H, Tk, d_v)
        may_attend = self._combine_masks(q, k, key_lengths, attention_mask)
        if return_weights:
            weights = self._weights(q, k, may_attend)  # (B, H, Tq, Tk)
            heads = weights @ v  # (B, H, Tq, d_v)
        else:
            weights = None
            heads = F.scaled_dot_product_attention(  # (B, H, Tq, d_v)
                q,
                k,
                v,
                attn_mask=may_attend,
                is_causal=self.config.causal and may_attend is None,
                scale=self.config.scale,
            )
        context = heads.transpose(1, 2).flatten(2)  # (B, Tq, H * d_v)
        if self.output_projection is not None:
            context = self.output_projection(context)  # (B, Tq, d_out)
        return context, weights

    def _split_heads(self, projected: Tensor, width: int) -> Tensor:
        """(B, T, H * width) to (B, H, T, width)."""
        batch, length, _ = projected.shape
        return projected.view(batch, length, self.config.num_heads, width).transpose(1, 2)

    def _combine_masks(
        self, q: Tensor, k: Tensor, key_lengths: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor | None:
        """All rules in one (B, 1 or H, Tq, Tk) mask; None where no more than causality is asked for."""
        may_attend = attention_mask
        batch, _, query_length, _ = q.shape
        key_length = k.shape[2]
        if key_lengths is not None:
            within = torch.arange(key_length, device=k.device) < key_lengths[:, None]  # (B, Tk)
            within = within[:, None, None, :].expand(batch, 1, query_length, key_length)
            may_attend = within if may_attend is None else may_attend & within
        if may_attend is not None and self.config.causal:
            may_attend = may_attend & _lower_triangle(query_length, key_length, q.device)
        return may_attend

    def _weights(self, q: Tensor, k: Tensor, may_attend: Tensor | None) -> Tensor:
        if may_attend is None and self.config.causal:
            may_attend = _lower_triangle(q.shape[2], k.shape[2], q.device)
        scores = q @ k.transpose(2, 3) * self.config.scale  # (B, H, Tq, Tk)
        if may_attend is None:
            return scores.softmax(dim=-1)
        weights = scores.masked_fill(~may_attend, float("-inf")).softmax(dim=-1)
        # The softmax of a row of -inf is NaN; such a row attends to nothing.
        return weights.masked_fill(~may_attend.any(dim=-1, keepdim=True), 0.0)


def _lower_triangle(query_length: int, key_length: int, device: torch.device) -> Tensor:
    """(Tq, Tk), True where the key's position is not after the query's."""
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()
