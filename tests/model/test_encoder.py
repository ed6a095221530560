"""Encoders read from folders, against the models of the transformers library that wrote them."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from attention_serving.model.encoder.encoder import TextEncoder
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

LENGTHS = (1, 2, 7, 128)
RTOL, ATOL = 1e-4, 2e-5


@cache
def model_of(name: str) -> encoders.Model:
    return encoders.make_model(name)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The encoder of a family by its name."""

    @cache
    def load(name: str) -> TextEncoder:
        folder = encoders.save_model(name, tmp_path_factory.mktemp(name))
        return load_encoder(folder).module

    return load


@pytest.mark.parametrize("length", [*LENGTHS, "max"])
@pytest.mark.parametrize("name", encoders.CASES)
def test_one_sequence_equals_the_library(loaded: Any, name: str, length: int | str) -> None:
    size = encoders.CASES[name].max_tokens if length == "max" else int(length)
    ids = encoders.random_ids(name, size)
    expected = encoders.expected(name, model_of(name), ids)
    with torch.inference_mode():
        embedding, tokens, weights = loaded(name)(
            torch.tensor([ids]), return_tokens=True, return_weights=True
        )
        alone, _, _ = loaded(name)(torch.tensor([ids]))
    assert_close(embedding[0], expected.embedding, rtol=RTOL, atol=ATOL)
    assert_close(tokens[0], expected.tokens, rtol=RTOL, atol=ATOL)
    assert_close(weights[0], expected.weights, rtol=RTOL, atol=ATOL)
    # The fused kernel, which does not return weights.
    assert_close(alone[0], expected.embedding, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", encoders.CASES)
def test_a_batch_of_mixed_lengths_equals_the_library(loaded: Any, name: str) -> None:
    sequences = [encoders.random_ids(name, length, seed=3) for length in (9, 1, 40, 2)]
    longest = max(map(len, sequences))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
    lengths = torch.tensor([len(ids) for ids in sequences])
    with torch.inference_mode():
        embeddings, tokens, weights = loaded(name)(padded, lengths, return_tokens=True, return_weights=True)
    for index, ids in enumerate(sequences):
        expected, count = encoders.expected(name, model_of(name), ids), len(ids)
        assert_close(embeddings[index], expected.embedding, rtol=RTOL, atol=ATOL)
        assert_close(tokens[index, :count], expected.tokens, rtol=RTOL, atol=ATOL)
        assert_close(weights[index, :, :, :count, :count], expected.weights, rtol=RTOL, atol=ATOL)


POOLINGS = {
    "cls": ("pooling_mode_cls_token", "cls"),
    "mean": ("pooling_mode_mean_tokens", "mean"),
    "max": ("pooling_mode_max_tokens", "max"),
    "sqrt": ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_length"),
    "weighted": ("pooling_mode_weightedmean_tokens", "weighted_mean"),
    "last": ("pooling_mode_lasttoken", "last"),
}


@pytest.mark.parametrize(("flag", "pooling"), POOLINGS.values(), ids=POOLINGS)
def test_every_pooling_equals_its_formula(tmp_path: Path, flag: str, pooling: str) -> None:
    folder = encoders.save_sentence_model("bert", tmp_path, pooling={flag: True})
    encoder = load_encoder(folder).module
    sequences = [encoders.random_ids("bert", length) for length in (6, 1, 11)]
    padded = torch.tensor([[*ids, *[0] * (11 - len(ids))] for ids in sequences])
    with torch.inference_mode():
        found, _, _ = encoder(padded, torch.tensor([6, 1, 11]))
        alone, _, _ = encoder(torch.tensor([sequences[2]]))
    for index, ids in enumerate(sequences):
        expected = encoders.expected("bert", model_of("bert"), ids, pooling=pooling, normalised=True)
        assert_close(found[index], expected.embedding, rtol=RTOL, atol=ATOL)
    assert_close(alone[0], found[2], rtol=RTOL, atol=ATOL)


def test_two_poolings_are_concatenated_in_the_librarys_order(tmp_path: Path) -> None:
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    folder = encoders.save_sentence_model("bert", tmp_path, pooling=flags, normalised=False)
    ids = encoders.random_ids("bert", 5)
    with torch.inference_mode():
        found, _, _ = load_encoder(folder).module(torch.tensor([ids]))
    parts = [encoders.expected("bert", model_of("bert"), ids, pooling=each) for each in ("cls", "mean")]
    assert_close(found[0], torch.cat([part.embedding for part in parts]), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
def test_a_padding_token_inside_a_text_has_the_librarys_position(loaded: Any, name: str) -> None:
    ids = [*encoders.random_ids(name, 4), encoders.PADDING_ID, *encoders.random_ids(name, 3, seed=1)]
    with torch.inference_mode():
        embedding, _, _ = loaded(name)(torch.tensor([ids]))
    assert_close(embedding[0], encoders.expected(name, model_of(name), ids).embedding, rtol=RTOL, atol=ATOL)
