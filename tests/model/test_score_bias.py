"""Rules on scores by position: compared with published values and with other projects' code."""

from collections.abc import Sequence

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from attention_serving.model.config import AttentionConfig, ConfigError
from attention_serving.model.score_bias import ScoreRules, alibi_slopes


def assert_equal(mask: torch.Tensor | None, expected: Sequence[Sequence[object]]) -> None:
    assert mask is not None
    assert torch.equal(mask, torch.tensor(expected, dtype=torch.bool))


def heads_of(config: AttentionConfig, length: int) -> torch.Tensor:
    """Queries or keys whose values do not matter: (1, H, T, d_k)."""
    return torch.zeros(1, config.num_heads, length, config.d_k)


def test_the_slopes_of_eight_heads_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 33, 112])
def test_slopes_equal_those_of_the_bloom_model(heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # (H, 1, 2), slope times key position
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), bias[:, 0, 1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_the_alibi_bias_falls_by_the_slope_with_each_row_of_distance(causal: bool) -> None:
    config = AttentionConfig(d_query=4, num_heads=2, causal=causal, alibi=True)
    q = heads_of(config, 3)
    bias = ScoreRules(config).bias(q, q)
    assert bias is not None
    expected = torch.tensor([[0.0, -1, -2], [-1, 0, -1], [-2, -1, 0]])
    torch.testing.assert_close(bias, torch.stack([expected / 16, expected / 256])[None])


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"cross": True}, "alibi=True: must be false with cross"),
        ({"rotary_theta": 1e4}, "alibi=True: must be false with rotary_theta"),
        ({"alibi": 1}, "alibi=1: must be true or false"),
    ],
    ids=["cross", "rotary", "not a boolean"],
)
def test_alibi_is_refused_where_distances_have_another_meaning(options: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        AttentionConfig(**{"d_query": 4, "alibi": True} | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (True, [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
        (False, [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]),
    ],
    ids=["causal", "bidirectional"],
)
def test_a_window_of_two_reaches_one_row_further(causal: bool, expected: list[list[int]]) -> None:
    config = AttentionConfig(d_query=4, causal=causal, window=2)
    q = heads_of(config, 4)
    assert_equal(ScoreRules(config).mask(None, q, q), expected)


def test_a_causal_window_equals_that_of_the_mistral_model() -> None:
    length, window = 11, 4
    config = AttentionConfig(d_query=4, causal=True, window=window)
    overlay = sliding_window_causal_mask_function(window)
    rows = torch.arange(length)
    expected = [[bool(overlay(0, 0, row, column)) for column in rows] for row in rows]
    q = heads_of(config, length)
    assert_equal(ScoreRules(config).mask(None, q, q), expected)


def test_a_window_longer_than_the_sequence_changes_nothing() -> None:
    config = AttentionConfig(d_query=4, window=9)
    q = heads_of(config, 9)
    assert_equal(ScoreRules(config).mask(None, q, q), [[True] * 9] * 9)


@pytest.mark.parametrize("window", [-1, 2.0, True], ids=str)
def test_a_window_is_a_positive_number_of_rows(window: object) -> None:
    with pytest.raises(ConfigError, match=f"window={window}: must be a positive integer"):
        AttentionConfig(d_query=4, window=window)  # type: ignore[arg-type]


def test_a_window_between_two_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="window=3: must be 0 with cross"):
        AttentionConfig(d_query=4, cross=True, window=3)
