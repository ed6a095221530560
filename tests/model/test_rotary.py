"""Rotary position embedding: turns, positions, and the configurations that cannot have it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig, ConfigError
from attention_serving.model.rotary import RotaryEmbedding
from tests.model.reference import Array, random_module

LAYOUTS = pytest.mark.parametrize(
    "interleaved", [pytest.param(False, id="half-split"), pytest.param(True, id="interleaved")]
)
THETAS = pytest.mark.parametrize("theta", [7.0, 10_000.0, 500_000.0], ids="theta {:g}".format)
WIDTH, LONGEST = 8, 4096
# Angles are float32: a frequency's rounding counts once for each position, the cosine's own once more.
ROUNDING = 2.0**-22


def embedding(*, theta: float = 100.0, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding(WIDTH, theta=theta, interleaved=interleaved)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def positions(seed: int, *shape: int, below: int = 100) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, below, shape))


def assert_close(one: Any, other: Any, *, atol: float) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def pairs(rows: Array, *, interleaved: bool) -> Array:
    """(..., width) as (..., width / 2) complex numbers."""
    if interleaved:
        return np.ascontiguousarray(rows).view(np.complex128)
    half = rows.shape[-1] // 2
    found: Array = rows[..., :half] + 1j * rows[..., half:]
    return found


@LAYOUTS
@THETAS
def test_a_pair_is_turned_as_a_complex_number_is(theta: float, interleaved: bool) -> None:
    below = 500
    heads, at = normal(0, 2, 3, 5, WIDTH), positions(1, 2, 5, below=below)
    angles = at.numpy()[:, None, :, None] * theta ** (-2.0 * np.arange(WIDTH // 2) / WIDTH)
    expected = pairs(heads.numpy(), interleaved=interleaved) * np.exp(1j * angles)
    found = pairs(embedding(theta=theta, interleaved=interleaved)(heads, at).numpy(), interleaved=interleaved)
    np.testing.assert_allclose(found, expected, rtol=0, atol=below * ROUNDING)


@LAYOUTS
def test_the_norm_is_preserved(interleaved: bool) -> None:
    heads = normal(0, 2, 3, 5, WIDTH)
    turned = embedding(interleaved=interleaved)(heads, positions(1, 2, 5, below=LONGEST))
    assert not torch.allclose(turned, heads)
    assert_close(turned.norm(dim=-1), heads.norm(dim=-1), atol=4 * ROUNDING)


@LAYOUTS
def test_position_0_is_the_identity(interleaved: bool) -> None:
    heads = normal(0, 2, 3, 5, WIDTH)
    at = torch.zeros(2, 5, dtype=torch.int64)
    assert torch.equal(embedding(interleaved=interleaved)(heads, at), heads)


@LAYOUTS
@pytest.mark.parametrize("shift", [1, 13, 1000])
def test_scores_depend_on_the_difference_of_positions_only(shift: int, interleaved: bool) -> None:
    rotary = embedding(interleaved=interleaved)
    query, key, at = normal(0, 2, 3, 5, WIDTH), normal(1, 2, 3, 5, WIDTH), positions(2, 2, 5)

    def scores(query_shift: int, key_shift: int) -> Tensor:
        turned: Tensor = rotary(key, at + key_shift)
        products: Tensor = rotary(query, at + query_shift) @ turned.transpose(2, 3)
        return products

    assert_close(scores(shift, shift), scores(0, 0), atol=10 * (100 + shift) * ROUNDING)
    assert (scores(shift, 0) - scores(0, 0)).abs().max() > 0.1


EVENS_FIRST = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]


@THETAS
def test_interleaved_is_half_split_of_a_permuted_width(theta: float) -> None:
    heads, at = normal(0, 2, 3, 5, WIDTH), positions(1, 2, 5, below=LONGEST)
    neighbours = embedding(theta=theta, interleaved=True)(heads, at)
    halves = embedding(theta=theta, interleaved=False)(heads[..., EVENS_FIRST], at)
    assert_close(neighbours[..., EVENS_FIRST], halves, atol=1e-14)
    assert not torch.allclose(neighbours, halves)


def attention(**options: Any) -> MultiHeadAttention:
    config = AttentionConfig(
        **{"d_query": 2 * WIDTH, "num_heads": 2, "causal": True, "rotary_theta": 100.0} | options
    )
    return random_module(config, np.random.default_rng(6))


PROJECTIONS = pytest.mark.parametrize("kv_heads", [1, 2], ids=["grouped", "as many"])


@PROJECTIONS
def test_interleaved_attention_is_half_split_attention_with_permuted_weights(kv_heads: int) -> None:
    module = attention(num_kv_heads=kv_heads, rotary_interleaved=True)
    state = dict(module.state_dict())
    for name, heads in (("query", 2), ("key", kv_heads)):
        weight = state[f"projections.{name}.weight"].unflatten(0, (heads, WIDTH))
        state[f"projections.{name}.weight"] = weight[:, EVENS_FIRST].flatten(0, 1)
    other = MultiHeadAttention(replace(module.config, rotary_interleaved=False)).double()
    other.load_state_dict(state)
    query = normal(0, 2, 5, 2 * WIDTH)
    assert_close(other(query, return_weights=True), module(query, return_weights=True), atol=1e-12)


PATHS = pytest.mark.parametrize(
    "return_weights", [pytest.param(False, id="context only"), pytest.param(True, id="with weights")]
)


@PATHS
@LAYOUTS
def test_positions_that_are_left_out_count_from_0(interleaved: bool, return_weights: bool) -> None:
    module, query = attention(rotary_interleaved=interleaved), normal(0, 3, 5, 2 * WIDTH)
    left_out = module(query, return_weights=return_weights)
    counted = torch.arange(5).expand(3, 5)
    given = module(query, positions=counted, return_weights=return_weights)
    assert_close(given, left_out, atol=1e-12)
    backwards = module(query, positions=counted.flip(1), return_weights=return_weights)
    assert not torch.allclose(backwards[0], left_out[0], atol=0.1)


@PATHS
def test_positions_apply_to_their_own_sequence(return_weights: bool) -> None:
    module, query, at = attention(), normal(0, 3, 5, 2 * WIDTH), positions(1, 3, 5)
    context, _ = module(query, positions=at, return_weights=return_weights)
    for index in range(3):
        one = slice(index, index + 1)
        alone, _ = module(query[one], positions=at[one], return_weights=return_weights)
        assert_close(context[one], alone, atol=1e-12)


def test_values_are_not_turned() -> None:
    """A row that attends to itself alone has its own value as context, whatever its position."""
    module, query = attention(out_proj=False), normal(0, 1, 1, 2 * WIDTH)
    values = query @ module.state_dict()["projections.value.weight"].T
    for position in (0, 5, 90):
        context, _ = module(query, positions=torch.tensor([[position]]))
        assert_close(context, values, atol=1e-12)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_frequencies_stay_float32_in_half_precision(dtype: torch.dtype, interleaved: bool) -> None:
    """A frequency rounded to half precision would be off by half a turn and more at such positions."""
    module = attention(rotary_interleaved=interleaved).to(dtype)
    assert module.rotary is not None
    heads, at = normal(0, 2, 3, 50, WIDTH).to(dtype), positions(1, 2, 50, below=LONGEST)
    found = module.rotary(heads, at)
    assert found.dtype == dtype
    exact = embedding(interleaved=interleaved)(heads.double(), at)
    # Cosine, sine, two products and their sum, each rounded once, of numbers below 4.
    assert_close(found.double(), exact, atol=5 * 4 * torch.finfo(dtype).eps)
    exponents = torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH
    assert module.rotary.frequencies == (1.0 / 100.0**exponents).tolist()


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "odd width": ({"d_query": 6, "d_k": 3}, "d_k", "must be even"),
    "odd width of heads": ({"d_query": 6, "num_heads": 2}, "d_k", "must be even"),
    "cross": ({"d_query": 4, "cross": True}, "rotary_theta", "must be 0 with cross"),
    "negative": ({"d_query": 4, "rotary_theta": -1.0}, "rotary_theta", "positive finite"),
    "infinite": ({"d_query": 4, "rotary_theta": float("inf")}, "rotary_theta", "positive finite"),
    "interleaved without a frequency": (
        {"d_query": 4, "rotary_theta": 0.0, "rotary_interleaved": True},
        "rotary_interleaved",
        "needs rotary_theta",
    ),
}


@pytest.mark.parametrize(("options", "field", "rule"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_fit_a_rotary_embedding_are_refused(
    options: dict[str, Any], field: str, rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule) as refusal:
        AttentionConfig(**{"rotary_theta": 100.0} | options)
    assert refusal.value.field == field
