"""What the client refuses before it sends anything; changes with what a call accepts."""

from typing import Any

import numpy as np
import pytest

from attention_client import AttendInputs, AttentionClient, InvalidArgumentError
from attention_client._encoding import encode_texts, encode_tokens, encode_vectors
from attention_client._streaming import encode_item
from attention_client._values import Ask

ASK = Ask(model="m")
ONE, BATCH, GRID = np.ones((3, 4)), np.ones((2, 3, 4)), np.ones((2, 3, 3, 4))


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        pytest.param(AttendInputs(ONE.astype(complex)), "query", id="complex"),
        pytest.param(AttendInputs(np.array([["a"]])), "query", id="strings"),
        pytest.param(AttendInputs(np.array([[None]])), "query", id="objects"),
        pytest.param(AttendInputs(ONE > 0), "query", id="booleans"),
        pytest.param(AttendInputs(np.zeros((1, 1), [("a", "f4")])), "query", id="structs"),
        pytest.param(AttendInputs(np.ones(3)), "query", id="rank-1"),
        pytest.param(AttendInputs(np.ones((0, 4))), "query", id="no-rows"),
        pytest.param(AttendInputs(np.ones((3, 0))), "query", id="no-width"),
        pytest.param(AttendInputs(np.ones((0, 3, 4))), "query", id="empty-batch"),
        pytest.param(AttendInputs(np.ones((2, 0, 3, 4))), "query", id="empty-leading-axis"),
        pytest.param(AttendInputs(np.ones((2, 0, 0, 0))), "query", id="empty-everywhere"),
        pytest.param(AttendInputs([]), "query", id="empty-list"),
        pytest.param(AttendInputs([[1.0, 2.0]]), "query[0]", id="one-sequence-as-nested-lists"),
        pytest.param(AttendInputs([ONE, [[1.0], [1.0, 2.0]]]), "query[1]", id="ragged-rows"),
        pytest.param(AttendInputs([ONE, np.ones((0, 4))]), "query[1]", id="no-rows-in-a-list"),
        pytest.param(AttendInputs([ONE, np.ones((3, 5))]), "query", id="two-widths"),
        pytest.param(AttendInputs(ONE, value=ONE), "value", id="value-without-key"),
        pytest.param(AttendInputs(ONE, BATCH), "key", id="batch-of-keys-for-one-query"),
        pytest.param(AttendInputs(BATCH, BATCH[:1]), "key", id="another-number-of-keys"),
        pytest.param(AttendInputs([ONE], [ONE, ONE]), "key", id="another-number-in-a-list"),
        pytest.param(AttendInputs(GRID, GRID.swapaxes(0, 1)), "key", id="leading-axes-swapped"),
        pytest.param(AttendInputs(GRID, GRID.reshape(6, 3, 4)), "key", id="leading-axes-flattened"),
        pytest.param(AttendInputs(GRID, GRID, GRID[:, :1]), "value", id="other-leading-axes-of-values"),
        pytest.param(AttendInputs(ONE, ONE, [ONE]), "value", id="list-of-values-for-one-query"),
        pytest.param(AttendInputs(ONE, ONE, ONE[:2]), "value", id="fewer-values-than-keys"),
        pytest.param(AttendInputs(ONE, lengths=[3]), "lengths", id="lengths-for-one"),
        pytest.param(AttendInputs([ONE], lengths=[3]), "lengths", id="lengths-for-a-list"),
        pytest.param(AttendInputs(BATCH, lengths=[3]), "lengths", id="too-few-lengths"),
        pytest.param(AttendInputs(GRID, lengths=[3] * 6), "lengths", id="lengths-flattened"),
        pytest.param(AttendInputs(BATCH, lengths=[3, 0]), "lengths", id="length-0"),
        pytest.param(AttendInputs(BATCH, lengths=[3, 4]), "lengths", id="length-past-the-rows"),
        pytest.param(AttendInputs(BATCH, lengths=[3.0, 2.0]), "lengths", id="lengths-not-integers"),
        pytest.param(AttendInputs(ONE, positions=[0.0, 1.0, 2.0]), "positions", id="positions-not-integers"),
        pytest.param(AttendInputs(ONE, positions=np.arange(2)), "positions", id="too-few-positions"),
        pytest.param(AttendInputs(ONE, positions=np.zeros((1, 3), int)), "positions", id="batch-for-one"),
        pytest.param(AttendInputs(BATCH, positions=np.arange(3)), "positions", id="positions-of-one-row"),
        pytest.param(AttendInputs(GRID, positions=np.zeros((6, 3), int)), "positions", id="flattened"),
        pytest.param(AttendInputs([ONE], positions=np.zeros((1, 3), int)), "positions", id="array-for-list"),
        pytest.param(AttendInputs([ONE, ONE[:1]], positions=[[0], [0]]), "positions", id="too-few-in-a-list"),
        pytest.param(AttendInputs([ONE], positions=[[0, 1, 2]] * 2), "positions", id="too-many-lists"),
    ],
)
def test_wrong_vectors_are_refused_with_field_expected_and_found(inputs: AttendInputs, field: str):
    with pytest.raises(InvalidArgumentError, match=r"expected .*; found ") as caught:
        encode_vectors(ASK, inputs)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert caught.value.reason == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        pytest.param(np.array([1.0]), "token_ids", id="floats"),
        pytest.param(np.array([], int), "token_ids", id="empty"),
        pytest.param(np.ones((2, 0, 1), int), "token_ids", id="empty-leading-axis"),
        pytest.param([1, 2], "token_ids[0]", id="plain-list-of-integers"),
    ],
)
def test_wrong_token_ids_are_refused(ids: Any, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        encode_tokens(ASK, ids)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        pytest.param([], "text", id="empty-list"),
        pytest.param(b"bytes", "text", id="bytes"),
        pytest.param(["a", 1], "text[1]", id="number"),
    ],
)
def test_wrong_texts_are_refused(text: Any, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        encode_texts(ASK, text)
    assert caught.value.field == field


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_a_timeout_is_positive_and_finite(timeout: float):
    with pytest.raises(InvalidArgumentError, match="timeout"):
        AttentionClient(timeout=timeout)
    with AttentionClient() as client, pytest.raises(InvalidArgumentError, match="timeout"):
        client.models(timeout=timeout)


def test_a_stream_is_checked_before_it_is_read():
    with AttentionClient() as client:
        with pytest.raises(InvalidArgumentError, match="max_in_flight"):
            client.attend_stream("m", iter([]), max_in_flight=0)
        with pytest.raises(TypeError):
            client.attend_stream("m", 3)


@pytest.mark.parametrize(
    ("item", "lengths"),
    [
        pytest.param(ONE, [3], id="array"),
        pytest.param([ONE, ONE[:1]], [3, 1], id="list"),
        pytest.param((ONE, ONE[:1]), [3, 1], id="tuple-is-many-sequences-too"),
        pytest.param(AttendInputs(BATCH, lengths=[1, 2]), [1, 2], id="inputs"),
    ],
)
def test_an_item_of_a_stream_is_a_query_unless_it_says_more(item: Any, lengths: list[int]):
    entry, request = encode_item(5, item, ASK)
    assert request.id == entry.id == "5"
    assert list(request.request.query.lengths) == lengths
    assert not request.request.HasField("key")


def test_a_refused_item_of_a_stream_stands_for_itself():
    entry, request = encode_item(0, np.ones(3), ASK)
    assert request is None
    assert isinstance(entry, InvalidArgumentError)
