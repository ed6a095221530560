"""A non-attention module, a whole transformer encoder, through a server over both protocols."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_client import AttentionClient, InvalidArgumentError

from scripts.local_server import ServerProcess
from tests.support import triton
from tests.support.eager import Array, assert_parity
from tests.support.repository import ENCODER, encoder

pytestmark = pytest.mark.thorough


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def encoded(batch: Array) -> Array:
    """The output of eager PyTorch for (B, T, 32)."""
    with torch.inference_mode():
        found: Array = encoder()(torch.from_numpy(batch)).numpy()
    return found


def test_an_encoder_over_both_protocols(
    presets_server: ServerProcess, presets_client: AttentionClient
) -> None:
    sequences = [normal(length, 32, seed=seed) for seed, length in enumerate((3, 513, 3, 1, 40, 7))]
    found = presets_client.attend(ENCODER, sequences)
    assert_parity(found.context_vectors, [encoded(rows[None])[0] for rows in sequences])
    assert found.attention_weights is None
    batch, lengths = normal(3, 9, 32), (4, 9, 1)
    expected = np.zeros((3, 9, 32), np.float32)
    for index, length in enumerate(lengths):
        expected[index, :length] = encoded(batch[index : index + 1, :length])[0]
    padded = presets_client.attend(ENCODER, batch, lengths=lengths)
    assert_parity(padded.context_vectors, expected)
    for tensors, eager in (({"key_lengths": np.array(lengths)}, expected), ({}, encoded(batch))):
        named = triton.infer(presets_server.target, ENCODER, {"src": batch} | tensors, ["context_vectors"])
        assert_parity(named["context_vectors"], eager)


ROWS = normal(2, 3, 32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"mask": np.ones((2, 3, 3), bool)}, "model 'encoder' does not take a mask"),
    "return_weights": ({"return_weights": True}, "does not have attention weights"),
    "key": ({"key": ROWS}, "model 'encoder' takes src"),
    "positions": ({"positions": np.zeros((2, 3), np.int64)}, "model 'encoder' takes src"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_inputs_and_options_that_it_does_not_take_are_refused(
    presets_client: AttentionClient, field: str
) -> None:
    options, message = REFUSED[field]
    with pytest.raises(InvalidArgumentError, match=message) as refusal:
        presets_client.attend(ENCODER, ROWS, **options)
    assert refusal.value.field == field


def test_the_typed_api_describes_it(presets_client: AttentionClient) -> None:
    info = presets_client.model(ENCODER)
    tensors = [(t.name, t.data_type, t.axes, t.optional) for t in (*info.inputs, *info.outputs)]
    axes = ("batch", "sequence", 32)
    assert tensors == [("src", "float32", axes, False), ("context_vectors", "float32", axes, False)]
    assert (info.state, info.description, info.num_heads) == ("ready", "TransformerEncoder", None)
    assert info.parameters == sum(parameter.numel() for parameter in encoder().parameters())
