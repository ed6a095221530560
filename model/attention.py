"""Multi-head attention: one module for every variant.

Shapes: B batch, Tq query rows, Tk key rows, H query heads, Hkv key and value heads, d_k and d_v widths
of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_serving.model.config import AttentionConfig
from attention_serving.model.positions import RotaryEmbedding, ScoreRules, fuse
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
        # Kernels refuse their causal flag together with a mask.
        is_causal = may_attend is None and score_bias is None and self.score_rules.only_causal
        if is_causal and not return_weights:
            return self._context(q, k, v, None, None, return_weights=False, is_causal=True)
        mask, bias = self.score_rules.mask(may_attend, q, k), self.score_rules.bias(q, k, score_bias)
        return self._context(q, k, v, mask, bias, return_weights=return_weights)

    def project(
        self, key: Tensor, value: Tensor | None = None, *, key_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Projects the rows of a stored context, to which `attend` attends.

        Args:
            key: (B, Tk, d_key).
            value: (B, Tk, d_value). Default: the key.
            key_positions: (B, Tk) integers, for rotary configurations.

        Returns:
            Keys (B, Hkv, Tk, d_k), rotated for rotary configurations, and values (B, Hkv, Tk, d_v).
        """
        k, v = self.projections.keys_and_values(key, key if value is None else value)
        k = k if self.key_norm is None else self.key_norm(k)
        if self.rotary is not None:
            k = self.rotary(k, key_positions)
        return k, v

    def attend(
        self,
        query: Tensor,
        projected_keys: Tensor,
        projected_values: Tensor,
        *,
        positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """What `forward` computes of projected keys and values.

        Args:
            query: (B, Tq, d_query).
            projected_keys: The first result of `project`.
            projected_values: The second result of `project`.
            positions: (B, Tq) integers, for configurations that depend on positions.
            key_positions: (B, Tk) integers, for configurations whose rules depend on positions.
            attention_mask: (B, 1 or H, Tq, Tk) booleans, True = may attend.
            return_weights: Whether to return the attention weights.

        Returns:
            As `forward`.
        """
        k, v = projected_keys, projected_values
        q = self.projections.queries(query)
        q = q if self.query_norm is None else self.query_norm(q)
        if self.rotary is not None:
            q = self.rotary(q, positions)
        mask, bias = attention_mask, None
        if positions is not None and key_positions is not None:
            distance = positions[:, None, :, None] - key_positions[:, None, None, :]  # (B, 1, Tq, Tk)
            mask = self.score_rules.mask_at(distance, attention_mask)
            bias = self.score_rules.bias_at(distance, q.dtype)
        return self._context(q, k, v, mask, bias, return_weights=return_weights)

    def _context(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        *,
        return_weights: bool,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Context vectors, and weights or None, from heads and all masks and biases of pairs of rows."""
        if return_weights:
            weights = self._weights(q, k, mask, bias)  # (B, H, Tq, Tk)
            return self._join_heads(weights @ self._for_each_query_head(v)), weights
        heads = F.scaled_dot_product_attention(  # (B, H, Tq, d_v)
            q,
            k,
            v,
            attn_mask=fuse(mask, bias),
            dropout_p=self.config.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.config.scale,
            enable_gqa=self.config.num_kv_heads != self.config.num_heads,
        )
        return self._join_heads(heads), None

    def _join_heads(self, heads: Tensor) -> Tensor:
        """(B, H, Tq, d_v) to (B, Tq, d_out)."""
        context = heads.transpose(1, 2).flatten(2)  # (B, Tq, H * d_v)
        return context if self.output is None else self.output(context)

    def _weights(self, q: Tensor, k: Tensor, may_attend: Tensor | None, bias: Tensor | None) -> Tensor:
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
    return within[:, None, None, :].expand(key_lengths.shape[0], 1, query_length, key_length)
