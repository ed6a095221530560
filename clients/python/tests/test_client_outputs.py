"""Dense, sparse and token vectors of one request: what the client sends, refuses and reads."""

from typing import Any

import numpy as np
import pytest

from attention_client import AttentionClient, EmbeddingInputs, InternalError, InvalidArgumentError
from attention_client._calls.embeddings import ADDED_TOKENS, MAX_VECTOR_CHARACTERS, encode_embeddings
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")
ALL: Any = ("dense", "sparse", "token_vectors")


def vectors(*lengths: int) -> pb.VectorSequences:
    data = np.arange(sum(lengths) * 2, dtype="<f4").tobytes()
    return pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=2, lengths=lengths, data=data)


SPARSE = pb.SparseVectors(lengths=[2, 0], indices=[3, 8], values=[0.5, -1])


@pytest.mark.parametrize(
    ("outputs", "fields"),
    [
        (None, {"embedding"}),
        (["dense"], {"embedding"}),
        (["sparse"], {"sparse"}),
        (["token_vectors"], {"return_token_vectors"}),
        (["sparse", "token_vectors", "sparse"], {"sparse", "return_token_vectors"}),
        (ALL, {"embedding", "sparse", "return_token_vectors"}),
    ],
)
def test_a_request_asks_for_the_outputs(outputs: Any, fields: set[str]) -> None:
    for inputs in (["a"], [[5]]):
        (request,) = encode_embeddings(OPTIONS, EmbeddingInputs(inputs, outputs=outputs)).requests
        sent = {field.name for field, _ in request.ListFields()}
        assert sent & {"embedding", "sparse", "return_token_vectors"} == fields


def test_all_outputs_are_in_the_form_of_the_inputs() -> None:
    call = encode_embeddings(OPTIONS, EmbeddingInputs(["a", "b"], outputs=ALL, top_k=2))
    assert call.requests[0].sparse.top_k == 2
    answer = pb.AttendResponse(
        context_vectors=vectors(1, 1), sparse_embeddings=SPARSE, token_vectors=vectors(0, 3)
    )
    both = call.decode([answer])
    assert both.dense.tolist() == [[0, 1], [2, 3]]
    assert [row.to_dict() for row in both.sparse] == [{3: 0.5, 8: -1}, {}]
    assert [row.shape for row in both.token_vectors] == [(0, 2), (3, 2)]
    one = encode_embeddings(OPTIONS, EmbeddingInputs("a", outputs=ALL[1:]))
    answer.sparse_embeddings.lengths.pop()
    answer.token_vectors.lengths.pop(0)
    single = one.decode([answer])
    assert (single.dense, single.sparse.to_dict(), single.token_vectors.shape) == (
        None,
        {3: 0.5, 8: -1},
        (3, 2),
    )
    assert {single.sparse.indices.dtype, single.sparse.values.dtype} == {np.dtype(np.int64), np.dtype("f4")}


@pytest.mark.parametrize(
    "change",
    [
        {"sparse_embeddings": pb.SparseVectors()},
        {"sparse_embeddings": pb.SparseVectors(lengths=[2, 0], indices=[3, 8], values=[1])},
        {"token_vectors": vectors(1)},
        {"token_vectors": pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=2, lengths=[1, 1])},
    ],
    ids=lambda change: str(change)[:60],
)
def test_an_answer_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    call = encode_embeddings(OPTIONS, EmbeddingInputs(["a", "b"], outputs=ALL[1:]))
    answer = {"sparse_embeddings": SPARSE, "token_vectors": vectors(1, 1)} | change
    with pytest.raises(InternalError, match="it does not contain"):
        call.decode([pb.AttendResponse(**answer)])


def test_texts_with_token_vectors_make_messages_of_bounded_size() -> None:
    longest = "a" * (MAX_VECTOR_CHARACTERS // 2 - ADDED_TOKENS)
    texts = [longest, longest, "", "a" * MAX_VECTOR_CHARACTERS, "a"]
    requests = encode_embeddings(OPTIONS, EmbeddingInputs(texts, outputs=["token_vectors"])).requests
    assert [[*request.text.texts] for request in requests] == [texts[:2], [""], texts[3:4], ["a"]]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"outputs": "sparse"}, "outputs"),
        ({"outputs": []}, "outputs"),
        ({"outputs": ["sparse", "weights"]}, "outputs"),
        ({"outputs": [None]}, "outputs"),
        ({"outputs": ["dense"], "sparse": True}, "sparse"),
        ({"sparse": True, "dimensions": 8}, "dimensions"),
        ({"outputs": ["token_vectors"], "normalised": True}, "normalised"),
        ({"outputs": ["dense", "token_vectors"], "top_k": 3}, "top_k"),
        ({"sparse": True, "top_k": 0}, "top_k"),
        ({"outputs": ["dense", "sparse"], "spans": [(0, 1)]}, "spans"),
    ],
    ids=str,
)
def test_outputs_that_make_no_sense_are_refused_before_sending(options: Any, field: str) -> None:
    with AttentionClient("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError) as caught:
        client.embed("m", "a", **options)
    assert caught.value.field == field
