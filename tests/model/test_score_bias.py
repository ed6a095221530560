"""Rules on scores by position, beside the paper and other projects' code."""

import pytest
import torch

from attention_serving.model.config import AttentionConfig
from attention_serving.model.positions import ScoreRules, alibi_slopes


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
