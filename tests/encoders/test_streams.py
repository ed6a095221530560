"""Embeddings on a stream."""

import numpy as np
from attention_client import (
    AttentionClient,
    EmbeddingInputs,
    InvalidArgumentError,
    LimitExceededError,
    TextInputs,
)
from attention_client._values import StreamItem
from numpy.testing import assert_allclose

from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, token_ids

LONG = "dessert " * 40
IDS = token_ids("bert", "dessert")


def test_a_stream_mixes_embeddings_and_token_vectors(sentence_client: AttentionClient) -> None:
    requests: list[StreamItem] = [
        EmbeddingInputs(list(TEXTS), prompt="query", dimensions=8),
        TextInputs("dessert"),
        EmbeddingInputs(TEXTS[0]),
        EmbeddingInputs(["a", LONG], truncate=True),
        EmbeddingInputs([IDS, IDS[:4]]),
    ]
    several, tokens, one, cut, ids = sentence_client.attend_stream(SENTENCE, requests)
    expected = sentence_client.embed(SENTENCE, list(TEXTS), prompt="query", dimensions=8)
    assert_allclose(several.context_vectors, expected, rtol=RTOL, atol=ATOL)
    assert several.token_counts == tuple(len(token_ids("bert", f"query: {text}")) for text in TEXTS)
    assert tokens.context_vectors.shape[0] == len(IDS)
    assert tokens.token_counts == (len(IDS),)
    assert_allclose(one.context_vectors, sentence_client.embed(SENTENCE, TEXTS[0]), rtol=RTOL, atol=ATOL)
    assert (cut.truncated, cut.token_counts) == ((1,), (3, 160))
    expected = sentence_client.embed(SENTENCE, ["a", LONG], truncate=True)
    assert_allclose(cut.context_vectors, expected, rtol=RTOL, atol=ATOL)
    assert_allclose(
        ids.context_vectors, sentence_client.embed(SENTENCE, [IDS, IDS[:4]]), rtol=RTOL, atol=ATOL
    )
    assert ids.token_counts == ()


def test_a_request_that_is_refused_is_an_error_in_its_place(sentence_client: AttentionClient) -> None:
    requests = [
        EmbeddingInputs(LONG),
        EmbeddingInputs("a", prompt="answer"),
        EmbeddingInputs(["a"] * 1025),
        EmbeddingInputs(IDS, prompt="query"),
        EmbeddingInputs("a"),
    ]
    outcomes = list(sentence_client.attend_stream(SENTENCE, requests, return_exceptions=True))
    kinds = [LimitExceededError, *[InvalidArgumentError] * 3]
    assert [type(outcome) for outcome in outcomes[:4]] == kinds
    assert "expected at most 1024 texts" in str(outcomes[2])
    last = outcomes[4]
    assert not isinstance(last, Exception)
    assert np.shape(last.context_vectors) == (32,)
