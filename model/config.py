"""The validated configuration of one attention module."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

# Default of a field that is derived from others. No field has this value after construction.
DERIVED: Final[Any] = None
# separate: a linear layer each for query, key and value. fused: one linear layer whose output is cut in
# three. stacked: a (heads, d_head, d) stack of weights each, applied in one batched product. none: the
# inputs themselves.
PROJECTIONS: Final = ("separate", "fused", "stacked", "none")
# How an embedding is made of token vectors, and what sentence-transformers calls it. own: what the model
# itself computes.
POOLINGS: Final[Mapping[str, str]] = {
    "cls": "cls",
    "mean": "mean",
    "mean_sqrt_length": "mean_sqrt_len_tokens",
    "max": "max",
    "weighted_mean": "weightedmean",
    "last": "lasttoken",
    "own": "",
}

# The name of a field, whether its rule holds, and the text of the rule.
Rule = tuple[str, bool, str]


class ConfigError(ValueError):
    """A configuration breaks a rule. The message names the field, its value and the rule."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={value!r}: {rule}")
        self.field = field


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and rules of a `MultiHeadAttention`.

    Omitted fields take the default stated with them, so that every field holds its final value. d_k is the
    width of one query or key head, d_v the width of one value head.

    Raises:
        ConfigError: A value breaks a rule.
    """

    d_query: int
    """Width of a query row."""
    num_heads: int = 1
    """Number of query heads, H."""
    num_kv_heads: int = DERIVED
    """Number of key and value heads; each is shared by a group of query heads. Default: num_heads."""
    cross: bool = False
    """Whether keys come from a second sequence. Otherwise the query is also the key."""
    separate_value: bool = False
    """Whether values come from a third input of the key's length. Otherwise the key is also the value."""
    d_key: int = DERIVED
    """Width of a key row. Default: d_query."""
    d_value: int = DERIVED
    """Width of a value row. Default: d_key."""
    d_k: int = DERIVED
    """Width of one query or key head. Default: d_query / num_heads."""
    d_v: int = DERIVED
    """Width of one value head. Default: d_k, or d_value / num_kv_heads without projections."""
    projections: str = "separate"
    """How queries, keys and values are computed: one of PROJECTIONS."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    out_proj: bool = True
    """Whether the concatenated heads pass through an output projection."""
    out_bias: bool = True
    """Whether the output projection adds a bias."""
    d_out: int = DERIVED
    """Width of a context vector. Default: d_query with an output projection, num_heads * d_v without."""
    causal: bool = False
    """Whether query row i may attend to key rows 0 to i only."""
    alibi: bool = False
    """Whether scores decrease linearly with the distance of two rows (ALiBi), with a slope for each head."""
    window: int = 0
    """Rows of a sliding window, 0 for none. Row i may attend to rows i - window + 1 to i if causal, and to
    rows i - window + 1 to i + window - 1 otherwise."""
    scale: float = DERIVED
    """Factor of the scores. Default: 1 / sqrt(d_k)."""
    rotary_theta: float = 0.0
    """Base frequency of the rotary position embedding; 0 for none."""
    rotary_interleaved: bool = False
    """Whether rotary pairs are neighbouring elements. Otherwise their elements are half a head apart."""
    qk_norm: float = 0.0
    """Epsilon of the normalisation of each query and key head by its root mean square, before the rotary
    embedding; 0 for no normalisation."""
    dropout: float = 0.0
    """Probability that training drops an attention weight, from 0 to below 1. No effect in evaluation."""

    def __post_init__(self) -> None:
        for name in ("d_query", "num_heads", *(["window"] if self.window != 0 else [])):
            self._check_size(name)
        if self.d_k is DERIVED and self.d_query % self.num_heads:
            rule = f"must divide d_query={self.d_query} if d_k is not given"
            raise ConfigError("num_heads", self.num_heads, rule)
        if self.projections not in PROJECTIONS:
            raise ConfigError("projections", self.projections, f"must be one of {', '.join(PROJECTIONS)}")
        self._derive("num_kv_heads", self.num_heads)
        self._derive("d_key", self.d_query)
        self._derive("d_value", self.d_key)
        self._derive("d_k", self.d_query // self.num_heads)
        self._derive("d_v", self.d_value // self.num_kv_heads if self.projections == "none" else self.d_k)
        self._derive("d_out", self.d_query if self.out_proj else self.num_heads * self.d_v)
        if self.scale is DERIVED:
            object.__setattr__(self, "scale", 1 / math.sqrt(self.d_k))
        self._check_rules()

    def _derive(self, name: str, value: int) -> None:
        if getattr(self, name) is DERIVED:
            object.__setattr__(self, name, value)
        self._check_size(name)

    def _check_size(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(name, value, "must be a positive integer")

    def _check_rules(self) -> None:
        flags = [field.name for field in fields(self) if field.type is bool]
        rules = [(name, isinstance(getattr(self, name), bool), "must be true or false") for name in flags]
        for name, holds, rule in (*rules, *self._input_rules(), *self._head_rules(), *self._number_rules()):
            if not holds:
                raise ConfigError(name, getattr(self, name), rule)

    def _input_rules(self) -> list[Rule]:
        cross, rotary = self.cross, self.rotary_theta != 0
        own_value = self.separate_value or self.d_value == self.d_key
        return [
            ("d_key", cross or self.d_key == self.d_query, f"must be d_query={self.d_query} unless cross"),
            ("separate_value", cross or not self.separate_value, "needs cross"),
            ("d_value", own_value, f"must be d_key={self.d_key} unless separate_value"),
            ("projections", self.projections != "fused" or not cross, "must not be fused with cross"),
            ("alibi", not (self.alibi and cross), "must be false with cross"),
            ("alibi", not (rotary and self.alibi), "must be false with rotary_theta"),
            ("window", not (self.window and cross), "must be 0 with cross"),
            ("rotary_theta", not (rotary and cross), "must be 0 with cross"),
            ("rotary_interleaved", rotary or not self.rotary_interleaved, "needs rotary_theta"),
            ("d_k", not rotary or self.d_k % 2 == 0, "must be even for rotary position embedding"),
        ]

    def _head_rules(self) -> list[Rule]:
        heads, kv_heads, free = self.num_heads, self.num_kv_heads, self.projections != "none"
        joined = heads * self.d_v
        output = f"must be num_heads * d_v = {joined} without an output projection"
        widths = (
            ("d_query", "num_heads * d_k", heads * self.d_k),
            ("d_key", "num_kv_heads * d_k", kv_heads * self.d_k),
            ("d_value", "num_kv_heads * d_v", kv_heads * self.d_v),
        )
        return [
            ("num_kv_heads", heads % kv_heads == 0, f"must divide num_heads={heads}"),
            ("d_out", self.out_proj or self.d_out == joined, output),
            ("qkv_bias", free or not self.qkv_bias, "needs projections"),
            *(
                (name, free or getattr(self, name) == width, f"must be {text} = {width} without projections")
                for name, text, width in widths
            ),
        ]

    def _number_rules(self) -> list[Rule]:
        dropout = self.dropout is not False and self.dropout == 0
        dropout = dropout or (_is_positive_number(self.dropout) and self.dropout < 1)
        theta = self.rotary_theta == 0 or _is_positive_number(self.rotary_theta)
        return [
            ("scale", _is_positive_number(self.scale), "must be a positive finite number"),
            ("dropout", dropout, "must be a number from 0 to below 1"),
            ("qk_norm", self.qk_norm == 0 or _is_positive_number(self.qk_norm), "must be 0 or positive"),
            ("rotary_theta", theta, "must be 0 or a positive finite number"),
        ]

    @property
    def flops_per_query(self) -> int:
        """Floating-point operations of the linear layers for each query row; a multiply-add counts as two."""
        output = self.num_heads * self.d_v * self.d_out if self.out_proj else 0
        projection = 0 if self.projections == "none" else self.d_query * self.num_heads * self.d_k
        return 2 * (projection + output)

    @property
    def flops_per_key(self) -> int:
        """Floating-point operations of the linear layers for each key row."""
        if self.projections == "none":
            return 0
        return 2 * self.num_kv_heads * (self.d_key * self.d_k + self.d_value * self.d_v)

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of the two attention products for each pair of query and key row."""
        return 2 * self.num_heads * (self.d_k + self.d_v)


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max
