"""Rotary position embedding: turns at far positions, and precision. tests/model/reference.py has the rest."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.positions import RotaryEmbedding
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
