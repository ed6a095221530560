"""Embeddings on a stream."""

from attention_client import AttentionClient, EmbeddingInputs, LimitExceededError, TextInputs
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
        EmbeddingInputs(["a", LONG], truncate=True),
        EmbeddingInputs([IDS, IDS[:4]]),
        EmbeddingInputs(LONG),
    ]
    stream = sentence_client.attend_stream(SENTENCE, requests, return_exceptions=True)
    several, tokens, cut, ids, refused = stream
    assert isinstance(refused, LimitExceededError)
    expected = sentence_client.embed(SENTENCE, list(TEXTS), prompt="query", dimensions=8)
    assert_allclose(several.context_vectors, expected, rtol=RTOL, atol=ATOL)
    assert several.token_counts == tuple(len(token_ids("bert", f"query: {text}")) for text in TEXTS)
    assert (tokens.context_vectors.shape[0], tokens.token_counts) == (len(IDS), (len(IDS),))
    assert (cut.truncated, cut.token_counts) == ((1,), (3, 160))
    expected = sentence_client.embed(SENTENCE, [IDS, IDS[:4]])
    assert_allclose(ids.context_vectors, expected, rtol=RTOL, atol=ATOL)
