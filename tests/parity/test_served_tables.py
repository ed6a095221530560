"""Served models reproduce every printed decimal of the published worked examples."""

import numpy as np
import pytest
from attention_client import AttentionClient
from numpy.typing import NDArray

from tests.support.tables import GOLDEN_TABLES, TEXT, GoldenTable


def table_of(name: str, context: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the part of the outputs that an example prints; its weights are those of its only head."""
    values = context if name.startswith("context_vectors") else weights[..., 0, :, :]
    return values[1] if name.endswith("_row_1") else values


@pytest.mark.parametrize("table", GOLDEN_TABLES, ids=lambda table: table.id)
def test_served_values_are_the_printed_ones(client: AttentionClient, table: GoldenTable) -> None:
    result = client.attend(table.model, *table.inputs, return_weights=True)
    assert result.attention_weights is not None
    assert table.expected
    for name, expected in table.expected.items():
        found = table_of(name, result.context_vectors, result.attention_weights)
        np.testing.assert_allclose(found, expected, rtol=0, atol=table.tolerance, err_msg=name)


def test_the_sentence_becomes_the_printed_token_ids(client: AttentionClient) -> None:
    by_text = client.attend_text("sentence-self-attention", TEXT["sentence"])
    by_ids = client.attend_tokens("sentence-self-attention", np.array(TEXT["token_ids"]))
    np.testing.assert_array_equal(by_text.context_vectors, by_ids.context_vectors)
