"""Served models equal PyTorch's own attention over lengths and masks that hypothesis chooses."""

import numpy as np
import pytest
import torch
from attention_client import AttentionClient
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.model.config import AttentionConfig
from tests.support.eager import Array, assert_parity
from tests.support.references import REFERENCES

# (Tq, Tk) of each sequence; self-attention reads the first.
LENGTHS = st.lists(st.tuples(st.integers(1, 17), st.integers(1, 17)), min_size=1, max_size=5)


def random_sequence(
    rng: np.random.Generator, config: AttentionConfig, lengths: tuple[int, int]
) -> list[Array]:
    """The inputs of one sequence."""
    query_length, key_length = lengths
    shapes = [(query_length, config.d_query)]
    if config.cross:
        shapes.append((key_length, config.d_key))
    if config.separate_value:
        shapes.append((key_length, config.d_value))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def random_mask(rng: np.random.Generator, config: AttentionConfig, sequence: list[Array]) -> Array:
    """(H, Tq, Tk); some rows may attend to no key."""
    key = sequence[1] if config.cross else sequence[0]
    return rng.random((config.num_heads, len(sequence[0]), len(key))) < 0.7


@settings(max_examples=30)
@given(lengths=LENGTHS, masked=st.booleans(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", REFERENCES)
def test_equals_pytorch(
    client: AttentionClient, name: str, lengths: list[tuple[int, int]], masked: bool, seed: int
) -> None:
    reference, rng = REFERENCES[name], np.random.default_rng(seed)
    config = reference.config
    sequences = [random_sequence(rng, config, pair) for pair in lengths]
    masks = [random_mask(rng, config, sequence) for sequence in sequences]
    inputs = [list(arrays) for arrays in zip(*sequences, strict=True)]
    found = client.attend(name, *inputs, mask=masks if masked else None).context_vectors
    for context, sequence, mask in zip(found, sequences, masks, strict=True):
        allowed = torch.from_numpy(mask) if masked else torch.ones(mask.shape, dtype=torch.bool)
        allowed = allowed.tril() if config.causal else allowed
        rows = allowed.any(dim=-1).all(dim=0)  # PyTorch's module answers NaN in the others
        expected = reference.attend([torch.from_numpy(array) for array in sequence], allowed)
        assert_parity(context[rows.numpy()], expected[rows].numpy())
