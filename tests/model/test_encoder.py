"""Encoders read from folders, against the models of the transformers library that wrote them."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from attention_serving.model.encoder.encoder import TextEncoder
from attention_serving.model.encoder_folder.loading import load_encoder
from tests.support import encoders

RTOL, ATOL = 1e-4, 2e-5
model_of = cache(encoders.make_model)


def load(name: str, folder: Path) -> TextEncoder:
    return load_encoder(encoders.save_model(name, folder)).module


def run(encoder: TextEncoder, sequences: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, token vectors and weights; those of padding in a batch of several sequences included."""
    longest = max(map(len, sequences))
    padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])
    lengths = torch.tensor(list(map(len, sequences))) if len(sequences) > 1 else None
    with torch.inference_mode():
        found: tuple[Tensor, Tensor, Tensor] = encoder(
            padded, lengths, return_tokens=True, return_weights=True
        )
        alone, _, _ = encoder(padded, lengths)
    assert_close(alone, found[0], rtol=RTOL, atol=ATOL)  # by the fused kernel, which returns no weights
    return found


@pytest.mark.parametrize("name", encoders.CASES)
def test_every_output_equals_the_library(tmp_path: Path, name: str) -> None:
    encoder, lengths = load(name, tmp_path), (9, 1, 40, encoders.CASES[name].max_tokens)
    sequences = [encoders.random_ids(name, length, seed=3) for length in lengths]
    for batch in (sequences, sequences[:1]):
        embeddings, tokens, weights = run(encoder, batch)
        for index, ids in enumerate(batch):
            expected, count = encoders.expected(name, model_of(name), ids), len(ids)
            assert_close(embeddings[index], expected.embedding, rtol=RTOL, atol=ATOL)
            assert_close(tokens[index, :count], expected.tokens, rtol=RTOL, atol=ATOL)
            assert_close(weights[index, :, :, :count, :count], expected.weights, rtol=RTOL, atol=ATOL)


POOLINGS = {
    "pooling_mode_cls_token": ("cls",),
    "pooling_mode_mean_tokens": ("mean",),
    "pooling_mode_max_tokens": ("max",),
    "pooling_mode_mean_sqrt_len_tokens": ("mean_sqrt_length",),
    "pooling_mode_weightedmean_tokens": ("weighted_mean",),
    "pooling_mode_lasttoken": ("last",),
    # Concatenated in the library's order.
    "pooling_mode_mean_tokens pooling_mode_cls_token": ("cls", "mean"),
}


@pytest.mark.parametrize(("flags", "poolings"), POOLINGS.items(), ids=map(" ".join, POOLINGS.values()))
def test_every_pooling_equals_its_formula(tmp_path: Path, flags: str, poolings: tuple[str, ...]) -> None:
    pooling = dict.fromkeys(flags.split(), True)
    folder = encoders.save_sentence_model("bert", tmp_path, pooling=pooling, normalised=False)
    encoder = load_encoder(folder).module
    sequences = [encoders.random_ids("bert", length) for length in (6, 1, 11)]
    found, _, _ = run(encoder, sequences)
    for own, ids in zip(found, sequences, strict=True):
        parts = [encoders.expected("bert", model_of("bert"), ids, pooling=each) for each in poolings]
        assert_close(own, torch.cat([part.embedding for part in parts]), rtol=RTOL, atol=ATOL)
    assert_close(run(encoder, sequences[2:])[0][0], found[2], rtol=RTOL, atol=ATOL)
