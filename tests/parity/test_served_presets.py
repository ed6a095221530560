"""Every preset at its own width, and every worked example, through a live server."""

import numpy as np
import pytest
from attention_client import AttentionClient
from numpy.typing import NDArray

from attention_serving.model.presets import PRESETS, build_preset
from tests.support.eager import Array, assert_parity, attend
from tests.support.tables import GOLDEN_TABLES, GoldenTable

pytestmark = pytest.mark.thorough
VECTOR_PRESETS = sorted(name for name in PRESETS if name != "sentence-self-attention")


def random_inputs(name: str, lengths: list[int]) -> list[list[Array]]:
    """Returns one sequence per length for each input of a preset; key lengths differ from query lengths."""
    config = PRESETS[name].config
    rng = np.random.default_rng(0)
    key_lengths = [length % 511 + 3 for length in lengths]
    inputs = [[rng.standard_normal((t, config.d_query), dtype=np.float32) for t in lengths]]
    if config.cross:
        inputs.append([rng.standard_normal((t, config.d_key), dtype=np.float32) for t in key_lengths])
    if config.separate_value:
        inputs.append([rng.standard_normal((t, config.d_value), dtype=np.float32) for t in key_lengths])
    return inputs


@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_lengths_never_seen_at_export(presets_client: AttentionClient, name: str) -> None:
    module, inputs = build_preset(name), random_inputs(name, [7, 1, 128, 7, 2, 513, 6, 5])
    eager = [attend(module, *one)[0] for one in zip(*inputs, strict=True)]
    assert_parity(presets_client.attend(name, *inputs).context_vectors, eager)
    for index in (1, 5):
        alone = presets_client.attend(name, *(own[index] for own in inputs))
        assert_parity(alone.context_vectors, eager[index])


@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_weights_under_masks_of_heads(presets_client: AttentionClient, name: str) -> None:
    module, inputs, rng = build_preset(name), random_inputs(name, [7, 2, 33]), np.random.default_rng(1)
    sequences = list(zip(*inputs, strict=True))
    shapes = [(module.config.num_heads, len(own[0]), len(own[min(1, len(own) - 1)])) for own in sequences]
    masks = [rng.random(shape) < 0.6 for shape in shapes]
    masks[0][...] = False  # rows that may attend to no key
    result = presets_client.attend(name, *inputs, mask=masks, return_weights=True)
    pairs = [attend(module, *own, mask=mask) for own, mask in zip(sequences, masks, strict=True)]
    assert result.attention_weights is not None
    assert_parity(result.context_vectors, [context for context, _ in pairs])
    assert_parity(result.attention_weights, [weights for _, weights in pairs])
    assert not result.attention_weights[0].any()


def table_of(name: str, context: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the part of the outputs that an example prints; its weights are those of its only head."""
    values = context if name.startswith("context_vectors") else weights[..., 0, :, :]
    return values[1] if name.endswith("_row_1") else values


@pytest.mark.parametrize("table", GOLDEN_TABLES, ids=lambda table: table.id)
def test_served_values_are_the_printed_ones(presets_client: AttentionClient, table: GoldenTable) -> None:
    result = presets_client.attend(table.model, *table.inputs, return_weights=True)
    assert result.attention_weights is not None
    for name, expected in table.expected.items():
        found = table_of(name, result.context_vectors, result.attention_weights)
        np.testing.assert_allclose(found, expected, rtol=0, atol=table.tolerance, err_msg=name)
