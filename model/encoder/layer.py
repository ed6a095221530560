"""One layer of an encoder.

Shapes: B batch, T tokens, H heads, d width.
"""

from torch import Tensor, nn

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.encoder.activations import FUNCTIONS
from attention_serving.model.encoder.config import EncoderConfig
from attention_serving.model.norm import make_norm


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
        self.function = FUNCTIONS[config.activation]

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

        def norm() -> nn.Module:
            return make_norm(config.norm, config.width, epsilon=config.norm_epsilon, bias=config.norm_bias)

        has_attention_norm = not (config.norm_first and is_first) or config.first_attention_norm
        self.attention = MultiHeadAttention(attention)
        self.attention_norm = norm() if has_attention_norm else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = norm()
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
