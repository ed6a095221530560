"""The configuration of one attention module: sizes, biases and rules, validated."""

import math
import sys
from dataclasses import dataclass, fields
from typing import Any, Final

# Default of a field whose value follows from others; no field holds it after construction.
DERIVED: Final[Any] = None


class ConfigError(ValueError):
    """A configuration breaks a rule; the message names the field, its value and the rule."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field}={value!r}: {rule}")
        self.field = field


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and rules of a `MultiHeadAttention`.

    Fields that are left out take the value stated beside them, so that every field of a
    configuration holds its final value. d_k is the width of one query or key head, d_v that of
    one value head.

    Raises:
        ConfigError: A value breaks a rule.
    """

    d_query: int
    """Width of a query row."""
    num_heads: int = 1
    """Number of heads, H."""
    cross: bool = False
    """Keys come from a sequence of their own; otherwise the query sequence is its own key."""
    separate_value: bool = False
    """Values come from a third input, as long as the key; otherwise the key is its own value."""
    d_key: int = DERIVED
    """Width of a key row; left out, d_query."""
    d_value: int = DERIVED
    """Width of a value row; left out, d_key."""
    d_k: int = DERIVED
    """Width of one query or key head; left out, d_query / num_heads."""
    d_v: int = DERIVED
    """Width of one value head; left out, d_k."""
    qkv_bias: bool = False
    """Whether the query, key and value projections add a bias."""
    out_proj: bool = True
    """Whether the concatenated heads pass through an output projection."""
    out_bias: bool = True
    """Whether the output projection adds a bias."""
    d_out: int = DERIVED
    """Width of a context vector; left out, d_query with an output projection, num_heads * d_v without."""
    causal: bool = False
    """Query row i may attend to key rows 0..i only."""
    scale: float = DERIVED
    """Factor on the scores; left out, 1 / sqrt(d_k)."""

    def __post_init__(self) -> None:
        _check_sizes(self, "d_query", "num_heads")
        if self.d_k is DERIVED and self.d_query % self.num_heads:
            rule = f"must divide d_query={self.d_query} where d_k is not given"
            raise ConfigError("num_heads", self.num_heads, rule)
        self._derive("d_key", self.d_query)
        self._derive("d_value", self.d_key)
        self._derive("d_k", self.d_query // self.num_heads)
        self._derive("d_v", self.d_k)
        self._derive("d_out", self.d_query if self.out_proj else self.num_heads * self.d_v)
        _check_sizes(self, "d_key", "d_value", "d_k", "d_v", "d_out")
        self._derive("scale", 1 / math.sqrt(self.d_k))
        self._check_rules()

    def _derive(self, name: str, value: float) -> None:
        if getattr(self, name) is DERIVED:
            object.__setattr__(self, name, value)

    def _check_rules(self) -> None:
        concatenated = self.num_heads * self.d_v
        rules = [
            (
                "d_key",
                self.cross or self.d_key == self.d_query,
                f"must be d_query={self.d_query} unless cross",
            ),
            ("separate_value", self.cross or not self.separate_value, "needs cross"),
            (
                "d_value",
                self.separate_value or self.d_value == self.d_key,
                f"must be d_key={self.d_key} unless separate_value",
            ),
            (
                "d_out",
                self.out_proj or self.d_out == concatenated,
                f"must be num_heads * d_v = {concatenated} without an output projection",
            ),
            ("scale", _is_positive_number(self.scale), "must be a positive finite number"),
        ]
        flags = [field.name for field in fields(self) if field.type is bool]
        rules += [(name, isinstance(getattr(self, name), bool), "must be true or false") for name in flags]
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(name, getattr(self, name), rule)

    @property
    def flops_per_query(self) -> int:
        """Floating-point operations of the linear layers for each query row (a multiply-add is two)."""
        output = self.num_heads * self.d_v * self.d_out if self.out_proj else 0
        return 2 * (self.d_query * self.num_heads * self.d_k + output)

    @property
    def flops_per_key(self) -> int:
        """Floating-point operations of the linear layers for each key row."""
        return 2 * self.num_heads * (self.d_key * self.d_k + self.d_value * self.d_v)

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of the two attention products for each pair of query and key row."""
        return 2 * self.num_heads * (self.d_k + self.d_v)


def _check_sizes(config: AttentionConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigError(name, value, "must be a positive integer")


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max
