"""Embeddings of parts of texts, and the characters of tokens, through a live server."""

import numpy as np
import torch.nn.functional as F
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of
from tests.support import encoders

# Parts of each text of TEXTS: words, several words, one character of several bytes, overlapping parts, none.
SPANS: list[list[tuple[int, int]]] = [
    [(0, 4), (5, 32), (0, 32)],
    [(0, 1)],
    [],
    [(0, 3), (25, 26), (20, 40), (20, 40)],
    [(0, 2), (5, 9)],
    [(0, 1)],
    [(80, 95), (0, 8)],
    [(31, 32)],
]


def embed_by_hand(text: str, start: int, end: int) -> NDArray[np.float32]:
    """The library's token vectors of the whole text, averaged over the tokens that overlap a span."""
    offsets = encoders.tokenizer_of("bert").encode(text).offsets
    tokens = [index for index, (a, b) in enumerate(offsets) if a < b and a < end and start < b]
    return F.normalize(expected_of("bert", text).tokens[tokens].mean(dim=0), dim=0).numpy()


def test_parts_of_a_mixed_batch_equal_late_chunking_by_hand(client: AttentionClient) -> None:
    found = client.embed(SENTENCE, list(TEXTS), spans=SPANS)
    assert [vectors.shape for vectors in found] == [(len(spans), encoders.WIDTH) for spans in SPANS]
    for text, spans, vectors in zip(TEXTS, SPANS, found, strict=True):
        assert vectors.dtype == np.float32
        for vector, span in zip(vectors, spans, strict=True):
            assert_allclose(vector, embed_by_hand(text, *span), rtol=RTOL, atol=ATOL)


def test_offsets_of_tokens(client: AttentionClient) -> None:
    result = client.attend_text(SENTENCE, list(TEXTS), return_offsets=True, return_weights=True)
    assert isinstance(result.offsets, list)
    for text, offsets, vectors in zip(TEXTS, result.offsets, result.context_vectors, strict=True):
        assert offsets.tolist() == [list(span) for span in encoders.tokenizer_of("bert").encode(text).offsets]
        assert offsets.shape == (len(vectors), 2)
    one = client.attend_text(SENTENCE, TEXTS[5], return_offsets=True)
    assert np.asarray(one.offsets).tolist() == [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
    assert client.attend_text(SENTENCE, TEXTS[5]).offsets is None
