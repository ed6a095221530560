"""An independent reference: attention in NumPy float64, row by row, and random cases to compare with it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import DERIVED, AttentionConfig
from tests.support.tables import linear_layers

Array = NDArray[Any]
# The reference and the float64 module add up in different orders; nothing else may differ.
RTOL, ATOL = 1e-10, 1e-12


def position_rules(config: AttentionConfig, query_length: int, key_length: int) -> tuple[Array, Array]:
    """Which pairs may attend, bool (Tq, Tk), and what is added to their scores, (H, Tq, Tk)."""
    may_attend = np.ones((query_length, key_length), np.bool_)
    bias = np.zeros((config.num_heads, query_length, key_length))
    for query, key in np.ndindex(query_length, key_length):
        if config.causal and key > query:
            may_attend[query, key] = False
        if config.window and abs(query - key) >= config.window:
            may_attend[query, key] = False
        if config.alibi:
            bias[:, query, key] = [-slope * abs(query - key) for slope in alibi_slopes(config.num_heads)]
    return may_attend, bias


def alibi_slopes(heads: int) -> list[float]:
    """A geometric sequence whose ratio is its first term; interleaved if the count is not a power of two."""
    if heads & (heads - 1) == 0:
        ratio: float = 2 ** -(8 / heads)
        return [ratio**i for i in range(1, heads + 1)]
    below = 2 ** int(np.log2(heads))
    return alibi_slopes(below) + alibi_slopes(2 * below)[::2][: heads - below]


def attention(module: MultiHeadAttention, inputs: list[Array], may_attend: Array) -> tuple[Array, Array]:
    """Context vectors (B, Tq, d_out) and weights (B, H, Tq, Tk), from sums over the keys of each row.

    Args:
        module: Its weights are read, its code is not run.
        inputs: Query, key and value, (B, T, d).
        may_attend: (B, H, Tq, Tk), all rules in one mask.
    """
    heads = module.config.num_heads
    _, bias = position_rules(module.config, *may_attend.shape[2:])
    layers = linear_layers(module)
    q, k, v = (
        np.stack(np.split(_linear(layer, rows), heads, axis=-1), axis=1)  # (B, H, T, d)
        for layer, rows in zip(layers, inputs, strict=True)
    )
    weights = np.zeros(may_attend.shape)
    context = np.zeros((*q.shape[:3], v.shape[-1]))
    for batch, head, row in np.ndindex(q.shape[:3]):
        allowed = np.flatnonzero(may_attend[batch, head, row])
        if allowed.size:
            scores = k[batch, head, allowed] @ q[batch, head, row] * module.config.scale
            scores = scores + bias[head, row, allowed]
            powers = np.exp(scores - scores.max())
            weights[batch, head, row, allowed] = powers / powers.sum()
        context[batch, head, row] = weights[batch, head, row] @ v[batch, head]
    joined = np.concatenate(np.split(context, heads, axis=1), axis=-1)[:, 0]  # (B, Tq, H * d_v)
    output = module.output
    return (joined if output is None else _linear(output, joined)), weights


def _linear(layer: torch.nn.Linear, rows: Array) -> Array:
    bias = 0.0 if layer.bias is None else layer.bias.detach().numpy()
    product: Array = rows @ layer.weight.detach().numpy().T + bias
    return product


@dataclass(frozen=True)
class Case:
    """A float64 module, its inputs, and the pairs of rows that may attend."""

    module: MultiHeadAttention
    inputs: list[Array]
    """Query, key and value."""
    options: dict[str, torch.Tensor]
    """key_lengths and attention_mask, if given."""
    may_attend: Array
    """(B, H, Tq, Tk), the options and the rules of `position_rules` in one mask."""

    def run(self, *, return_weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs of the module."""
        tensors = [torch.from_numpy(array) for array in self.inputs]
        with torch.inference_mode():
            context, weights = self.module(*tensors, **self.options, return_weights=return_weights)
        return context, weights


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Any configuration of small sizes."""
    size = st.integers(1, 5)
    cross = draw(st.booleans())
    separate = cross and draw(st.booleans())
    d_query, d_key = draw(size), draw(size)
    out_proj = draw(st.booleans())
    return AttentionConfig(
        d_query=d_query,
        num_heads=draw(st.integers(1, 4)),
        cross=cross,
        separate_value=separate,
        d_key=d_key if cross else d_query,
        d_value=draw(size) if separate else DERIVED,
        d_k=draw(size),
        d_v=draw(size),
        qkv_bias=draw(st.booleans()),
        out_proj=out_proj,
        out_bias=draw(st.booleans()),
        d_out=draw(size) if out_proj else DERIVED,
        causal=draw(st.booleans()),
        alibi=not cross and draw(st.booleans()),
        window=0 if cross else draw(st.integers(0, 7)),
        scale=draw(st.sampled_from([DERIVED, 0.3, 1.0])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any configuration with random weights, inputs, lengths and masks."""
    config = draw(configs())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, query_length, key_length = (draw(st.integers(1, top)) for top in (3, 6, 6))
    key_length = key_length if config.cross else query_length
    query = rng.standard_normal((batch, query_length, config.d_query))
    key = rng.standard_normal((batch, key_length, config.d_key)) if config.cross else query
    value = rng.standard_normal((batch, key_length, config.d_value)) if config.separate_value else key
    may_attend = np.ones((batch, config.num_heads, query_length, key_length), np.bool_)
    options = {}
    if draw(st.booleans()):
        lengths = rng.integers(0, key_length, batch, endpoint=True)
        options["key_lengths"] = torch.from_numpy(lengths)
        may_attend &= np.arange(key_length) < lengths[:, None, None, None]
    if draw(st.booleans()):
        mask_heads = draw(st.sampled_from([1, config.num_heads]))
        mask = rng.random((batch, mask_heads, query_length, key_length)) < draw(st.sampled_from([0.2, 0.7]))
        options["attention_mask"] = torch.from_numpy(mask)
        may_attend &= mask
    may_attend &= position_rules(config, query_length, key_length)[0]
    return Case(random_module(config, rng), [query, key, value], options, may_attend)


def random_module(config: AttentionConfig, rng: np.random.Generator) -> MultiHeadAttention:
    """A float64 module whose weights come from `rng`."""
    module = MultiHeadAttention(config).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.standard_normal(parameter.shape)))
    return module
