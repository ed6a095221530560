"""Embeddings, parts of texts and rankings: what the client sends, refuses and reads."""

from typing import Any

import numpy as np
import pytest

from attention_client import EmbeddingInputs, InternalError, InvalidArgumentError
from attention_client._calls import sequences
from attention_client._calls.embeddings import encode_embeddings, encode_rerank
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")


def sent(inputs: Any, spans: Any) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """The lengths and the spans of each request."""
    call = encode_embeddings(OPTIONS, EmbeddingInputs(inputs), spans)
    found = [request.embedding.spans for request in call.requests]
    return [(list(each.lengths), list(zip(each.starts, each.ends, strict=True))) for each in found]


@pytest.mark.parametrize(
    ("inputs", "spans", "expected"),
    [
        pytest.param("eat first", [(0, 3), (4, 9)], ([2], [(0, 3), (4, 9)]), id="one-text"),
        pytest.param(["eat", "first"], [[(0, 3)], []], ([1, 0], [(0, 3)]), id="a-text-without"),
    ],
)
def test_spans_in_every_form(inputs: Any, spans: Any, expected: tuple[list[int], list[Any]]) -> None:
    assert sent(inputs, spans) == [expected]


@pytest.mark.parametrize(
    ("inputs", "spans", "field"),
    [
        pytest.param("\U0001f370", [(0, 4)], "spans[0]", id="in-bytes"),
        pytest.param("eat", [(0, 1), (2, 2)], "spans[1]", id="empty"),
        pytest.param(["eat", "eat"], [[(0, 1)], [(2, 1)]], "spans[1][0]", id="reversed"),
        pytest.param("eat", [[(0, 1)]], "spans", id="list-of-lists-for-one-text"),
    ],
)
def test_wrong_spans_are_refused_by_name(inputs: Any, spans: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        sent(inputs, spans)
    assert caught.value.field == field


def test_many_spans_are_divided_among_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MAX_SPANS", 3)
    spans = [[(0, 1)] * count for count in (2, 1, 1, 5, 0, 0)]
    for inputs in (["eat"] * 6, [[5]] * 6):
        assert [lengths for lengths, _ in sent(inputs, spans)] == [[2, 1], [1], [5], [0, 0]]


def response(lengths: list[int], rows: int) -> pb.AttendResponse:
    data = np.arange(rows * 2, dtype=np.float32).tobytes()
    vectors = pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=2, lengths=lengths, data=data)
    return pb.AttendResponse(context_vectors=vectors)


def test_the_embeddings_of_each_text_are_told_apart() -> None:
    call = encode_embeddings(OPTIONS, EmbeddingInputs(["eat"] * 3), [[(0, 1)] * 2, [], [(0, 2)]])
    found = call.decode([response([2, 0, 1], 3)])
    assert [each.tolist() for each in found] == [[[0, 1], [2, 3]], [], [[4, 5]]]
    for wrong in (response([1, 1, 1], 3), response([2, 0, 1], 2), response([3], 3)):
        with pytest.raises(InternalError, match="does not contain 3 rows"):
            call.decode([wrong])


def test_texts_without_a_score_are_ranked_last() -> None:
    scores = np.array([0.1, np.nan, 0.3, -np.inf, 0.2], np.float32)
    vectors = pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=1, lengths=[1] * 5, data=scores.tobytes())
    answer = [pb.AttendResponse(context_vectors=vectors)]
    for top_n in (1, 4, 5):
        call = encode_rerank(OPTIONS, "eat", ["first"] * 5, top_n, truncate=True)
        assert [ranking.index for ranking in call.decode(answer)] == [2, 4, 0, 3, 1][:top_n]
