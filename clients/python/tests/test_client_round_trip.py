"""Arrays to bytes and back in kind; changes with what a call accepts and answers."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_client import AttendInputs, InternalError
from attention_client._decoding import decode_result
from attention_client._encoding import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, FloatArray, RequestOptions

OPTIONS = RequestOptions(model="m", version="7", return_weights=True)
SIZES = st.integers(1, 5)
FLOATS = st.floats(-1e6, 1e6, width=32)


def matrices(width: int):
    return SIZES.flatmap(lambda rows: arrays(np.float32, (rows, width), elements=FLOATS))


def echo(call: EncodedCall) -> pb.AttendResponse:
    """The answer whose context vectors are the query, and whose weights count up from 1."""
    query = call.request.query
    keys = call.request.key if call.request.HasField("key") else query
    sizes = [2 * tq * tk for tq, tk in zip(query.lengths, keys.lengths, strict=True)]
    weights = pb.AttentionWeights(
        data_type=pb.DATA_TYPE_FP32,
        num_heads=2,
        query_lengths=query.lengths,
        key_lengths=keys.lengths,
        data=np.arange(1, sum(sizes) + 1, dtype="<f4").tobytes(),
    )
    return pb.AttendResponse(
        model_name="m", model_version="7", context_vectors=query, attention_weights=weights
    )


def parts(sizes: list[tuple[int, ...]]):
    """The numbers 1, 2, ... cut into shapes."""
    counter = itertools.count(1)
    return [
        np.array([next(counter) for _ in range(math.prod(size))], np.float32).reshape(size) for size in sizes
    ]


@given(SIZES.flatmap(matrices))
def test_one_sequence_comes_back_as_one(query: FloatArray):
    call = encode_vectors(OPTIONS, AttendInputs(query))
    result = decode_result(echo(call), call.response_shape)
    np.testing.assert_array_equal(result.context_vectors, query)
    assert result.attention_weights.shape == (2, len(query), len(query))
    assert (result.model_name, result.model_version) == ("m", "7")


@given(
    SIZES.flatmap(lambda width: st.lists(matrices(width), min_size=1, max_size=4)),
    st.sampled_from([list, tuple]),
)
def test_a_list_comes_back_as_a_list(queries: list[FloatArray], kind: type[Any]):
    call = encode_vectors(OPTIONS, AttendInputs(kind(queries)))
    result = decode_result(echo(call), call.response_shape)
    assert isinstance(result.context_vectors, list)
    for answered, query in zip(result.context_vectors, queries, strict=True):
        np.testing.assert_array_equal(answered, query)
    expected = parts([(2, len(query), len(query)) for query in queries])
    for answered, weights in zip(result.attention_weights, expected, strict=True):
        np.testing.assert_array_equal(answered, weights)


@given(st.data())
def test_a_padded_batch_sends_valid_rows_only_and_answers_zeros_elsewhere(data: st.DataObject):
    count, rows, width = (data.draw(SIZES) for _ in range(3))
    query = data.draw(arrays(np.float32, (count, rows, width), elements=FLOATS))
    lengths = data.draw(st.lists(st.integers(1, rows), min_size=count, max_size=count))
    call = encode_vectors(OPTIONS, AttendInputs(query, lengths=lengths))
    assert len(call.request.query.data) == 4 * width * sum(lengths)
    result = decode_result(echo(call), call.response_shape)
    expected = np.zeros((count, 2, rows, rows), np.float32)
    for index, weights in enumerate(parts([(2, length, length) for length in lengths])):
        query[index, lengths[index] :] = 0
        expected[index, :, : lengths[index], : lengths[index]] = weights
    np.testing.assert_array_equal(result.context_vectors, query)
    np.testing.assert_array_equal(result.attention_weights, expected)


@given(st.data())
def test_lengths_cut_key_and_value_and_never_the_query_of_cross_attention(data: st.DataObject):
    count, queries, keys = (data.draw(SIZES) for _ in range(3))
    lengths = data.draw(st.lists(st.integers(1, keys), min_size=count, max_size=count))
    query, key = np.ones((count, queries, 3)), np.arange(count * keys * 2.0).reshape(count, keys, 2)
    call = encode_vectors(OPTIONS, AttendInputs(query, key, key[..., :1], lengths=lengths))
    request = call.request
    assert list(request.query.lengths) == [queries] * count
    assert list(request.key.lengths) == list(request.value.lengths) == lengths
    sent = np.concatenate([key[index, :length] for index, length in enumerate(lengths)])
    np.testing.assert_array_equal(np.frombuffer(request.key.data, "<f4").reshape(-1, 2), sent)
    np.testing.assert_array_equal(np.frombuffer(request.value.data, "<f4"), sent[:, 0])
    result = decode_result(echo(call), call.response_shape)
    assert result.context_vectors.shape == (count, queries, 3)
    assert result.attention_weights.shape == (count, 2, queries, keys)
    assert (result.attention_weights[0, :, :, lengths[0] :] == 0).all()


@given(st.data())
def test_leading_axes_come_back_as_they_were(data: st.DataObject):
    leading = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    rows, width = data.draw(SIZES), data.draw(SIZES)
    query = data.draw(arrays(np.float32, (*leading, rows, width), elements=FLOATS))
    lengths = data.draw(st.none() | arrays(np.int64, leading, elements=st.integers(1, rows)))
    call = encode_vectors(OPTIONS, AttendInputs(query, lengths=lengths))
    result = decode_result(echo(call), call.response_shape)
    valid = np.full(leading, rows) if lengths is None else lengths
    weights = parts([(2, length, length) for length in valid.flat])
    expected = np.zeros((*leading, 2, rows, rows), np.float32)
    for index, own in zip(np.ndindex(leading), weights, strict=True):
        query[index][valid[index] :] = 0
        expected[index][:, : valid[index], : valid[index]] = own
    np.testing.assert_array_equal(result.context_vectors, query)
    np.testing.assert_array_equal(result.attention_weights, expected)


def test_key_and_value_travel_with_the_querys_leading_axes():
    key = np.arange(2 * 3 * 4 * 2.0).reshape(2, 3, 4, 2)
    call = encode_vectors(OPTIONS, AttendInputs(np.ones((2, 3, 1, 5)), key, key[..., :1]))
    assert list(call.request.key.lengths) == list(call.request.value.lengths) == [4] * 6
    np.testing.assert_array_equal(np.frombuffer(call.request.key.data, "<f4"), key.ravel())
    result = decode_result(echo(call), call.response_shape)
    assert result.context_vectors.shape == (2, 3, 1, 5)
    assert result.attention_weights.shape == (2, 3, 2, 1, 4)


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(12.0).reshape(3, 4).T, id="transposed"),
        pytest.param(np.arange(24.0).reshape(3, 8)[:, ::2], id="strided"),
        pytest.param(np.asfortranarray(np.arange(12.0, dtype=np.float32).reshape(3, 4)), id="column-major"),
        pytest.param(np.arange(12, dtype=">f8").reshape(3, 4), id="big-endian"),
        pytest.param(np.arange(12, dtype=np.float16).reshape(3, 4), id="half"),
        pytest.param(np.arange(12, dtype=np.uint8).reshape(3, 4), id="integers"),
    ],
)
@pytest.mark.parametrize("copies", [1, 2], ids=["alone", "in-a-list"])
def test_any_layout_and_real_type_travels_as_row_major_float32(array: Array, copies: int):
    call = encode_vectors(OPTIONS, AttendInputs([array] * copies if copies > 1 else array))
    sent = np.frombuffer(call.request.query.data, "<f4").reshape(-1, array.shape[1])
    np.testing.assert_array_equal(sent, np.concatenate([array] * copies))


def test_bfloat16_travels_as_float32():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    call = encode_vectors(OPTIONS, AttendInputs(np.array([[1.5, -2.0]], bfloat16)))
    assert np.frombuffer(call.request.query.data, "<f4").tolist() == [1.5, -2.0]


def test_results_are_writable_and_their_own():
    query = np.ones((2, 3), np.float32)
    call = encode_vectors(OPTIONS, AttendInputs(query))
    response = echo(call)
    decode_result(response, call.response_shape).context_vectors[:] = 5
    np.testing.assert_array_equal(decode_result(response, call.response_shape).context_vectors, query)


@pytest.mark.parametrize(
    ("ids", "lengths", "sent", "sent_lengths"),
    [
        pytest.param(np.array([3, 1, 2]), None, [3, 1, 2], [3], id="one"),
        pytest.param(np.array([[3, 1], [2, 4]], np.int32), None, [3, 1, 2, 4], [2, 2], id="batch"),
        pytest.param(np.array([[3, 0], [2, 4]]), [1, 2], [3, 2, 4], [1, 2], id="padded-batch"),
        pytest.param(np.array([[[3], [1]]]), None, [3, 1], [1, 1], id="leading-axes"),
        pytest.param([np.array([3]), [1, 2]], None, [3, 1, 2], [1, 2], id="list"),
    ],
)
def test_token_ids_travel_concatenated(
    ids: Any, lengths: list[int] | None, sent: list[int], sent_lengths: list[int]
):
    request = encode_tokens(OPTIONS, ids, lengths=lengths).request
    assert list(request.token_ids.ids) == sent
    assert list(request.token_ids.lengths) == sent_lengths


@pytest.mark.parametrize("text", ["one text", ["one", "two words"]], ids=["one", "list"])
def test_texts_travel_as_they_are(text: Any):
    call = encode_texts(OPTIONS, text)
    assert list(call.request.text.texts) == ([text] if isinstance(text, str) else text)
    assert (call.request.model_name, call.request.model_version) == ("m", "7")
    assert call.request.return_weights


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param({"data": b"\0" * 4}, id="too-short"),
        pytest.param({"data": b"\0" * 23}, id="no-whole-elements"),
        pytest.param({"lengths": [1, 1]}, id="more-sequences-than-asked-for"),
        pytest.param({"data_type": pb.DATA_TYPE_FP16}, id="another-type"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_internal_error(damage: dict[str, Any]):
    call = encode_vectors(OPTIONS, AttendInputs(np.ones((2, 3))))
    fields = {"data_type": pb.DATA_TYPE_FP32, "width": 3, "lengths": [2], "data": b"\0" * 24}
    response = pb.AttendResponse(context_vectors=pb.VectorSequences(**{**fields, **damage}))
    with pytest.raises(InternalError, match="context_vectors"):
        decode_result(response, call.response_shape)


def test_an_answer_with_more_rows_than_the_batch_is_an_internal_error():
    call = encode_vectors(OPTIONS, AttendInputs(np.ones((2, 3, 1))))
    context = pb.VectorSequences(data_type=pb.DATA_TYPE_FP32, width=1, lengths=[4, 2], data=b"\0" * 24)
    with pytest.raises(InternalError, match="larger"):
        decode_result(pb.AttendResponse(context_vectors=context), call.response_shape)
