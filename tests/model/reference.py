"""An independent reference: attention in NumPy float64, row by row, and random cases to compare with it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import DERIVED, PROJECTIONS, AttentionConfig

Array = NDArray[Any]
# The reference and the float64 module add up in different orders; nothing else may differ. Angles of rotary
# positions and the mean squares of heads are float32.
RTOL, ATOL = 1e-10, 1e-12
FLOAT32_RTOL, FLOAT32_ATOL = 5e-6, 2e-5
EPSILON = 1e-5


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


def rotated(rows: Array, positions: Array, theta: float, *, interleaved: bool) -> Array:
    """Pairs of (..., width) at positions (...), turned as complex numbers are."""
    width = rows.shape[-1]
    first, second = (
        (slice(0, width, 2), slice(1, width, 2))
        if interleaved
        else (slice(0, width // 2), slice(width // 2, width))
    )
    angles = positions[..., None] * theta ** (-2.0 * np.arange(width // 2) / width)
    turned = (rows[..., first] + 1j * rows[..., second]) * np.exp(1j * angles)
    found = np.empty_like(rows)
    found[..., first], found[..., second] = turned.real, turned.imag
    return found


def attention(case: "Case") -> tuple[Array, Array]:
    """Context vectors (B, Tq, d_out) and weights (B, H, Tq, Tk), from sums over the keys of each row.

    The weights of the module are read, its code is not run.
    """
    config, output = case.module.config, case.module.output
    _, bias = position_rules(config, *case.may_attend.shape[2:])
    bias = bias + case.bias
    q, k, v = map(np.einsum, ["btd,hwd->bhtw"] * 3, case.inputs, _parameters(case.module, "weight"))
    if config.qkv_bias:
        biases = _parameters(case.module, "bias")
        q, k, v = (part + own[:, None] for part, own in zip((q, k, v), biases, strict=True))
    if config.qk_norm:
        q, k = (
            part / np.sqrt((part**2).mean(-1, keepdims=True) + config.qk_norm) * norm.weight.detach().numpy()
            for part, norm in ((q, case.module.query_norm), (k, case.module.key_norm))
            if norm is not None
        )
    if config.rotary_theta:
        q, k = (
            rotated(part, case.positions[:, None], config.rotary_theta, interleaved=config.rotary_interleaved)
            for part in (q, k)
        )
    k, v = (np.repeat(part, config.num_heads // config.num_kv_heads, axis=1) for part in (k, v))
    weights = np.zeros(case.may_attend.shape)
    context = np.zeros((*q.shape[:3], v.shape[-1]))
    for batch, head, row in np.ndindex(q.shape[:3]):
        allowed = np.flatnonzero(case.may_attend[batch, head, row])
        if allowed.size:
            scores = k[batch, head, allowed] @ q[batch, head, row] * config.scale
            scores = scores + bias[head, row, allowed]
            powers = np.exp(scores - scores.max())
            weights[batch, head, row, allowed] = powers / powers.sum()
        context[batch, head, row] = weights[batch, head, row] @ v[batch, head]
    joined = np.concatenate(np.split(context, config.num_heads, axis=1), axis=-1)[:, 0]  # (B, Tq, H * d_v)
    if output is not None:
        joined = joined @ output.weight.detach().numpy().T
        joined = joined if output.bias is None else joined + output.bias.detach().numpy()
    return joined, weights


def _parameters(module: MultiHeadAttention, kind: str) -> list[Array]:
    """The weights (heads, d_head, d) or the biases (heads, d_head) of query, key and value."""
    config, state = module.config, module.state_dict()
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    if config.projections == "none":
        parts = [np.eye(width) for width in (config.d_query, config.d_key, config.d_value)]
    elif config.projections == "fused":
        ends = np.cumsum([config.num_heads * config.d_k, config.num_kv_heads * config.d_k])
        parts = np.split(state[f"projections.fused.{kind}"].numpy(), ends)
    else:
        parts = [state[f"projections.{name}.{kind}"].numpy() for name in ("query", "key", "value")]
    sizes = [part.shape[-1:] if kind == "weight" else () for part in parts]
    return [part.reshape(count, -1, *size) for part, count, size in zip(parts, heads, sizes, strict=True)]


@dataclass(frozen=True)
class Case:
    """A float64 module, its inputs, and the pairs of rows that may attend."""

    module: MultiHeadAttention
    inputs: list[Array]
    """Query, key and value."""
    options: dict[str, torch.Tensor]
    """positions, key_lengths, attention_mask and score_bias, if given."""
    may_attend: Array
    """(B, H, Tq, Tk), the options and the rules of `position_rules` in one mask."""
    positions: Array
    """(B, Tq)."""
    bias: Array
    """What the caller adds to the scores, (H, Tq, Tk)."""

    def run(self, *, return_weights: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The outputs of the module."""
        tensors = [torch.from_numpy(array) for array in self.inputs]
        with torch.inference_mode():
            context, weights = self.module(*tensors, **self.options, return_weights=return_weights)
        return context, weights


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Any configuration of small sizes."""
    size, flag = st.integers(1, 5), st.booleans()
    cross, out_proj, projections = draw(flag), draw(flag), draw(st.sampled_from(PROJECTIONS))
    separate = cross and draw(flag)
    kv_heads = draw(st.integers(1, 3))
    heads, d_k, d_v = kv_heads * draw(st.sampled_from([1, 2])), draw(size), draw(size)
    rotary = not cross and draw(flag)
    d_k = 2 * d_k if rotary else d_k
    bare = projections == "none"
    if bare and not separate:
        kv_heads, d_v = kv_heads if cross else heads, d_k
    d_query = heads * d_k if bare else draw(size)
    d_key = (kv_heads * d_k if bare else draw(size)) if cross else d_query
    d_value = (kv_heads * d_v if bare else draw(size)) if separate else d_key
    return AttentionConfig(
        d_query=d_query,
        num_heads=heads,
        num_kv_heads=kv_heads,
        cross=cross,
        separate_value=separate,
        d_key=d_key,
        d_value=d_value,
        d_k=d_k,
        d_v=d_v,
        projections="separate" if cross and projections == "fused" else projections,
        qkv_bias=not bare and draw(flag),
        out_proj=out_proj,
        out_bias=draw(flag),
        d_out=draw(size) if out_proj else DERIVED,
        causal=draw(flag),
        alibi=not cross and not rotary and draw(flag),
        window=0 if cross else draw(st.integers(0, 7)),
        rotary_theta=draw(st.sampled_from([7.0, 10_000.0])) if rotary else 0.0,
        rotary_interleaved=rotary and draw(flag),
        qk_norm=draw(st.sampled_from([0.0, EPSILON])),
        scale=draw(st.sampled_from([DERIVED, 0.3, 1.0])),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any configuration with random weights, inputs, positions, lengths, masks and biases."""
    config = draw(configs())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, query_length, key_length = (draw(st.integers(1, top)) for top in (3, 6, 6))
    key_length = key_length if config.cross else query_length
    query = rng.standard_normal((batch, query_length, config.d_query))
    key = rng.standard_normal((batch, key_length, config.d_key)) if config.cross else query
    value = rng.standard_normal((batch, key_length, config.d_value)) if config.separate_value else key
    may_attend = np.ones((batch, config.num_heads, query_length, key_length), np.bool_)
    positions = np.broadcast_to(np.arange(query_length), (batch, query_length))
    bias = np.zeros((1, query_length, key_length))
    options = {}
    if config.rotary_theta and draw(st.booleans()):
        positions = rng.integers(0, 20, (batch, query_length))
        options["positions"] = torch.from_numpy(positions)
    if draw(st.booleans()):
        lengths = rng.integers(0, key_length, batch, endpoint=True)
        options["key_lengths"] = torch.from_numpy(lengths)
        may_attend &= np.arange(key_length) < lengths[:, None, None, None]
    if draw(st.booleans()):
        mask_heads = draw(st.sampled_from([1, config.num_heads]))
        mask = rng.random((batch, mask_heads, query_length, key_length)) < draw(st.sampled_from([0.2, 0.7]))
        options["attention_mask"] = torch.from_numpy(mask)
        may_attend &= mask
    if draw(st.booleans()):
        bias = rng.standard_normal((config.num_heads, query_length, key_length))
        options["score_bias"] = torch.from_numpy(bias)[None]
    may_attend &= position_rules(config, query_length, key_length)[0]
    module = MultiHeadAttention(config).double().eval()
    for parameter in module.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(parameter.shape))
    return Case(module, [query, key, value], options, may_attend, positions, bias)
