"""Presets at their own width through a live server."""

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.presets import PRESETS, build_preset
from tests.support.eager import Array, assert_parity, attend
from tests.support.repository import PRESETS_SERVED

pytestmark = pytest.mark.thorough
LENGTHS = [7, 1, 128, 7, 2, 513, 6, 5]
EACH = pytest.mark.parametrize("name", ["multi-head-768x12", *PRESETS_SERVED])


def queries(name: str, lengths: list[int]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, PRESETS[name].config.d_query), np.float32) for length in lengths]


@EACH
def test_lengths_never_seen_at_export(presets_client: AttentionClient, name: str) -> None:
    module, given = build_preset(name), queries(name, LENGTHS)
    eager = [attend(module, query)[0] for query in given]
    assert_parity(presets_client.attend(name, given).context_vectors, eager)
    for index in (1, 5):
        assert_parity(presets_client.attend(name, given[index]).context_vectors, eager[index])


@EACH
def test_weights_under_masks_of_heads(presets_client: AttentionClient, name: str) -> None:
    module, given, rng = build_preset(name), queries(name, [7, 2, 33]), np.random.default_rng(1)
    masks = [rng.random((module.config.num_heads, len(query), len(query))) < 0.6 for query in given]
    masks[0][...] = False  # rows that may attend to no key
    result = presets_client.attend(name, given, mask=masks, return_weights=True)
    pairs = [attend(module, query, mask=mask) for query, mask in zip(given, masks, strict=True)]
    assert result.attention_weights is not None
    assert_parity(result.context_vectors, [context for context, _ in pairs])
    assert_parity(result.attention_weights, [weights for _, weights in pairs])
    assert not result.attention_weights[0].any()
