"""Four ways from rows to heads give one result, and cost what was published."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from tests.model.reference import ATOL, RTOL, random_module

State = dict[str, Tensor]
BIAS = pytest.mark.parametrize("bias", [pytest.param(False, id="no bias"), pytest.param(True, id="biased")])
PATHS = pytest.mark.parametrize(
    "return_weights", [pytest.param(False, id="context only"), pytest.param(True, id="with weights")]
)
QKV = ("query", "key", "value")


def rows(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def separate(**options: Any) -> MultiHeadAttention:
    return random_module(AttentionConfig(**options), np.random.default_rng(8))


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


def loaded(config: AttentionConfig, state: State) -> MultiHeadAttention:
    module = MultiHeadAttention(config).double().eval()
    module.load_state_dict(state)
    return module


def rearranged(module: MultiHeadAttention, projections: str) -> MultiHeadAttention:
    """The weights of a module with separate projections, in a module with others."""
    config, state = replace(module.config, projections=projections), dict(module.state_dict())
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        parts = {name: state.pop(f"projections.{name}.{kind}") for name in QKV}
        if projections == "fused":
            state[f"projections.fused.{kind}"] = torch.cat(list(parts.values()))
            continue
        for name, part in parts.items():
            heads = config.num_heads if name == "query" else config.num_kv_heads
            stack = part.unflatten(0, (heads, -1))  # (H, d_head, d), or (H, d_head) of a bias
            state[f"projections.{name}.{kind}"] = stack if kind == "weight" else stack[:, None]
    return loaded(config, state)


SELF: dict[str, dict[str, Any]] = {
    "one head": {"d_query": 5, "d_k": 3, "d_v": 4, "out_proj": False},
    "heads": {"d_query": 6, "num_heads": 3},
    "heads of two widths": {"d_query": 5, "num_heads": 3, "d_k": 2, "d_v": 4, "d_out": 7},
    "grouped heads": {"d_query": 8, "num_heads": 4, "num_kv_heads": 2, "d_v": 3},
    "causal": {"d_query": 6, "num_heads": 2, "causal": True},
    "rotary": {"d_query": 8, "num_heads": 2, "causal": True, "rotary_theta": 100.0},
}


@PATHS
@BIAS
@pytest.mark.parametrize("projections", ["fused", "stacked"])
@pytest.mark.parametrize("options", SELF.values(), ids=SELF)
def test_other_projections_with_the_same_weights_give_the_same_result(
    options: dict[str, Any], projections: str, bias: bool, return_weights: bool
) -> None:
    module = separate(**options, qkv_bias=bias)
    other = rearranged(module, projections)
    query = rows(0, 2, 5, module.config.d_query)
    assert_close(other(query, return_weights=return_weights), module(query, return_weights=return_weights))


@PATHS
@BIAS
def test_stacked_projections_of_three_inputs_equal_separate_ones(bias: bool, return_weights: bool) -> None:
    module = separate(
        d_query=4, d_key=5, d_value=6, num_heads=4, num_kv_heads=2, d_k=3, d_v=2,
        cross=True, separate_value=True, qkv_bias=bias,
    )  # fmt: skip
    inputs = rows(0, 2, 3, 4), rows(1, 2, 7, 5), rows(2, 2, 7, 6)
    stacked = rearranged(module, "stacked")
    assert_close(
        stacked(*inputs, return_weights=return_weights), module(*inputs, return_weights=return_weights)
    )


def cut(tensor: Tensor, heads: int) -> Tensor:
    """(B, T, H * d) to (B, H, T, d)."""
    return torch.unflatten(tensor, -1, (heads, -1)).transpose(1, 2)


BARE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "self": ({"d_query": 6}, (6,)),
    "self, heads": ({"d_query": 6, "num_heads": 3}, (6,)),
    "self, causal": ({"d_query": 6, "num_heads": 2, "causal": True}, (6,)),
    "cross": ({"d_query": 4, "cross": True}, (4, 4)),
    "cross, d_v of its own": (
        {"d_query": 4, "d_value": 7, "cross": True, "separate_value": True},
        (4, 4, 7),
    ),
    "cross, heads with d_v of their own": (
        {"d_query": 6, "d_value": 10, "num_heads": 2, "cross": True, "separate_value": True, "scale": 0.3},
        (6, 6, 10),
    ),
}


@PATHS
@pytest.mark.parametrize(("options", "widths"), BARE.values(), ids=BARE)
def test_no_projections_are_scaled_dot_product_attention(
    options: dict[str, Any], widths: tuple[int, ...], return_weights: bool
) -> None:
    module = separate(**options, projections="none", out_proj=False)
    assert not list(module.parameters())
    lengths = (5, 3, 3) if module.config.cross else (5,)
    inputs = [rows(i, 2, t, width) for i, (t, width) in enumerate(zip(lengths, widths, strict=False))]
    q, k, v = (cut(part, module.config.num_heads) for part in (*inputs, *inputs[-1:] * (3 - len(inputs))))
    config = module.config
    expected = scaled_dot_product_attention(q, k, v, is_causal=config.causal, scale=config.scale)
    context, _ = module(*inputs, return_weights=return_weights)
    assert_close(context, expected.transpose(1, 2).flatten(2))


@PATHS
def test_simple_self_attention_is_its_formula(return_weights: bool) -> None:
    query = np.random.default_rng(4).standard_normal((3, 6, 16))
    scores = query @ query.transpose(0, 2, 1)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    weights = powers / powers.sum(-1, keepdims=True)
    module = build_preset("simple-self-attention").double()
    context, found = module(torch.from_numpy(query), return_weights=return_weights)
    assert_close(context, torch.from_numpy(weights @ query))
    assert not return_weights or torch.allclose(found[:, 0], torch.from_numpy(weights), rtol=RTOL, atol=ATOL)


@PATHS
@pytest.mark.parametrize("projections", ["separate", "fused", "stacked"])
@pytest.mark.parametrize("kv_heads", [1, 2, 3], ids="{} key heads".format)
def test_grouped_heads_equal_repeated_key_and_value_heads(
    kv_heads: int, projections: str, return_weights: bool
) -> None:
    grouped = separate(d_query=5, num_heads=6, num_kv_heads=kv_heads, d_k=2, d_v=3, qkv_bias=True)
    state = dict(grouped.state_dict())
    for name in ("key.weight", "key.bias", "value.weight", "value.bias"):
        heads = state[f"projections.{name}"].unflatten(0, (kv_heads, -1))
        state[f"projections.{name}"] = heads.repeat_interleave(6 // kv_heads, dim=0).flatten(0, 1)
    full = loaded(replace(grouped.config, num_kv_heads=6), state)
    module = grouped if projections == "separate" else rearranged(grouped, projections)
    query, mask = rows(0, 2, 5, 5), rows(1, 2, 6, 5, 5) > -0.5
    options: dict[str, Any] = {"attention_mask": mask, "return_weights": return_weights}
    assert_close(module(query, **options), full(query, **options))


@PATHS
def test_concatenated_heads_are_as_many_modules_of_one_head(return_weights: bool) -> None:
    heads = 3
    module = separate(d_query=5, num_heads=heads, d_k=2, d_v=4, out_proj=False, qkv_bias=True)
    query, contexts, weights = rows(0, 2, 6, 5), [], []
    for head in range(heads):
        state = {name: whole.chunk(heads)[head] for name, whole in module.state_dict().items()}
        one = loaded(replace(module.config, num_heads=1, num_kv_heads=1, d_out=4), state)
        context, weight = one(query, return_weights=return_weights)
        contexts.append(context)
        weights.append(weight)
    expected = torch.cat(contexts, dim=-1), torch.cat(weights, dim=1) if return_weights else None
    assert_close(module(query, return_weights=return_weights), expected)


@PATHS
@pytest.mark.parametrize("projections", ["separate", "fused", "stacked"])
def test_a_causal_mask_before_the_softmax_equals_one_after_it_renormalised(
    projections: str, return_weights: bool
) -> None:
    full = separate(d_query=6, d_k=6, out_proj=False)
    query = rows(0, 2, 7, 6)
    _, weights = full(query, return_weights=True)  # (B, 1, T, T)
    masked = weights * torch.ones(7, 7).tril()
    renormalised = masked / masked.sum(-1, keepdim=True)
    values = query @ full.state_dict()["projections.value.weight"].T
    module = loaded(replace(full.config, causal=True), full.state_dict())
    module = module if projections == "separate" else rearranged(module, projections)
    context, found = module(query, return_weights=return_weights)
    assert_close(context, renormalised[:, 0] @ values)
    assert_close(found, renormalised if return_weights else None)


PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "three projections": ({"out_proj": False}, 60, 288),
    "three projections, stacked": ({"projections": "stacked", "out_proj": False}, 60, 288),
    "fused, with an output projection": ({"projections": "fused"}, 80, 384),
    "separate, with an output projection": ({}, 80, 384),
}


@pytest.mark.parametrize(("options", "parameters", "macs"), PUBLISHED.values(), ids=PUBLISHED)
def test_parameters_and_operations_are_the_published_ones(
    options: dict[str, Any], parameters: int, macs: int
) -> None:
    batch, length, width = 3, 2, 4
    config = AttentionConfig(d_query=width, qkv_bias=True, **options)
    module = MultiHeadAttention(config)
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    linear = batch * length * (config.flops_per_query + config.flops_per_key)
    products = batch * length * length * config.flops_per_pair
    assert (linear, products) == (2 * macs, 2 * batch * length * length * 2 * width)
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        module(torch.ones(batch, length, width), return_weights=True)
    assert counted.get_total_flops() == linear + products
