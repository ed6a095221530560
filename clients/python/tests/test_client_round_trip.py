"""Properties of every form of a query: what is sent, masks included, and the result in the same form."""

from typing import Any

import numpy as np
import pytest
from grpc_server import HEADS, answer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_client import AttendInputs, InternalError, TextInputs
from attention_client._calls.attention import encode_texts, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import FloatArray, RequestOptions

OPTIONS = RequestOptions(model="m", version="7", return_weights=True)
SIZES = st.integers(1, 5)
FLOATS = st.floats(-1e6, 1e6, width=32)
KINDS = [pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.AttentionMask.KIND_HEADS]


def weights_of(start: int, *shape: int) -> FloatArray:
    """As the service of these tests makes them: they count up, whatever sequence they are of."""
    return (np.arange(start, start + np.prod(shape), dtype=np.float32) / 100).reshape(shape)


@given(st.data())
def test_padding_is_not_sent_and_its_results_are_zeros_in_the_leading_axes_of_the_query(data: st.DataObject):
    leading = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple))
    rows, width = data.draw(SIZES), data.draw(SIZES)
    query = data.draw(arrays(np.float32, (*leading, rows, width), elements=FLOATS))
    lengths = data.draw(st.none() | arrays(np.int64, leading, elements=st.integers(1, rows)))
    call = encode_vectors(OPTIONS, AttendInputs(query, lengths=lengths))
    result = call.decode([answer(call.requests[0])])
    valid, start = np.full(leading, rows) if lengths is None else lengths, 0
    assert len(call.requests[0].query.data) == 4 * width * valid.sum()
    expected = np.zeros((*leading, HEADS, rows, rows), np.float32)
    for index in np.ndindex(leading):
        length = valid[index]
        query[index][length:] = 0
        expected[index][:, :length, :length] = weights_of(start, HEADS, length, length)
        start += HEADS * length**2
    np.testing.assert_array_equal(result.context_vectors, query)
    np.testing.assert_array_equal(result.attention_weights, expected)


def test_in_cross_attention_lengths_cut_key_and_value_only():
    key = np.arange(16.0).reshape(2, 4, 2)
    call = encode_vectors(OPTIONS, AttendInputs(np.ones((2, 5, 3)), key, key[..., :1], lengths=[3, 1]))
    request = call.requests[0]
    assert list(request.query.lengths) == [5, 5]
    assert np.frombuffer(request.key.data, "<f4").tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert np.frombuffer(request.value.data, "<f4").tolist() == [0, 2, 4, 8]
    result = call.decode([answer(call.requests[0])])
    assert (result.context_vectors.shape, result.attention_weights.shape) == ((2, 5, 3), (2, HEADS, 5, 4))
    assert (result.attention_weights[0, ..., 3:] == 0).all()


@given(st.data(), st.integers(1, 3), st.booleans(), st.booleans())
def test_the_mask_of_a_batch_follows_its_leading_axes_and_is_cut_to_the_valid_part(
    data: st.DataObject, rank: int, cross: bool, padded: bool
):
    leading = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    queries = data.draw(SIZES)
    keys = data.draw(SIZES) if cross else queries
    lengths = data.draw(arrays(np.int64, leading, elements=st.integers(1, keys))) if padded else None
    mask = data.draw(arrays(bool, (*leading, *(HEADS, queries, keys)[3 - rank :])))
    pieces = []
    for index in np.ndindex(leading):
        length = keys if lengths is None else lengths[index]
        rows = queries if cross else length
        pieces.append(mask[index][:length] if rank == 1 else mask[index][..., :rows, :length])
    key = np.ones((*leading, keys, 2)) if cross else None
    inputs = AttendInputs(np.ones((*leading, queries, 2)), key, mask=mask, lengths=lengths)
    message = encode_vectors(OPTIONS, inputs).requests[0].mask
    assert message.kind == KINDS[rank - 1]
    expected = np.concatenate([piece.ravel() for piece in pieces])
    bits = np.unpackbits(np.frombuffer(message.bits, np.uint8), bitorder="little").astype(bool)
    assert 0 <= len(bits) - len(expected) < 8  # spare bits of the last byte
    np.testing.assert_array_equal(bits[: len(expected)], expected)


def test_the_first_bit_is_the_lowest_and_a_mask_for_text_has_any_size():
    inputs = AttendInputs(np.ones((9, 1)), mask=[True] + [False] * 7 + [True])
    assert encode_vectors(OPTIONS, inputs).requests[0].mask.bits == bytes([1, 1])
    assert not encode_vectors(OPTIONS, AttendInputs(np.ones((2, 1)))).requests[0].HasField("mask")
    texts = TextInputs(["a b", "c"], mask=[np.ones(2, bool), np.zeros(1, bool)])
    mask = encode_texts(OPTIONS, texts).requests[0].mask
    assert (mask.kind, mask.bits) == (KINDS[0], bytes([0b011]))


@pytest.mark.parametrize(
    ("query", "damage"),
    [
        pytest.param((2, 3), {"data": bytes(23)}, id="partial-element"),
        pytest.param((2, 3), {"lengths": [1, 1]}, id="more-sequences-than-requested"),
        pytest.param((2, 3), {"data_type": pb.DATA_TYPE_INT64}, id="another-type"),
    ],
)
def test_a_response_that_contradicts_itself_is_an_internal_error(query: Any, damage: dict[str, Any]):
    call = encode_vectors(OPTIONS, AttendInputs(np.ones(query)))
    fields = {"data_type": pb.DATA_TYPE_FP32, "width": 3, "lengths": [2], "data": bytes(24)}
    response = pb.AttendResponse(context_vectors=pb.VectorSequences(**{**fields, **damage}))
    with pytest.raises(InternalError, match="the server's response cannot be read"):
        call.decode([response])
