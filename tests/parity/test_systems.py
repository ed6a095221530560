"""Every attention system on every path: eager, attention.v1, Open Inference Protocol."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_client import AttentionClient
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_serving.model.text import TextAttention
from scripts.local_server import ServerProcess
from tests.parity import paths
from tests.support.eager import Array, assert_parity, attend
from tests.support.systems import SYSTEMS, build

EACH = pytest.mark.parametrize("name", SYSTEMS.values(), ids=SYSTEMS)
BATCH, QUERY_LENGTH, KEY_LENGTH = 3, 9, 14
LENGTHS = st.lists(st.tuples(st.integers(1, 17), st.integers(1, 17)), min_size=1, max_size=5)


def sequences(name: str, rng: np.random.Generator, lengths: list[tuple[int, int]]) -> list[list[Array]]:
    """For each input of a system, a sequence for each pair of a query's and a key's length."""
    module, config = build(name), build(name).config
    queries, keys = zip(*lengths, strict=True)
    if isinstance(module, TextAttention):
        return [[rng.integers(0, module.embedding.num_embeddings, length) for length in queries]]
    sizes = [(queries, config.d_query), (keys, config.d_key), (keys, config.d_value)]
    count = 1 + config.cross + config.separate_value
    return [
        [rng.standard_normal((length, width), np.float32) for length in own] for own, width in sizes[:count]
    ]


def random_case(name: str, *, masked: bool) -> paths.Case:
    """Returns named tensors for one system; if it takes positions, they do not count from 0."""
    rng, config = np.random.default_rng(11), build(name).config
    names = ("token_ids",) if isinstance(build(name), TextAttention) else ("query", "key", "value")
    inputs = sequences(name, rng, [(QUERY_LENGTH, KEY_LENGTH)] * BATCH)
    case: paths.Case = {key: np.stack(own) for key, own in zip(names, inputs, strict=False)}
    if config.rotary_theta:
        case["positions"] = rng.integers(0, 500, (BATCH, QUERY_LENGTH))
    key_length = KEY_LENGTH if config.cross else QUERY_LENGTH
    mask = rng.random((BATCH, config.num_heads, QUERY_LENGTH, key_length)) < 0.6
    mask[0, :, 2] = False
    return case | {"attention_mask": mask} if masked else case


@pytest.mark.parametrize("masked", [False, True], ids=["every key", "masked"])
@pytest.mark.parametrize("path", paths.SERVED.values(), ids=paths.SERVED)
@EACH
def test_served_results_equal_eager(
    server: ServerProcess, client: AttentionClient, name: str, path: paths.Path, masked: bool
) -> None:
    case = random_case(name, masked=masked)
    found, expected = path(client, server.target, name, case), paths.eager(build(name), case)
    for output in expected:
        assert_parity(found[output], expected[output])
    if masked:
        assert not found["attention_weights"][0, :, 2].any()


# How FP16 and BF16 on the wire differ from float32: one unit in the last place, relative.
HALVES = {"fp16": (torch.float16, 2**-10), "bf16": (torch.bfloat16, 2**-7)}


@pytest.mark.parametrize("wire", HALVES)
def test_halves_on_the_wire_are_what_eager_computes_from_rounded_numbers(
    server: ServerProcess, wire: Any
) -> None:
    name, (dtype, last_place) = "multi-head-64x4", HALVES[wire]
    query = np.random.default_rng(0).standard_normal((7, 64), np.float32)
    eager = attend(build(name), torch.from_numpy(query).to(dtype).float().numpy())
    with AttentionClient(server.target, wire=wire) as client:
        found = client.attend(name, query, return_weights=True)
        (streamed,) = client.attend_stream(name, [query])
    np.testing.assert_array_equal(streamed.context_vectors, found.context_vectors)
    for half, expected in zip((found.context_vectors, found.attention_weights), eager, strict=True):
        assert half is not None
        np.testing.assert_array_equal(half, torch.from_numpy(half).to(dtype).float().numpy())
        np.testing.assert_allclose(half, expected.reshape(half.shape), rtol=last_place, atol=1e-5)


@settings(max_examples=10)
@given(lengths=LENGTHS, masked=st.booleans(), seed=st.integers(0, 2**32))
@EACH
def test_any_lengths_and_masks_equal_eager(
    client: AttentionClient, name: str, lengths: list[tuple[int, int]], masked: bool, seed: int
) -> None:
    """The sequences of a request do not change each other's results, whatever the server runs together."""
    rng, module = np.random.default_rng(seed), build(name)
    inputs = sequences(name, rng, lengths)
    alone = list(zip(*inputs, strict=True))
    shapes = [(module.config.num_heads, len(own[0]), len(own[min(1, len(own) - 1)])) for own in alone]
    masks = [rng.random(shape) < 0.7 for shape in shapes]
    ask = client.attend_tokens if isinstance(module, TextAttention) else client.attend
    found = ask(name, *inputs, mask=masks if masked else None, return_weights=True)
    expected = [
        attend(module, *own, mask=mask if masked else None) for own, mask in zip(alone, masks, strict=True)
    ]
    assert found.attention_weights is not None
    assert_parity(found.context_vectors, [context for context, _ in expected])
    assert_parity(found.attention_weights, [weights for _, weights in expected])
