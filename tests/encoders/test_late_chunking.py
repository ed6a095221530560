"""Embeddings of parts of texts, and the characters of tokens, through a live server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    InvalidArgumentError,
    LimitExceededError,
    TextInputs,
    TextTruncatedWarning,
)
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import ServerProcess
from tests.encoders.repository import DIMENSIONS, SENTENCE, SHORT, TRUNCATING
from tests.encoders.texts import ATOL, RTOL, TEXTS, expected_of, token_ids
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


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_parts_of_a_mixed_batch_equal_late_chunking_by_hand(
    encoder_client: AttentionClient, name: str
) -> None:
    found = encoder_client.embed(name, list(TEXTS), spans=SPANS)
    assert [each.shape for each in found] == [(len(spans), encoders.WIDTH) for spans in SPANS]
    for text, spans, vectors in zip(TEXTS, SPANS, found, strict=True):
        assert vectors.dtype == np.float32
        assert_allclose(vectors, by_hand(name, text, spans), rtol=RTOL, atol=ATOL)


def test_a_part_is_computed_in_the_context_of_its_text(encoder_client: AttentionClient) -> None:
    text = "Life is short, eat dessert first"
    (part,) = encoder_client.embed(SENTENCE, text, spans=[(19, 26)])
    assert text[19:26] == "dessert"
    assert np.abs(part - encoder_client.embed(SENTENCE, "dessert")).max() > 0.01


def test_the_whole_text_is_the_mean_of_its_tokens_without_special_ones(
    encoder_client: AttentionClient,
) -> None:
    (found,) = encoder_client.embed("bert", [TEXTS[0]], spans=[[(0, len(TEXTS[0]))]])
    tokens = expected_of("bert", TEXTS[0]).tokens[1:-1]
    assert_allclose(found[0], tokens.mean(dim=0).numpy(), rtol=RTOL, atol=ATOL)


def test_parts_are_normalised_and_shortened_as_embeddings_are(encoder_client: AttentionClient) -> None:
    spans = [(0, 4), (5, 32)]
    whole = encoder_client.embed(SENTENCE, TEXTS[0], spans=spans)
    assert_allclose(whole, by_hand("bert", TEXTS[0], spans, normalised=True), rtol=RTOL, atol=ATOL)
    for dimensions in DIMENSIONS:
        cut = whole[:, :dimensions]
        found = encoder_client.embed(SENTENCE, TEXTS[0], spans=spans, dimensions=dimensions)
        assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)


def test_a_prompt_does_not_move_the_parts(encoder_client: AttentionClient) -> None:
    found = encoder_client.embed(SENTENCE, "dessert", prompt="query", spans=[(0, 3), (3, 7)])
    written = by_hand("bert", "query: dessert", [(7, 10), (10, 14)], normalised=True)
    assert_allclose(found, written, rtol=RTOL, atol=ATOL)


def test_token_ids_have_parts_in_positions_of_tokens(encoder_client: AttentionClient) -> None:
    ids, text = token_ids("bert", TEXTS[0]), TEXTS[0]
    spans = [(0, len(ids)), (1, 5)]
    found = encoder_client.embed("bert", ids, spans=spans)
    tokens = expected_of("bert", text).tokens
    expected = torch.stack([tokens.mean(dim=0), tokens[1:5].mean(dim=0)]).numpy()
    assert_allclose(found, expected, rtol=RTOL, atol=ATOL)
    assert_allclose(found[:1], encoder_client.embed("bert", [ids]), rtol=RTOL, atol=ATOL)
    batch = encoder_client.embed("bert", np.array([ids, ids]), spans=np.array([spans, spans]))
    assert_allclose(batch[1], expected, rtol=RTOL, atol=ATOL)


def test_more_parts_than_one_request_takes(encoder_client: AttentionClient) -> None:
    texts = [f"{index % 50} times dessert" for index in range(1500)]
    spans = [[(0, 1), (2, 7), (0, len(text))] for text in texts]
    found = encoder_client.embed(SENTENCE, texts, spans=spans)
    assert len(found) == len(texts)
    for index in (0, 49, 1023, 1024, 1365, 1499):
        expected = by_hand("bert", texts[index], spans[index], normalised=True)
        assert_allclose(found[index], expected, rtol=RTOL, atol=ATOL)


def test_no_parts_at_all(encoder_client: AttentionClient) -> None:
    found = encoder_client.embed(SENTENCE, ["a", "b"], spans=[[], []])
    assert [each.shape for each in found] == [(0, encoders.WIDTH)] * 2
    assert encoder_client.embed(SENTENCE, "a", spans=[]).shape == (0, encoders.WIDTH)


@pytest.mark.parametrize(
    ("model", "spans", "message"),
    [
        ("qwen3", [(0, 1)], "spans: model 'qwen3' pools by last, where one token stands for the whole text"),
        ("clip_text_model", [(0, 1)], "spans: model 'clip_text_model' pools by end_token"),
        (SENTENCE, [(0, 0)], r"spans\[0\]: expected 0 <= start < end <= 6"),
        (SENTENCE, [(0, 1), (4, 2)], r"spans\[1\]: expected 0 <= start < end <= 6"),
        (SENTENCE, [(0, 7)], r"spans\[0\]: expected 0 <= start < end <= 6"),
        (SENTENCE, [(-1, 2)], r"spans\[0\]: expected 0 <= start"),
        (SENTENCE, [(0.5, 2)], "spans: expected integers"),
        (SENTENCE, [(0, 1, 2)], r"spans: expected a list of \(start, end\)"),
    ],
)
def test_refused(encoder_client: AttentionClient, model: str, spans: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        encoder_client.embed(model, "a text", spans=spans)
    assert str(caught.value.field).startswith("spans")


def test_parts_for_another_number_of_texts_are_refused(encoder_client: AttentionClient) -> None:
    with pytest.raises(InvalidArgumentError, match="one list of spans for each input, 2; found 1"):
        encoder_client.embed(SENTENCE, ["a", "b"], spans=[[(0, 1)]])


def test_a_part_beyond_where_the_text_is_cut_is_refused(encoder_client: AttentionClient) -> None:
    text, kept = "a longer text", SHORT - 2  # one token for each character, without two special tokens
    with pytest.warns(TextTruncatedWarning):
        found = encoder_client.embed(TRUNCATING, text, prompt="", spans=[(0, kept), (2, 8)])
    assert found.shape == (2, encoders.WIDTH)
    with pytest.raises(
        LimitExceededError, match=rf"span 1 of text 0, \(2, 12\), ends beyond character {kept}"
    ):
        encoder_client.embed(TRUNCATING, text, prompt="", truncate=True, spans=[(0, 2), (2, 12)])


def test_both_clients_compute_the_same(
    encoder_server: ServerProcess, encoder_client: AttentionClient
) -> None:
    async def embed() -> tuple[list[NDArray[np.float32]], Any]:
        async with AsyncAttentionClient(encoder_server.target) as client:
            found = await client.embed(SENTENCE, list(TEXTS), spans=SPANS)
            return found, await client.attend_text(SENTENCE, TEXTS[3], return_offsets=True)

    parts, result = asyncio.run(embed())
    for own, other in zip(parts, encoder_client.embed(SENTENCE, list(TEXTS), spans=SPANS), strict=True):
        assert_allclose(own, other, rtol=RTOL, atol=ATOL)
    assert_array_equal(result.offsets, encoders.tokenizer_of("bert").encode(TEXTS[3]).offsets)


def test_parts_in_a_stream_of_the_typed_protocol(
    encoder_server: ServerProcess, encoder_client: AttentionClient
) -> None:
    spans = pb.Spans(lengths=[2], starts=[0, 5], ends=[4, 32])
    request = pb.AttendRequest(
        model_name=SENTENCE,
        text=pb.TextSequences(texts=TEXTS[:1]),
        embedding=pb.EmbeddingOptions(dimensions=8, spans=spans),
        return_offsets=True,
    )
    beyond = pb.AttendRequest()
    beyond.CopyFrom(request)
    beyond.embedding.spans.ends[1] = 33
    with grpc.insecure_channel(encoder_server.target) as channel:
        requests = [pb.AttendStreamRequest(id=str(i), request=own) for i, own in enumerate((request, beyond))]
        good, refused = AttentionServiceStub(channel).AttendStream(iter(requests), timeout=60)
    vectors = np.frombuffer(good.response.context_vectors.data, np.float32).reshape(2, 8)
    expected = encoder_client.embed(SENTENCE, TEXTS[0], spans=[(0, 4), (5, 32)], dimensions=8)
    assert_allclose(vectors, expected, rtol=RTOL, atol=ATOL)
    assert list(good.response.context_vectors.lengths) == [2]
    assert list(good.response.token_offsets.lengths) == list(good.response.token_counts)
    assert (refused.error.reason, refused.error.field) == ("INVALID_FIELD", "spans")


def test_offsets_of_tokens(encoder_client: AttentionClient) -> None:
    result = encoder_client.attend_text("bert", list(TEXTS), return_offsets=True, return_weights=True)
    assert isinstance(result.offsets, list)
    for text, offsets, vectors in zip(TEXTS, result.offsets, result.context_vectors, strict=True):
        assert offsets.tolist() == [list(each) for each in encoders.tokenizer_of("bert").encode(text).offsets]
        assert offsets.shape == (len(vectors), 2)
    one = encoder_client.attend_text("bert", TEXTS[5], return_offsets=True)
    assert np.asarray(one.offsets).tolist() == [[0, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
    assert encoder_client.attend_text("bert", TEXTS[5]).offsets is None


def test_offsets_with_a_default_prompt_and_in_a_stream(encoder_client: AttentionClient) -> None:
    (result,) = encoder_client.attend_stream(TRUNCATING, [TextInputs("abcdef", return_offsets=True)])
    prompt = [[0, 0]] * (1 + len("query: "))
    assert np.asarray(result.offsets).tolist() == [*prompt, [0, 1], [1, 2], [2, 3], [0, 0]]
