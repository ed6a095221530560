"""What attention knows of positions: the rotary embedding, and rules that add to scores or mask them.

To add a rule that follows from positions alone, extend `ScoreRules.mask` or `ScoreRules.bias`.
`MultiHeadAttention` applies both on both of its paths: the fused kernel, and the path that returns weights.

Shapes: B batch, H query heads, T rows, Tq query rows, Tk key rows. A position is a row's index in its
sequence.
"""

import torch
from torch import Tensor, nn

from attention_serving.model.config import AttentionConfig


class RotaryEmbedding(nn.Module):
    """Rotates pairs of elements of a query or key by angles proportional to the row's position.

    The product of a rotated query and a rotated key depends on the distance between their rows. Pair i of a
    row at position p is rotated by p * theta ** (-2 i / width).
    Source: Su et al., "RoFormer" (2021), section 3.2.2.
    """

    def __init__(self, width: int, *, theta: float, interleaved: bool) -> None:
        """Computes the frequencies.

        Args:
            width: Number of elements of one head, even.
            theta: Base frequency.
            interleaved: Whether pair i is (2 i, 2 i + 1). Otherwise it is (i, i + width / 2).
        """
        super().__init__()
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        # Numbers instead of a buffer: a buffer would be cast in a module of half precision. The exported
        # graph holds the same values, because an error in the last place grows with the position.
        self.frequencies: list[float] = (1.0 / theta**exponents).tolist()
        self.interleaved = interleaved

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """(B, H, T, width) heads at (B, T) integer positions to rotated (B, H, T, width)."""
        frequencies = torch.tensor(self.frequencies, device=heads.device)  # (width / 2,)
        angles = positions[:, None, :, None] * frequencies  # (B, 1, T, width / 2)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        if self.interleaved:
            pairs = heads.reshape(*heads.shape[:-1], len(self.frequencies), 2)
            first, second = pairs.unbind(dim=-1)  # (B, H, T, width / 2) each
        else:
            first, second = heads.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(rotated, dim=-1).flatten(-2) if self.interleaved else torch.cat(rotated, dim=-1)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: 2 ** (-8 i / heads) for i = 1 to heads.

    For a number of heads that is not a power of two, those of the largest power of two below it come first.
    The others are every second slope of twice that power, from the first on.
    Source: Press, Smith and Lewis, "Train Short, Test Long" (2022), section 3, and its published code.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)]


class ScoreRules:
    """Masks and biases that follow from positions and a configuration alone."""

    def __init__(self, config: AttentionConfig) -> None:
        self._config = config

    @property
    def only_causal(self) -> bool:
        """Whether causality is the only rule, so that a fused kernel's causal flag can stand for it."""
        return self._config.causal and not self._config.window and not self._config.alibi

    def mask(self, may_attend: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Combines the caller's mask with those of the rules.

        Args:
            may_attend: bool (B, 1 or H, Tq, Tk), True = may attend; None if the caller gives no mask.
            q: (B, H, Tq, d_k).
            k: (B, heads, Tk, d_k).

        Returns:
            bool, broadcastable to (B, H, Tq, Tk); None if every row may attend to every key.
        """
        causal, window = self._config.causal, self._config.window
        if not causal and not window:
            return may_attend
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        if causal:
            mask = mask.tril()
        if window:  # keys fewer than `window` rows away, on both sides (Beltagy et al., 2020)
            mask = mask.tril(window - 1).triu(1 - window)
        return mask if may_attend is None else may_attend & mask

    def bias(self, q: Tensor, k: Tensor, score_bias: Tensor | None = None) -> Tensor | None:
        """The sum of all biases in the type of `q`, (1 or B, 1 or H, Tq, Tk); None if there are none.

        Args:
            q: (B, H, Tq, d_k).
            k: (B, heads, Tk, d_k).
            score_bias: The caller's bias, of that shape.
        """
        if self._config.alibi:
            slopes = torch.tensor(alibi_slopes(self._config.num_heads), device=q.device)  # (H,)
            rows, columns = (torch.arange(length, device=q.device) for length in (q.shape[2], k.shape[2]))
            distance = (rows[:, None] - columns).abs()  # (Tq, Tk)
            alibi = -slopes[None, :, None, None] * distance  # (1, H, Tq, Tk)
            score_bias = alibi if score_bias is None else score_bias + alibi
        return None if score_bias is None else score_bias.to(q.dtype)

    def mask_at(self, distance: Tensor, may_attend: Tensor | None) -> Tensor | None:
        """As `mask`, for rows at any positions.

        Args:
            distance: (B, 1, Tq, Tk), the position of the query row minus that of the key row.
            may_attend: As in `mask`.
        """
        causal, window = self._config.causal, self._config.window
        if causal:
            mask = distance >= 0
            may_attend = mask if may_attend is None else may_attend & mask
        if window:
            mask = distance.abs() < window
            may_attend = mask if may_attend is None else may_attend & mask
        return may_attend

    def bias_at(self, distance: Tensor, dtype: torch.dtype) -> Tensor | None:
        """As `bias`, for rows at any positions; `distance` as in `mask_at`."""
        if not self._config.alibi:
            return None
        slopes = torch.tensor(alibi_slopes(self._config.num_heads), device=distance.device)  # (H,)
        return (-slopes[None, :, None, None] * distance.abs()).to(dtype)  # (B, H, Tq, Tk)


def fuse(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Mask and bias as the one mask that a fused kernel takes: bool, or added to the scores."""
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, float("-inf"))
