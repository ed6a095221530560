"""Encoding of masks as bits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from attention_client import AttendInputs
from attention_client._encoding import encode_texts, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")
HEADS = 3
KINDS = [pb.AttentionMask.KIND_KEYS, pb.AttentionMask.KIND_PAIRS, pb.AttentionMask.KIND_HEADS]
SIZES, RANKS = st.integers(1, 5), st.integers(1, 3)


def mask_shape(rank: int, queries: int, keys: int):
    return (HEADS, queries, keys)[3 - rank :]


def check(inputs: AttendInputs, rank: int, pieces: list[Any]):
    """The message has the bits of the pieces, and fewer than 8 to spare."""
    mask = encode_vectors(OPTIONS, inputs).requests[0].mask
    assert mask.kind == KINDS[rank - 1]
    expected = np.concatenate([piece.ravel() for piece in pieces])
    bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little").astype(bool)
    assert 0 <= len(bits) - len(expected) < 8
    np.testing.assert_array_equal(bits[: len(expected)], expected)


@given(st.data())
def test_the_masks_of_a_list(data: st.DataObject):
    rank = data.draw(RANKS)
    sizes = data.draw(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=4))
    masks = [data.draw(arrays(bool, mask_shape(rank, *size))) for size in sizes]
    queries, keys = ([np.ones((size[side], 2)) for size in sizes] for side in (0, 1))
    check(AttendInputs(queries, keys, mask=masks), rank, masks)
    check(AttendInputs(queries[0], keys[0], mask=masks[0]), rank, masks[:1])


@given(st.data(), st.booleans())
def test_the_mask_of_a_padded_batch_is_cut_to_the_valid_part(data: st.DataObject, cross: bool):
    rank, count, queries = data.draw(RANKS), data.draw(SIZES), data.draw(SIZES)
    keys = data.draw(SIZES) if cross else queries
    lengths = data.draw(st.lists(st.integers(1, keys), min_size=count, max_size=count))
    mask = data.draw(arrays(bool, (count, *mask_shape(rank, queries, keys))))
    key = np.ones((count, keys, 2)) if cross else None
    pieces = [
        mask[index, :length] if rank == 1 else mask[index, ..., : None if cross else length, :length]
        for index, length in enumerate(lengths)
    ]
    check(AttendInputs(np.ones((count, queries, 2)), key, mask=mask, lengths=lengths), rank, pieces)


@given(st.data())
def test_leading_axes_come_before_every_rank_of_mask(data: st.DataObject):
    rank, queries, keys = data.draw(RANKS), data.draw(SIZES), data.draw(SIZES)
    leading = data.draw(st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple))
    mask = data.draw(arrays(bool, (*leading, *mask_shape(rank, queries, keys))))
    inputs = AttendInputs(np.ones((*leading, queries, 2)), np.ones((*leading, keys, 2)), mask=mask)
    check(inputs, rank, [mask[index] for index in np.ndindex(leading)])


def test_the_first_bit_is_the_lowest_and_without_a_mask_there_is_none():
    inputs = AttendInputs(np.ones((9, 1)), mask=[True] + [False] * 7 + [True])
    assert encode_vectors(OPTIONS, inputs).requests[0].mask.bits == bytes([1, 1])
    assert not encode_vectors(OPTIONS, AttendInputs(np.ones((2, 1)))).requests[0].HasField("mask")


def test_a_mask_for_text_has_any_size():
    mask = encode_texts(OPTIONS, ["a b", "c"], mask=[np.ones(2, bool), np.zeros(1, bool)]).requests[0].mask
    assert (mask.kind, mask.bits) == (KINDS[0], bytes([0b011]))


BATCH = np.ones((2, 3, 1))


@pytest.mark.parametrize(
    ("query", "mask"),
    [
        pytest.param(BATCH[0], np.ones(3, int), id="integers"),
        pytest.param(BATCH[0], np.ones(4, bool), id="too-many-keys"),
        pytest.param(BATCH[0], np.ones((4, 3), bool), id="too-many-queries"),
        pytest.param(BATCH[0], np.ones((1, 1, 3, 3), bool), id="rank-4-for-one"),
        pytest.param(BATCH[0], np.True_, id="rank-0"),
        pytest.param(BATCH, np.ones((3, 3), bool), id="another-batch-size"),
        pytest.param(BATCH, np.ones(2, bool), id="batch-axis-alone"),
        pytest.param(BATCH[None], np.ones((2, 1, 3), bool), id="leading-axes-swapped"),
        pytest.param(list(BATCH), np.ones((2, 3), bool), id="array-for-a-list"),
        pytest.param(list(BATCH), [np.ones(3, bool)], id="one-mask-for-two"),
        pytest.param(list(BATCH), [np.ones(3, bool), np.ones((3, 3), bool)], id="two-ranks"),
        pytest.param(list(BATCH), [np.ones((n, 3, 3), bool) for n in (1, 2)], id="two-head-counts"),
    ],
)
def test_a_mask_of_another_shape_is_refused(query: Any, mask: Any):
    with pytest.raises(ValueError, match=r"^mask.*expected .*; found ") as caught:
        encode_vectors(OPTIONS, AttendInputs(query, mask=mask))
    assert caught.value.field.startswith("mask")
