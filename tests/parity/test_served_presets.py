"""Every preset through a live server equals eager PyTorch, over lengths never seen at export."""

from functools import cache

import numpy as np
import pytest
from attention_client import AttentionClient

from attention_serving.model.presets import PRESETS, SENTENCE, build_preset
from attention_serving.model.text import TextAttention
from tests.support.eager import Array, assert_parity, attend

LENGTHS = (1, 2, 7, 128, 513)
VECTOR_PRESETS = sorted(name for name in PRESETS if name != "sentence-self-attention")
build = cache(build_preset)


def random_inputs(name: str, lengths: list[int], seed: int = 0) -> list[list[Array]]:
    """Returns one sequence per length for each input of a preset; key lengths differ from query lengths."""
    config = build(name).config
    rng = np.random.default_rng(seed)
    key_lengths = [length % 511 + 3 for length in lengths]
    inputs = [[rng.standard_normal((t, config.d_query), dtype=np.float32) for t in lengths]]
    if config.cross:
        inputs.append([rng.standard_normal((t, config.d_key), dtype=np.float32) for t in key_lengths])
    if config.separate_value:
        inputs.append([rng.standard_normal((t, config.d_value), dtype=np.float32) for t in key_lengths])
    return inputs


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_one_sequence(client: AttentionClient, name: str, length: int) -> None:
    inputs = [sequences[0] for sequences in random_inputs(name, [length])]
    result = client.attend(name, *inputs, return_weights=length <= 128)
    context, weights = attend(build(name), *inputs)
    assert_parity(result.context_vectors, context)
    if length <= 128:
        assert result.attention_weights is not None
        assert_parity(result.attention_weights, weights)


@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_mixed_batch(client: AttentionClient, name: str) -> None:
    inputs = random_inputs(name, [7, 1, 128, 7, 2, 513, 6, 5])
    result = client.attend(name, *inputs)
    assert_parity(result.context_vectors, [attend(build(name), *one)[0] for one in zip(*inputs, strict=True)])


@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_a_rectangular_batch_gives_rectangular_results(client: AttentionClient, name: str) -> None:
    inputs = [np.stack(sequences) for sequences in random_inputs(name, [7, 7, 7])]
    result = client.attend(name, *inputs, return_weights=True)
    pairs = [attend(build(name), *one) for one in zip(*inputs, strict=True)]
    assert_parity(result.context_vectors, np.stack([context for context, _ in pairs]))
    assert result.attention_weights is not None
    assert_parity(result.attention_weights, np.stack([weights for _, weights in pairs]))


@pytest.mark.parametrize("span", ["keys", "pairs", "heads"])
@pytest.mark.parametrize("name", VECTOR_PRESETS)
def test_masks_of_every_span(client: AttentionClient, name: str, span: str) -> None:
    inputs = random_inputs(name, [7, 2, 33])
    rng = np.random.default_rng(1)
    masks = []
    for sequences in zip(*inputs, strict=True):
        query_length, key_length = len(sequences[0]), len(sequences[min(1, len(sequences) - 1)])
        heads = build(name).config.num_heads
        full = {"keys": (), "pairs": (query_length,), "heads": (heads, query_length)}[span]
        masks.append(rng.random((*full, key_length)) < 0.6)
    masks[0][...] = False  # rows that may attend to no key
    result = client.attend(name, *inputs, mask=masks, return_weights=True)
    without_weights = client.attend(name, *inputs, mask=masks)
    pairs = [
        attend(
            build(name), *one, mask=mask.reshape(-1, *mask.shape[-2:]) if mask.ndim > 1 else mask[None, None]
        )
        for *one, mask in zip(*inputs, masks, strict=True)
    ]
    assert result.attention_weights is not None
    assert_parity(result.context_vectors, [context for context, _ in pairs])
    assert_parity(result.attention_weights, [weights for _, weights in pairs])
    assert_parity(without_weights.context_vectors, [context for context, _ in pairs])
    assert not result.attention_weights[0].any()


def test_padding_beyond_the_lengths_is_ignored(client: AttentionClient) -> None:
    (sequences,) = random_inputs("multi-head-768x12", [9, 4, 1])
    padded = np.full((3, 9, 768), np.nan, np.float32)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    result = client.attend("multi-head-768x12", padded, lengths=[9, 4, 1])
    for row, sequence in zip(result.context_vectors, sequences, strict=True):
        assert_parity(row[: len(sequence)], attend(build("multi-head-768x12"), sequence)[0])
        assert not row[len(sequence) :].any()


def test_text_and_token_ids(client: AttentionClient) -> None:
    module = build("sentence-self-attention")
    assert isinstance(module, TextAttention)
    texts = [SENTENCE, "eat", "dessert first, dessert first"]
    ids = [np.array(module.tokenizer.encode(text).ids) for text in texts]
    eager = [attend(module, sequence)[0] for sequence in ids]
    assert_parity(client.attend_text("sentence-self-attention", texts).context_vectors, eager)
    assert_parity(client.attend_tokens("sentence-self-attention", ids).context_vectors, eager)
    assert_parity(client.attend_text("sentence-self-attention", SENTENCE).context_vectors, eager[0])


@pytest.mark.parametrize("name", ["alibi-768x12", "sliding-window-768x12"])
def test_nan_stays_in_its_own_sequence(client: AttentionClient, name: str) -> None:
    (sequences,) = random_inputs(name, [7, 7, 7, 7])
    sequences[1][3, 5] = np.nan
    result = client.attend(name, sequences)
    assert_parity(result.context_vectors, [attend(build(name), one)[0] for one in sequences])
    assert np.isnan(result.context_vectors[1]).all()
    assert not any(np.isnan(result.context_vectors[index]).any() for index in (0, 2, 3))
