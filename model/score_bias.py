"""Rules on attention scores that follow from positions alone: masks and added biases.

To add an attention variant of this kind, write a `ScoreRule` and list it in `MASKS` or `BIASES`.
`MultiHeadAttention` applies the rules on both of its paths: the fused kernel, and the path that returns
weights.

Shapes: B batch, H query heads, Tq query rows, Tk key rows. A position is a row's index in its sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_serving.model.config import AttentionConfig


@dataclass(frozen=True)
class ScoreRule:
    """A mask or a bias for configurations of one kind.

    Attributes:
        applies: Whether a configuration asks for the rule.
        make: Its tensor for a configuration, Tq, Tk and a device. A mask is bool (Tq, Tk), True = may attend.
            A bias is float32 (1, 1 or H, Tq, Tk) and is added to the scaled scores.
    """

    applies: Callable[[AttentionConfig], bool]
    make: Callable[[AttentionConfig, int, int, torch.device], Tensor]


def _lower_triangle(_: AttentionConfig, query_length: int, key_length: int, device: torch.device) -> Tensor:
    """A query may attend to keys at its own position and before it."""
    return torch.ones(query_length, key_length, dtype=torch.bool, device=device).tril()


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: 2 ** (-8 i / heads) for i = 1 to heads.

    For a number of heads that is not a power of two, those of the largest power of two below it come first.
    The others are every second slope of twice that power, from the first on.
    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), section 3, and its published code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


def _alibi(config: AttentionConfig, query_length: int, key_length: int, device: torch.device) -> Tensor:
    """-slope * |i - j| for query row i and key row j."""
    slopes = torch.tensor(alibi_slopes(config.num_heads), device=device)  # (H,)
    rows, columns = (torch.arange(length, device=device) for length in (query_length, key_length))
    distance = (rows[:, None] - columns).abs()  # (Tq, Tk)
    return -slopes[None, :, None, None] * distance  # (1, H, Tq, Tk)


def _window(config: AttentionConfig, query_length: int, key_length: int, device: torch.device) -> Tensor:
    """A query may attend to keys fewer than `window` rows away, on both sides (Beltagy et al., 2020)."""
    reach = config.window - 1
    pairs = torch.ones(query_length, key_length, dtype=torch.bool, device=device)
    return pairs.tril(reach).triu(-reach)


CAUSAL = ScoreRule(lambda config: config.causal, _lower_triangle)
MASKS: tuple[ScoreRule, ...] = (CAUSAL, ScoreRule(lambda config: config.window > 0, _window))
BIASES: tuple[ScoreRule, ...] = (ScoreRule(lambda config: config.alibi, _alibi),)


class ScoreRules:
    """The rules that one configuration asks for."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config
        self._masks = [rule for rule in MASKS if rule.applies(config)]
        self._biases = [rule for rule in BIASES if rule.applies(config)]

    @property
    def only_causal(self) -> bool:
        """Whether causality is the only rule, so that a fused kernel's causal flag can stand for it."""
        return self._masks == [CAUSAL] and not self._biases

    def mask(self, may_attend: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Combines the caller's mask with those of the rules.

        Args:
            may_attend: bool (B, 1 or H, Tq, Tk), True = may attend; None if the caller gives no mask.
            q: (B, H, Tq, d_k).
            k: (B, heads, Tk, d_k).

        Returns:
            bool, broadcastable to (B, H, Tq, Tk); None if every row may attend to every key.
        """
        for rule in self._masks:
            own = rule.make(self._config, q.shape[2], k.shape[2], q.device)  # (Tq, Tk)
            may_attend = own if may_attend is None else may_attend & own
        return may_attend

    def bias(self, q: Tensor, k: Tensor, given: Tensor | None = None) -> Tensor | None:
        """The sum of all biases in the type of `q`, (1 or B, 1 or H, Tq, Tk); None if there are none.

        Args:
            q: (B, H, Tq, d_k).
            k: (B, heads, Tk, d_k).
            given: The caller's bias, of that shape.
        """
        total = given
        for rule in self._biases:
            own = rule.make(self._config, q.shape[2], k.shape[2], q.device)  # (1, 1 or H, Tq, Tk)
            total = own if total is None else total + own
        return None if total is None else total.to(q.dtype)

    def fused_mask(
        self, may_attend: Tensor | None, q: Tensor, k: Tensor, given: Tensor | None = None
    ) -> Tensor | None:
        """Mask and bias as the one mask that a fused kernel takes: bool, or added to the scores."""
        mask, bias = self.mask(may_attend, q, k), self.bias(q, k, given)
        if bias is None or mask is None:
            return mask if bias is None else bias
        return torch.where(mask, bias, float("-inf"))
