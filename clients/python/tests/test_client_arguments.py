"""Arguments that the client accepts, how it sends them, and what it refuses before it sends anything."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch

from attention_client import AttendInputs, AttentionClient, InvalidArgumentError, TextInputs, TokenInputs
from attention_client._connection.streams import encode_item
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions

OPTIONS = RequestOptions(model="m")
ONE, BATCH, GRID = np.ones((3, 4)), np.ones((2, 3, 4)), np.ones((2, 3, 3, 4))
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
EXACT = np.array(ROWS, np.float32)


def sent(inputs: Any) -> pb.AttendRequest:
    """What is sent for an item of a stream, as for a call with the same arguments."""
    entry, request = encode_item(5, inputs, OPTIONS)
    assert request is not None, entry
    assert request.id == "5"
    return request.request


WRONG = {
    "complex": (AttendInputs(ONE.astype(complex)), "query"),
    "booleans": (AttendInputs(ONE > 0), "query"),
    "rank 1": (np.ones(3), "query"),
    "mask of another batch": (AttendInputs(BATCH, mask=np.ones((3, 3), bool)), "mask"),
    "no rows": (np.ones((0, 4)), "query"),
    "no width": (np.ones((3, 0)), "query"),
    "empty leading axis": (np.ones((2, 0, 3, 4)), "query"),
    "empty list": ([], "query"),
    "ragged rows of one sequence": ([[1.0, 2.0], [1.0]], "query"),
    "beyond float32": (AttendInputs(ONE, ONE, ONE * 1e300), "value"),
    "tensor elsewhere": (torch.ones(3, 4, device="meta"), "query"),
    "two widths": ([ONE, np.ones((3, 5))], "query"),
    "value without key": (AttendInputs(ONE, value=ONE), "value"),
    "another number in a list": (AttendInputs([ONE], [ONE, ONE]), "key"),
    "leading axes swapped": (AttendInputs(GRID, GRID.swapaxes(0, 1)), "key"),
    "fewer values than keys": (AttendInputs(ONE, ONE, ONE[:2]), "value"),
    "key beside a context": (AttendInputs(ONE, ONE, context="id"), "key"),
    "lengths beside a context": (AttendInputs(BATCH, lengths=[3, 3], context="id"), "lengths"),
    "empty id of a context": (AttendInputs(ONE, context=""), "context"),
    "number as a context": (AttendInputs(ONE, context=3), "context"),
    "lengths for one": (AttendInputs(ONE, lengths=[3]), "lengths"),
    "length 0": (AttendInputs(BATCH, lengths=[3, 0]), "lengths"),
    "length past the rows": (AttendInputs(BATCH, lengths=[3, 4]), "lengths"),
    "too few positions": (AttendInputs(ONE, positions=np.arange(2)), "positions"),
    "mask of integers": (AttendInputs(ONE, mask=np.ones(3, int)), "mask"),
    "mask of too many keys": (AttendInputs(ONE, mask=np.ones(4, bool)), "mask"),
    "mask of rank 4 for one": (AttendInputs(ONE, mask=np.ones((1, 1, 3, 3), bool)), "mask"),
    "mask array for a list": (AttendInputs(list(BATCH), mask=np.ones((2, 3), bool)), "mask"),
    "one mask for two": (AttendInputs(list(BATCH), mask=[np.ones(3, bool)]), "mask"),
    "masks of two ranks": (AttendInputs([ONE] * 2, mask=[np.ones(3, bool), np.ones((3, 3), bool)]), "mask"),
    "real ids": (TokenInputs(np.array([1.0])), "token_ids"),
    "a batch in a list": (TokenInputs([[[1]]]), "token_ids[0]"),
    "id beyond int64": (TokenInputs(np.array([2**63], np.uint64)), "token_ids"),
    "no text": (TextInputs([]), "text"),
    "bytes": (TextInputs(b"bytes"), "text"),
    "a number among texts": (TextInputs(["a", 1]), "text[1]"),
    "surrogate": (TextInputs("\ud800"), "text"),
}


@pytest.mark.parametrize(("inputs", "field"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused_with_field_expected_and_found(inputs: Any, field: str):
    error, request = encode_item(0, inputs, OPTIONS)
    assert request is None
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.reason) == (field, "INVALID_FIELD")
    assert re.search(r"expected .*; found ", error.message)


@pytest.mark.parametrize(
    ("query", "lengths"),
    [
        pytest.param(ROWS, [3], id="nested-lists"),
        pytest.param(torch.tensor(ROWS, requires_grad=True), [3], id="tensor-with-gradient"),
        pytest.param(torch.tensor(ROWS, dtype=torch.bfloat16), [3], id="bfloat16-tensor"),
        pytest.param(list(torch.tensor(ROWS, requires_grad=True)), [3], id="row-tensors"),
        pytest.param([ROWS[:2], ROWS[2:]], [2, 1], id="lists-of-nested-lists"),
        pytest.param([torch.tensor(ROWS[:1]), EXACT[1:]], [1, 2], id="tensors-and-arrays"),
        pytest.param(pd.Series([ROWS[:1], ROWS[1:]], [7, 9]), [1, 2], id="series-of-lists"),
        pytest.param(pd.DataFrame(ROWS), [3], id="frame"),
        pytest.param(np.repeat(EXACT, 2, axis=1)[:, ::2], [3], id="strided"),
        pytest.param([np.asfortranarray(EXACT), EXACT.astype(">f8")], [3, 3], id="layouts-in-a-list"),
        pytest.param(EXACT.astype(np.uint8), [3], id="integers"),
        pytest.param(EXACT.astype(ml_dtypes.bfloat16), [3], id="bfloat16"),
    ],
)
def test_sequences_of_other_libraries_are_read(query: Any, lengths: list[int]):
    found = sent(query).query
    assert list(found.lengths) == lengths
    numbers = np.frombuffer(found.data, "<f4").reshape(-1, *EXACT.shape)
    np.testing.assert_array_equal(numbers, np.broadcast_to(EXACT, numbers.shape))


def test_nested_lists_beside_a_batch_are_a_batch():
    request = sent(AttendInputs(EXACT[None], [ROWS], [ROWS], mask=[[True, False, True]]))
    assert list(request.key.lengths) == list(request.value.lengths) == [3]


@pytest.mark.parametrize(
    ("ids", "given", "numbers", "lengths"),
    [
        pytest.param([3, 1, 2], None, [3, 1, 2], [3], id="list-of-integers"),
        pytest.param(pd.Series([3, 1, 2], dtype="Int64"), None, [3, 1, 2], [3], id="nullable-series"),
        pytest.param([torch.tensor([3]), [1, 2]], None, [3, 1, 2], [1, 2], id="tensors-and-lists"),
        pytest.param(np.array([[3, 0], [2, 4]], np.int32), [1, 2], [3, 2, 4], [1, 2], id="padded-batch"),
        pytest.param(np.array([[[3], [1]]]), None, [3, 1], [1, 1], id="leading-axes"),
    ],
)
def test_token_ids_are_sent_concatenated(ids: Any, given: Any, numbers: list[int], lengths: list[int]):
    request = sent(TokenInputs(ids, lengths=given))
    assert (list(request.token_ids.ids), list(request.token_ids.lengths)) == (numbers, lengths)


@pytest.mark.parametrize("text", ["a", ("a", "b c"), pd.Series(["a", "b c"]), np.array(["a", "b c"])])
def test_texts_are_sent_unchanged(text: Any):
    assert list(sent(TextInputs(text)).text.texts) == ([text] if isinstance(text, str) else ["a", "b c"])


def test_positions_are_sent_concatenated():
    padded, ones = np.array([[5, 6, 7], [0, 1, 2]]), np.ones((2, 3), int)
    for inputs, positions in (
        (AttendInputs(ONE, positions=range(7, 10)), [7, 8, 9]),
        (AttendInputs(BATCH, positions=padded, lengths=[1, 2]), [5, 0, 1]),
        (AttendInputs(BATCH, BATCH, positions=ones, lengths=[1, 2]), [1] * 6),  # lengths of the keys
        (AttendInputs([ONE[:1], ONE[1:]], positions=[[4], np.arange(2)]), [4, 0, 1]),
    ):
        assert list(sent(inputs).positions) == positions


def test_a_number_that_float32_represents_is_sent():
    values = [np.inf, -np.inf, np.nan, 3.4028234e38, 1e-300]
    found = np.frombuffer(sent(AttendInputs([values])).query.data, "<f4")
    np.testing.assert_equal(found, np.array(values, np.float32))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda client: client.attend(5, ONE), id="model-number"),
        pytest.param(lambda client: client.attend("\ud800", ONE), id="model-surrogate"),
        pytest.param(lambda client: client.attend("m", ONE, timeout="1"), id="timeout-text"),
        pytest.param(lambda client: client.models(timeout=float("nan")), id="timeout-nan"),
        pytest.param(lambda client: client.attend_stream("m", 3), id="requests-not-iterable"),
        pytest.param(lambda client: client.attend_stream("m", [], timeout=0), id="no-time-for-a-stream"),
        pytest.param(lambda client: client.wait_until_ready(0), id="no-time"),
        pytest.param(lambda client: client.attend("m", ONE, version=0), id="version-0"),
        pytest.param(lambda client: client.model("m", version=True), id="version-bool"),
    ],
)
def test_every_wrong_argument_of_a_call_is_an_error_of_the_client(call: Any):
    with AttentionClient("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError):
        call(client)
