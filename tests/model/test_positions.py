"""Rules by position and the rotary embedding, beside papers and other projects; reference.py has the rest."""

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_serving.model.positions import RotaryEmbedding, alibi_slopes

LAYOUTS = pytest.mark.parametrize(
    "interleaved", [pytest.param(False, id="half-split"), pytest.param(True, id="interleaved")]
)
WIDTH, LONGEST = 8, 4096


def rows(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def positions(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, LONGEST, shape))


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
