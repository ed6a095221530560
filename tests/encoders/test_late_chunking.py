"""Embeddings of parts of texts, and the characters of tokens, through a live server."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of
from tests.support import encoders

Span = tuple[int, int]
# Parts of each text of TEXTS: words, several words, one character of several bytes, overlapping parts, none.
SPANS: list[list[Span]] = [
    [(0, 4), (5, 32), (0, 32)],
    [(0, 1)],
    [],
    [(0, 3), (25, 26), (20, 40), (20, 40)],
    [(0, 2), (5, 9)],
    [(0, 1)],
    [(80, 95), (0, 8)],
    [(31, 32)],
]


def by_hand(name: str, text: str, spans: Sequence[Span], *, normalised: bool = False) -> NDArray[np.float32]:
    """The library's token vectors of the whole text, averaged over the tokens that overlap each span."""
    offsets = encoders.tokenizer_of(name).encode(text).offsets
    tokens = expected_of(name, text).tokens
    parts = []
    for start, end in spans:
        own = [index for index, (a, b) in enumerate(offsets) if a < b and a < end and start < b]
        mean = tokens[own].mean(dim=0)
        parts.append(F.normalize(mean, dim=0) if normalised else mean)
    return torch.stack(parts).numpy() if parts else np.empty((0, encoders.WIDTH), np.float32)


def test_parts_of_a_mixed_batch_equal_late_chunking_by_hand(client: AttentionClient) -> None:
    found = client.embed(SENTENCE, list(TEXTS), spans=SPANS)
    assert [each.shape for each in found] == [(len(spans), encoders.WIDTH) for spans in SPANS]
    for text, spans, vectors in zip(TEXTS, SPANS, found, strict=True):
        assert vectors.dtype == np.float32
        assert_allclose(vectors, by_hand("bert", text, spans, normalised=True), rtol=RTOL, atol=ATOL)


def test_offsets_of_tokens(client: AttentionClient) -> None:
    result = client.attend_text(SENTENCE, list(TEXTS), return_offsets=True, return_weights=True)
    assert isinstance(result.offsets, list)
    for text, offsets, vectors in zip(TEXTS, result.offsets, result.context_vectors, strict=True):
        assert offsets.tolist() == [list(each) for each in encoders.tokenizer_of("bert").encode(text).offsets]
        assert offsets.shape == (len(vectors), 2)
    one = client.attend_text(SENTENCE, TEXTS[5], return_offsets=True)
    assert np.asarray(one.offsets).tolist() == [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
    assert client.attend_text(SENTENCE, TEXTS[5]).offsets is None
