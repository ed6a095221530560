"""Multi-head attention: one module for every variant.

Shapes: B batch, Tq query rows, Tk key rows, H query heads, Hkv key and value heads, d_k and d_v widths
of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.model.config import AttentionConfig
from attention_serving.model.positions import RotaryEmbedding, ScoreRules
from attention_serving.model.projections import make_projections


class MultiHeadAttention(nn.Module):
    """softmax(q k^T * scale) v for each of H heads, between linear projections.

    The formula is that of Vaswani et al., "Attention Is All You Need" (2017), section 3.2. A query
    row that may attend to no key gets zero weights and a zero context before the output projection.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        self.projections = make_projections(config)
        self.query_norm = nn.RMSNorm(config.d_k, eps=config.qk_norm) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(config.d_k, eps=config.qk_norm) if config.qk_norm else None
        self.rotary = (
            RotaryEmbedding(config.d_k, theta=config.rotary_theta, interleaved=config.rotary_interleaved)
            if config.rotary_theta
            else None
        )
        self.score_rules = ScoreRules(config)
        concatenated = config.num_heads * config.d_v
        self.output = nn.Linear(concatenated, config.d_out, bias=config.out_bias) if config.out_proj else None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_lengths: Tensor | None = None,
        attention_mask: Tensor | None = None,
        score_bias: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the context vectors and, if requested, the attention weights.

        Args:
            query: (B, Tq, d_query).
            key: (B, Tk, d_key). Default: the query.
            value: (B, Tk, d_value). Default: the key.
            positions: (B, Tq) integers, for rotary configurations. Default: 0 to Tq - 1.
            key_lengths: (B,) integers; keys at and after the length of a sequence are not attended to.
            attention_mask: (B, 1 or H, Tq, Tk) booleans, True = may attend.
            score_bias: (1 or B, 1 or H, Tq, Tk), added to the scaled scores.
            return_weights: Whether to return the attention weights.

        Returns:
            Context vectors (B, Tq, d_out), and attention weights (B, H, Tq, Tk) or None.
        """
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self.projections(query, key, value)  # (B, H, Tq, d_k), (B, Hkv, Tk, d_k), (B, Hkv, Tk, d_v)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary is not None:
            if positions is None:
                positions = torch.arange(q.shape[2], device=q.device)[None]  # (1, Tq)
            q, k = self.rotary(q, positions), self.rotary(k, positions)
        may_attend = attention_mask  # (B, 1 or H, Tq, Tk)
        if key_lengths is not None:
            within = mask_of_lengths(key_lengths, q.shape[2], k.shape[2])  # (B, 1, Tq, Tk)
            may_attend = within if attention_mask is None else attention_mask & within
        if return_weights:
            weights = self._weights(q, k, may_attend, score_bias)  # (B, H, Tq, Tk)
            heads = weights @ self._for_each_query_head(v)  # (B, H, Tq, d_v)
        else:
            weights = None
            heads = self._attend(q, k, v, may_attend, score_bias)  # (B, H, Tq, d_v)
        context = heads.transpose(1, 2).flatten(2)  # (B, Tq, H * d_v)
        if self.output is not None:
            context = self.output(context)  # (B, Tq, d_out)
        return context, weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, may_attend: Tensor | None, score_bias: Tensor | None
    ) -> Tensor:
        config = self.config
        # Kernels refuse their causal flag together with a mask.
        is_causal = may_attend is None and score_bias is None and self.score_rules.only_causal
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if is_causal else self.score_rules.fused_mask(may_attend, q, k, score_bias),
            dropout_p=config.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=config.scale,
            enable_gqa=config.num_kv_heads != config.num_heads,
        )

    def _weights(self, q: Tensor, k: Tensor, may_attend: Tensor | None, score_bias: Tensor | None) -> Tensor:
        may_attend = self.score_rules.mask(may_attend, q, k)
        bias = self.score_rules.bias(q, k, score_bias)  # (1 or B, 1 or H, Tq, Tk)
        k = self._for_each_query_head(k)  # (B, H, Tk, d_k)
        scores = q @ k.transpose(2, 3) * self.config.scale  # (B, H, Tq, Tk)
        if bias is not None:
            scores = scores + bias
        if may_attend is None:
            weights = scores.softmax(dim=-1)
        else:
            weights = scores.masked_fill(~may_attend, float("-inf")).softmax(dim=-1)
            # The softmax of a row of -inf is NaN; the weights of such a row are 0.
            weights = weights.masked_fill(~may_attend.any(dim=-1, keepdim=True), 0.0)
        return F.dropout(weights, self.config.dropout, self.training)

    def _for_each_query_head(self, heads: Tensor) -> Tensor:
        """(B, Hkv, Tk, d) to (B, H, Tk, d): each key and value head serves a group of query heads."""
        group = self.config.num_heads // self.config.num_kv_heads
        return heads if group == 1 else heads.repeat_interleave(group, dim=1)


def mask_of_lengths(key_lengths: Tensor, query_length: int, key_length: int) -> Tensor:
    """Which keys lie within the (B,) lengths: (B, 1, Tq, Tk), True = may attend."""
    within = torch.arange(key_length, device=key_lengths.device) < key_lengths[:, None]  # (B, Tk)
    return within[:, None, None, :].expand(len(key_lengths), 1, query_length, key_length)
