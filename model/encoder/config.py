"""The validated configuration of a text encoder."""

from dataclasses import dataclass
from typing import Final

from attention_serving.model.config import AttentionConfig, ConfigError, check_sizes

ACTIVATIONS: Final = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "identity")
NORMS: Final = ("layer", "rms")
# cls: the first row. mean: the mean of all rows. mean_sqrt_length: their sum over the square root of their
# number. max: the largest of each element. weighted_mean: the mean, with weight i for row i from 1. last: the
# last row. end_token: the first row of the end token; highest_token: that of the highest id.
POOLINGS: Final = (
    "cls", "mean", "mean_sqrt_length", "max", "weighted_mean", "last", "end_token", "highest_token",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A linear layer after pooling.

    Raises:
        ConfigError: A value breaks a rule.
    """

    d_in: int
    """Width of its input."""
    d_out: int
    """Width of its output."""
    bias: bool = True
    """Whether it adds a bias."""
    activation: str = "identity"
    """The function of its output: one of ACTIVATIONS."""

    def __post_init__(self) -> None:
        check_sizes(self, "d_in", "d_out")
        _check_choice("activation", self.activation, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and rules of a `TextEncoder`.

    Raises:
        ConfigError: A value breaks a rule.
    """

    vocabulary: int
    """Number of token ids."""
    width: int
    """Width of a token vector, d."""
    layers: tuple[AttentionConfig, ...]
    """The attention of each layer."""
    feed_forward: int
    """Width between the two linear layers of the feed-forward part."""
    activation: str = "gelu"
    """The function of the feed-forward part: one of ACTIVATIONS."""
    gated: bool = False
    """Whether the feed-forward part multiplies the function of one linear layer by another linear layer."""
    feed_forward_bias: bool = True
    """Whether the linear layers of the feed-forward part add a bias."""
    norm: str = "layer"
    """How rows are normalised: one of NORMS."""
    norm_epsilon: float = 1e-12
    """What is added to the variance or mean square of a row."""
    norm_bias: bool = True
    """Whether layer normalisation adds a bias."""
    norm_first: bool = False
    """Whether the input of attention and of the feed-forward part is normalised, instead of their sum with
    their input."""
    first_attention_norm: bool = True
    """With norm_first: whether the first layer normalises the input of its attention."""
    embedding_norm: bool = True
    """Whether the sum of the embeddings is normalised."""
    final_norm: bool = False
    """Whether the rows of the last layer are normalised."""
    positions: int = 0
    """Rows of the table of position embeddings; 0 for none."""
    padding_id: int | None = None
    """For tables that count positions from this id + 1: a token with this id does not count, and has the
    position of the id. None if positions count from 0."""
    token_types: int = 0
    """Rows of the table of token types, of which the first is used; 0 for none."""
    relative_buckets: int = 0
    """Rows of the table of biases for the distance of two rows; 0 for none."""
    max_tokens: int
    """Largest number of tokens of a sequence."""
    pooling: tuple[str, ...] = ("mean",)
    """How one vector is made of the rows: some of POOLINGS, whose vectors are concatenated."""
    end_id: int = 0
    """For the pooling end_token: the id of the end token."""
    dense: tuple[DenseConfig, ...] = ()
    """Linear layers after pooling."""
    normalised: bool = False
    """Whether the embedding is divided by its length."""

    def __post_init__(self) -> None:
        check_sizes(self, "vocabulary", "width", "feed_forward", "max_tokens")
        _check_choice("activation", self.activation, ACTIVATIONS)
        _check_choice("norm", self.norm, NORMS)
        for pooling in self.pooling:
            _check_choice("pooling", pooling, POOLINGS)
        for holds, field, rule in (
            (bool(self.layers), "layers", "must not be empty"),
            (bool(self.pooling), "pooling", "must not be empty"),
            (self.max_tokens <= self.most_positions, "max_tokens", f"must be {self.most_positions} at most"),
            (all(layer.d_query == layer.d_out == self.width for layer in self.layers), "layers",
             f"must have the width {self.width}"),
            (not any(layer.cross for layer in self.layers), "layers", "must be self-attention"),
            (len({(layer.num_heads, layer.causal) for layer in self.layers}) <= 1, "layers",
             "must agree on the number of heads and on causality"),
        ):  # fmt: skip
            if not holds:
                raise ConfigError(field, getattr(self, field), rule)
        width = self.width * len(self.pooling)
        for layer in self.dense:
            if layer.d_in != width:
                raise ConfigError("dense", layer, f"must take vectors of width {width}")
            width = layer.d_out

    @property
    def most_positions(self) -> float:
        """The largest number of tokens that have a position."""
        if not self.positions:
            return float("inf")
        return self.positions if self.padding_id is None else self.positions - self.padding_id - 1

    @property
    def num_heads(self) -> int:
        """Query heads of each layer, H."""
        return self.layers[0].num_heads

    @property
    def causal(self) -> bool:
        """Whether a row attends to earlier rows only."""
        return self.layers[0].causal

    @property
    def embedding_width(self) -> int:
        """Width of the embedding of a sequence."""
        return self.dense[-1].d_out if self.dense else self.width * len(self.pooling)

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of all linear layers for each token; a multiply-add counts as two."""
        matrices = 3 if self.gated else 2
        feed_forward = 2 * matrices * self.width * self.feed_forward
        return sum(layer.flops_per_query + layer.flops_per_key + feed_forward for layer in self.layers)

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of the attention products of all layers for each pair of tokens."""
        return sum(layer.flops_per_pair for layer in self.layers)


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, f"must be one of {', '.join(choices)}")
