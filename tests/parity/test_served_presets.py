"""Presets at their own width through a live server."""

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.presets import PRESETS, build_preset
from tests.support.eager import Array, assert_parity, attend
from tests.support.repository import PRESETS_SERVED

pytestmark = pytest.mark.thorough
LENGTHS = [7, 1, 128, 7, 2, 513, 6, 5]


def queries(name: str, lengths: list[int]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((length, PRESETS[name].config.d_query), np.float32) for length in lengths]


@pytest.mark.parametrize("name", ["multi-head-768x12", *PRESETS_SERVED])
def test_lengths_never_seen_at_export(presets_client: AttentionClient, name: str) -> None:
    module, given = build_preset(name), queries(name, LENGTHS)
    eager = [attend(module, query)[0] for query in given]
    assert_parity(presets_client.attend(name, given).context_vectors, eager)
    for index in (1, 5):
        assert_parity(presets_client.attend(name, given[index]).context_vectors, eager[index])
