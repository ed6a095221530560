"""Rules by position and the rotary embedding, beside papers and other projects; reference.py has the rest."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.config import AttentionConfig
from attention_serving.model.positions import RotaryEmbedding, ScoreRules, alibi_slopes
from tests.model.reference import rotated

LAYOUTS = pytest.mark.parametrize(
    "interleaved", [pytest.param(False, id="half-split"), pytest.param(True, id="interleaved")]
)
WIDTH, LONGEST = 8, 4096
# Angles are float32: a frequency's rounding counts once for each position, the cosine's own once more.
ROUNDING = 2.0**-22


def rows(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def positions(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, LONGEST, shape))


@LAYOUTS
@pytest.mark.parametrize("theta", [7.0, 500_000.0], ids="theta {:g}".format)
def test_a_pair_is_turned_as_a_complex_number_is(theta: float, interleaved: bool) -> None:
    heads, at = rows(2, 3, 5, WIDTH), positions(2, 5)
    found = RotaryEmbedding(WIDTH, theta=theta, interleaved=interleaved)(heads, at)
    expected = rotated(heads.numpy(), at.numpy()[:, None], theta, interleaved=interleaved)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LONGEST * ROUNDING)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_frequencies_stay_float32_in_half_precision(dtype: torch.dtype, interleaved: bool) -> None:
    """A frequency rounded to half precision would be off by half a turn and more at such positions."""
    rotary = RotaryEmbedding(WIDTH, theta=100.0, interleaved=interleaved).to(dtype)
    heads, at = rows(2, 3, 50, WIDTH).to(dtype), positions(2, 50)
    found = rotary(heads, at)
    assert found.dtype == dtype
    exact = RotaryEmbedding(WIDTH, theta=100.0, interleaved=interleaved)(heads.double(), at)
    # Cosine, sine, two products and their sum, each rounded once, of numbers below 4.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=5 * 4 * torch.finfo(dtype).eps)


def test_the_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 12, 20, 112])
def test_slopes_equal_those_of_the_bloom_model(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor  # noqa: PLC0415 - slow to import

    bias = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # (H, 1, 2), slope times key position
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bias[:, 0, 1])


@pytest.mark.thorough
def test_a_causal_window_equals_that_of_the_mistral_model() -> None:
    from transformers.masking_utils import sliding_window_causal_mask_function  # noqa: PLC0415

    length, window = 11, 4
    overlay = sliding_window_causal_mask_function(window)
    at = torch.arange(length)
    expected = [[bool(overlay(0, 0, row, column)) for column in at] for row in at]
    rules = ScoreRules(AttentionConfig(d_query=4, causal=True, window=window))
    rows = torch.zeros(1, 1, length, 4)
    assert torch.equal(rules.mask(None, rows, rows), torch.tensor(expected))  # type: ignore[arg-type]


def test_only_causality_needs_no_mask_beside_the_kernels_flag() -> None:
    causal = AttentionConfig(d_query=4, causal=True)
    assert ScoreRules(causal).only_causal
    for other in ({"causal": False}, {"window": 2}, {"alibi": True}):
        options = {"d_query": 4, "causal": True} | other
        assert not ScoreRules(AttentionConfig(**options)).only_causal  # type: ignore[arg-type]
