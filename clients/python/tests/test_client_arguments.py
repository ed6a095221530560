"""Arguments that the client accepts or refuses before it sends anything."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from attention_client import AttendInputs, AttentionClient, InvalidArgumentError
from attention_client._encoding import encode_texts, encode_tokens, encode_vectors
from attention_client._sequences import InputForm
from attention_client._streaming import encode_item
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")
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
        pytest.param(AttendInputs([[[[1.0, 2.0]]]]), "query[0]", id="nested-lists-of-rank-4"),
        pytest.param(AttendInputs([1.0, 2.0]), "query[0]", id="flat-list"),
        pytest.param(AttendInputs([[1.0, 2.0], [1.0]]), "query", id="ragged-rows-of-one-sequence"),
        pytest.param(AttendInputs([["a"]]), "query", id="nested-strings"),
        pytest.param(AttendInputs(np.array([[1e300]])), "query", id="beyond-float32"),
        pytest.param(AttendInputs([[-1e39, 1.0]]), "query", id="beyond-float32-in-a-list"),
        pytest.param(AttendInputs([ONE, [[1e300] * 4]]), "query[1]", id="beyond-float32-in-one-item"),
        pytest.param(AttendInputs(ONE, ONE, ONE * 1e300), "value", id="value-beyond-float32"),
        pytest.param(AttendInputs(pd.Series([ONE, None])), "query[1]", id="missing-item-of-a-series"),
        pytest.param(AttendInputs(pd.Series([1.0, 2.0])), "query", id="series-of-numbers"),
        pytest.param(AttendInputs(torch.ones(3, 4, device="meta")), "query", id="tensor-elsewhere"),
        pytest.param(AttendInputs([torch.ones(3, 4, device="meta")]), "query[0]", id="tensors-elsewhere"),
        pytest.param(AttendInputs(torch.ones(3, 4, dtype=torch.complex64)), "query", id="complex-tensor"),
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
        encode_vectors(OPTIONS, inputs)
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert caught.value.reason == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        pytest.param(np.array([1.0]), "token_ids", id="floats"),
        pytest.param(np.array([], int), "token_ids", id="empty"),
        pytest.param(np.ones((2, 0, 1), int), "token_ids", id="empty-leading-axis"),
        pytest.param([1.0, 2.0], "token_ids", id="list-of-floats"),
        pytest.param([[[1]]], "token_ids[0]", id="nested-lists-of-rank-3"),
        pytest.param([2**70], "token_ids", id="beyond-64-bits"),
        pytest.param(np.array([2**63], np.uint64), "token_ids", id="beyond-signed-64-bits"),
    ],
)
def test_wrong_token_ids_are_refused(ids: Any, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        encode_tokens(OPTIONS, ids)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [
        pytest.param([], "text", id="empty-list"),
        pytest.param(b"bytes", "text", id="bytes"),
        pytest.param(["a", 1], "text[1]", id="number"),
        pytest.param(pd.Series(["a", None]), "text[1]", id="missing-text-of-a-series"),
        pytest.param(np.array([1, 2]), "text", id="array-of-numbers"),
        pytest.param({"a"}, "text", id="set"),
    ],
)
def test_wrong_texts_are_refused(text: Any, field: str):
    with pytest.raises(InvalidArgumentError) as caught:
        encode_texts(OPTIONS, text)
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
        with pytest.raises(InvalidArgumentError, match="requests: expected an iterable"):
            client.attend_stream("m", 3)


@pytest.mark.parametrize(
    ("item", "lengths"),
    [
        pytest.param(ONE, [3], id="array"),
        pytest.param([ONE, ONE[:1]], [3, 1], id="list"),
        pytest.param((ONE, ONE[:1]), [3, 1], id="tuple"),
        pytest.param(AttendInputs(BATCH, lengths=[1, 2]), [1, 2], id="inputs"),
    ],
)
def test_an_item_of_a_stream_is_a_query_or_inputs(item: Any, lengths: list[int]):
    entry, request = encode_item(5, item, OPTIONS)
    assert request.id == entry.id == "5"
    assert list(request.request.query.lengths) == lengths
    assert not request.request.HasField("key")


def test_a_refused_item_of_a_stream_is_its_error():
    entry, request = encode_item(0, np.ones(3), OPTIONS)
    assert request is None
    assert isinstance(entry, InvalidArgumentError)


ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
EXACT = np.array(ROWS, np.float32)


@pytest.mark.parametrize(
    ("query", "form", "lengths"),
    [
        pytest.param(ROWS, InputForm.ONE, [3], id="nested-lists"),
        pytest.param(tuple(ROWS), InputForm.ONE, [3], id="tuple-of-rows"),
        pytest.param(list(EXACT), InputForm.ONE, [3], id="list-of-rows"),
        pytest.param(torch.tensor(ROWS), InputForm.ONE, [3], id="tensor"),
        pytest.param(torch.tensor(ROWS, requires_grad=True), InputForm.ONE, [3], id="tensor-with-gradient"),
        pytest.param(torch.tensor(ROWS, dtype=torch.bfloat16), InputForm.ONE, [3], id="bfloat16-tensor"),
        pytest.param(torch.tensor(ROWS, dtype=torch.float64), InputForm.ONE, [3], id="float64-tensor"),
        pytest.param(torch.tensor(ROWS).T.contiguous().T, InputForm.ONE, [3], id="strided-tensor"),
        pytest.param(
            list(torch.tensor(ROWS, requires_grad=True)), InputForm.ONE, [3], id="list-of-rows-as-tensors"
        ),
        pytest.param(torch.tensor([ROWS]), InputForm.BATCH, [3], id="batch-tensor"),
        pytest.param([ROWS[:2], ROWS[2:]], InputForm.LIST, [2, 1], id="lists-of-nested-lists"),
        pytest.param([torch.tensor(ROWS[:1]), EXACT[1:]], InputForm.LIST, [1, 2], id="tensors-and-arrays"),
        pytest.param(pd.Series([EXACT[:1], EXACT[1:]]), InputForm.LIST, [1, 2], id="series-of-arrays"),
        pytest.param(pd.Series([ROWS[:1], ROWS[1:]], [7, 9]), InputForm.LIST, [1, 2], id="series-of-lists"),
        pytest.param(pd.Series(ROWS), InputForm.ONE, [3], id="series-of-rows"),
        pytest.param(pd.DataFrame(ROWS), InputForm.ONE, [3], id="frame"),
    ],
)
def test_sequences_of_other_libraries_are_read(query: Any, form: InputForm, lengths: list[int]):
    call = encode_vectors(OPTIONS, AttendInputs(query))
    assert call.response_shape.form is form
    assert list(call.request.query.lengths) == lengths
    np.testing.assert_array_equal(np.frombuffer(call.request.query.data, "<f4"), EXACT.ravel())


def test_nested_lists_beside_a_batch_are_a_batch():
    call = encode_vectors(OPTIONS, AttendInputs(EXACT[None], [ROWS], [ROWS], mask=[[True, False, True]]))
    assert list(call.request.key.lengths) == list(call.request.value.lengths) == [3]


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        pytest.param([3, 1, 2], [3], id="list-of-integers"),
        pytest.param(range(3), [3], id="range"),
        pytest.param(torch.tensor([3, 1, 2]), [3], id="tensor"),
        pytest.param(pd.Series([3, 1, 2]), [3], id="series"),
        pytest.param(pd.Series([3, 1, 2], dtype="Int64"), [3], id="nullable-series"),
        pytest.param(pd.Series([[3], [1, 2]]), [1, 2], id="series-of-lists"),
        pytest.param([torch.tensor([3]), [1, 2]], [1, 2], id="tensors-and-lists"),
    ],
)
def test_token_ids_of_other_libraries_are_read(ids: Any, lengths: list[int]):
    assert list(encode_tokens(OPTIONS, ids).request.token_ids.lengths) == lengths


@pytest.mark.parametrize(
    "text", [("a", "b c"), pd.Series(["a", "b c"], [5, 6]), np.array(["a", "b c"])], ids=type
)
def test_texts_of_other_libraries_are_read(text: Any):
    assert list(encode_texts(OPTIONS, text).request.text.texts) == ["a", "b c"]


def test_masks_and_lengths_of_other_libraries_are_read():
    batch = torch.ones(2, 3, 4)
    call = encode_vectors(
        OPTIONS,
        AttendInputs(batch, lengths=pd.Series([1, 3]), mask=torch.ones(2, 3, dtype=torch.bool)),
    )
    assert list(call.request.query.lengths) == [1, 3]
    assert call.request.mask.bits == bytes([0b1111])
    masks = pd.Series([np.ones(3, bool), np.zeros(1, bool)])
    call = encode_vectors(OPTIONS, AttendInputs([ONE, ONE[:1]], mask=masks))
    assert call.request.mask.bits == bytes([0b0111])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4028234e38, 1e-300])
def test_a_number_that_float32_represents_is_sent(value: float):
    (sent,) = np.frombuffer(encode_vectors(OPTIONS, AttendInputs([[value]])).request.query.data, "<f4")
    np.testing.assert_equal(sent, np.float32(value))
