"""The rotary embedding in half precision, and the slopes of ALiBi's paper; reference.py has the rest."""

import numpy as np
import pytest
import torch

from attention_serving.model.positions import RotaryEmbedding, alibi_slopes


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_frequencies_stay_float32_in_half_precision(dtype: torch.dtype, interleaved: bool) -> None:
    """A frequency rounded to half precision would be off by half a turn and more at such positions."""
    rng, rotary = np.random.default_rng(0), RotaryEmbedding(8, theta=100.0, interleaved=interleaved)
    heads = torch.from_numpy(rng.standard_normal((2, 3, 50, 8))).to(dtype)
    at = torch.from_numpy(rng.integers(0, 4096, (2, 50)))
    found, exact = rotary.to(dtype)(heads, at), rotary(heads.double(), at)
    assert found.dtype == dtype
    # Cosine, sine, two products and their sum, each rounded once, of numbers below 4.
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=5 * 4 * torch.finfo(dtype).eps)


def test_the_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
