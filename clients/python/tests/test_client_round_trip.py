"""Encoding of arrays and decoding of results in the form of the query."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_client import AttendInputs, AttentionResult, InternalError
from attention_client._encoding import EncodedCall, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, FloatArray, RequestOptions

OPTIONS = RequestOptions(model="m", version="7", return_weights=True)
SIZES = st.integers(1, 5)
FLOATS = st.floats(-1e6, 1e6, width=32)


def matrices(width: int):
    return SIZES.flatmap(lambda rows: arrays(np.float32, (rows, width), elements=FLOATS))


def decode(call: EncodedCall[Any], response: pb.AttendResponse) -> AttentionResult[Any]:
    return call.decode([response])


def echo(call: EncodedCall[Any]) -> pb.AttendResponse:
    """A response whose context vectors are the query and whose weights, of 2 heads, count up from 1."""
    query = call.requests[0].query
    keys = call.requests[0].key if call.requests[0].HasField("key") else query
    count = sum(2 * tq * tk for tq, tk in zip(query.lengths, keys.lengths, strict=True))
    weights = pb.AttentionWeights(
        data_type=pb.DATA_TYPE_FP32,
        num_heads=2,
        query_lengths=query.lengths,
        key_lengths=keys.lengths,
        data=np.arange(1, count + 1, dtype="<f4").tobytes(),
    )
    return pb.AttendResponse(
        model_name="m", model_version="7", context_vectors=query, attention_weights=weights
    )


@given(SIZES.flatmap(lambda width: st.lists(matrices(width), min_size=1, max_size=4)))
def test_the_result_of_a_list_is_a_list_and_of_one_sequence_an_array(queries: list[FloatArray]):
    call = encode_vectors(OPTIONS, AttendInputs(queries))
    result, start = decode(call, echo(call)), 1
    for answered, weights, query in zip(
        result.context_vectors, result.attention_weights, queries, strict=True
    ):
        np.testing.assert_array_equal(answered, query)
        expected = np.arange(start, start + 2 * len(query) ** 2).reshape(2, len(query), len(query))
        np.testing.assert_array_equal(weights, expected)
        start += expected.size
    call = encode_vectors(OPTIONS, AttendInputs(queries[0]))
    result = decode(call, echo(call))
    np.testing.assert_array_equal(result.context_vectors, queries[0])
    assert result.attention_weights.shape == (2, len(queries[0]), len(queries[0]))
    assert (result.model_name, result.model_version) == ("m", "7")


@given(st.data())
def test_padding_is_not_sent_and_its_results_are_zeros_in_the_leading_axes_of_the_query(data: st.DataObject):
    leading = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    rows, width = data.draw(SIZES), data.draw(SIZES)
    query = data.draw(arrays(np.float32, (*leading, rows, width), elements=FLOATS))
    lengths = data.draw(st.none() | arrays(np.int64, leading, elements=st.integers(1, rows)))
    call = encode_vectors(OPTIONS, AttendInputs(query, lengths=lengths))
    result = decode(call, echo(call))
    valid, start = np.full(leading, rows) if lengths is None else lengths, 1
    assert len(call.requests[0].query.data) == 4 * width * valid.sum()
    expected = np.zeros((*leading, 2, rows, rows), np.float32)
    for index in np.ndindex(leading):
        length = valid[index]
        query[index][length:] = 0
        weights = np.arange(start, start + 2 * length**2).reshape(2, length, length)
        expected[index][:, :length, :length] = weights
        start += weights.size
    np.testing.assert_array_equal(result.context_vectors, query)
    np.testing.assert_array_equal(result.attention_weights, expected)


@given(st.data())
def test_in_cross_attention_lengths_cut_key_and_value_only(data: st.DataObject):
    count, queries, keys = (data.draw(SIZES) for _ in range(3))
    lengths = data.draw(st.lists(st.integers(1, keys), min_size=count, max_size=count))
    query, key = np.ones((count, queries, 3)), np.arange(count * keys * 2.0).reshape(count, keys, 2)
    call = encode_vectors(OPTIONS, AttendInputs(query, key, key[..., :1], lengths=lengths))
    request = call.requests[0]
    assert list(request.query.lengths) == [queries] * count
    assert list(request.key.lengths) == list(request.value.lengths) == lengths
    rows = np.concatenate([key[index, :length] for index, length in enumerate(lengths)])
    np.testing.assert_array_equal(np.frombuffer(request.key.data, "<f4").reshape(-1, 2), rows)
    np.testing.assert_array_equal(np.frombuffer(request.value.data, "<f4"), rows[:, 0])
    result = decode(call, echo(call))
    assert result.context_vectors.shape == (count, queries, 3)
    assert result.attention_weights.shape == (count, 2, queries, keys)
    assert (result.attention_weights[0, :, :, lengths[0] :] == 0).all()


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(24.0).reshape(3, 8)[:, ::2], id="strided"),
        pytest.param(np.asfortranarray(np.arange(12.0, dtype=np.float32).reshape(3, 4)), id="column-major"),
        pytest.param(np.arange(12, dtype=">f8").reshape(3, 4), id="big-endian"),
        pytest.param(np.arange(12, dtype=np.uint8).reshape(3, 4), id="integers"),
    ],
)
@pytest.mark.parametrize("copies", [1, 2], ids=["alone", "in-a-list"])
def test_any_layout_and_real_type_is_sent_as_row_major_float32(array: Array, copies: int):
    request = encode_vectors(OPTIONS, AttendInputs([array] * copies if copies > 1 else array)).requests[0]
    rows = np.frombuffer(request.query.data, "<f4").reshape(-1, array.shape[1])
    np.testing.assert_array_equal(rows, np.concatenate([array] * copies))


def test_bfloat16_is_sent_as_float32():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    request = encode_vectors(OPTIONS, AttendInputs(np.array([[1.5, -2.0]], bfloat16))).requests[0]
    assert np.frombuffer(request.query.data, "<f4").tolist() == [1.5, -2.0]


def test_results_are_writable_copies():
    call = encode_vectors(OPTIONS, AttendInputs(np.ones((2, 3), np.float32)))
    response = echo(call)
    decode(call, response).context_vectors[:] = 5
    assert (decode(call, response).context_vectors == 1).all()


@pytest.mark.parametrize(
    ("query", "damage"),
    [
        pytest.param((2, 3), {"data": bytes(4)}, id="too-short"),
        pytest.param((2, 3), {"data": bytes(23)}, id="partial-element"),
        pytest.param((2, 3), {"lengths": [1, 1]}, id="more-sequences-than-requested"),
        pytest.param((2, 3), {"data_type": pb.DATA_TYPE_INT64}, id="another-type"),
        pytest.param((2, 1, 3), {"lengths": [2, 0]}, id="more-rows-than-the-batch"),
    ],
)
def test_a_response_that_contradicts_itself_is_an_internal_error(query: Any, damage: dict[str, Any]):
    call = encode_vectors(OPTIONS, AttendInputs(np.ones(query)))
    fields = {"data_type": pb.DATA_TYPE_FP32, "width": 3, "lengths": [2], "data": bytes(24)}
    response = pb.AttendResponse(context_vectors=pb.VectorSequences(**{**fields, **damage}))
    with pytest.raises(InternalError, match="context_vectors"):
        decode(call, response)
