"""Cells of every type of column as sequences."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from attention_client.enrich import cells
from attention_client.enrich.cells import read_numbers, read_texts
from attention_client.enrich.outcome import EnrichError

WIDTH = 3
ROWS = [[[1.0, 2, 3], [4, 5, 6]], None, [], [[7, 8, 9]]]
FLAT = [None if row is None else [number for vector in row for number in vector] for row in ROWS]
NESTED = pa.list_(pa.list_(pa.float32()))
TYPES = [
    NESTED,
    pa.list_(pa.list_(pa.float64())),
    pa.list_(pa.list_(pa.int32())),
    pa.large_list(pa.large_list(pa.float32())),
    pa.list_(pa.list_(pa.float32(), WIDTH)),
    pa.list_(pa.float32()),
]


def shown(found: cells.Cells) -> list[Any]:
    return [None if value is None else value.tolist() for value in found[0]]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_lists_of_vectors_and_flat_lists_are_sequences_and_slices_read_as_their_own_rows(
    kind: pa.DataType,
) -> None:
    rows = ROWS if pa.types.is_nested(kind.value_type) else FLAT
    whole = pa.array([*rows, *rows], kind)
    for start in range(len(whole)):
        for stop in range(start, len(whole) + 1):
            found = read_numbers(whole[start:stop], WIDTH)
            assert shown(found) == [*ROWS, *ROWS][start:stop]
            assert not found[1]
            assert {value.dtype.name for value in found[0] if value is not None} <= {"float32"}


def test_fixed_lists_and_tensors_are_sequences_of_fixed_length() -> None:
    column = pa.array([[1, 2, 3, 4, 5, 6], None, [7, 8, 9, 10, 11, 12]], pa.list_(pa.float32(), 2 * WIDTH))
    assert shown(read_numbers(column, WIDTH)) == [[[1, 2, 3], [4, 5, 6]], None, [[7, 8, 9], [10, 11, 12]]]
    tensors = np.arange(12, dtype=np.float32).reshape(2, 2, WIDTH)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    assert shown(read_numbers(column, WIDTH)) == tensors.tolist()
    permuted = pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((1, WIDTH, 2)).transpose(0, 2, 1))
    with pytest.raises(EnrichError, match=r"axes are permuted, \[1, 0\]"):
        read_numbers(permuted, WIDTH)
    with pytest.raises(EnrichError, match=r"holds tensors of shape \[2, 3\]; the model takes vectors of 2"):
        read_numbers(column, 2)


GOOD = [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("good", "cell", "words"),
    [
        (GOOD, [[1.0, 2.0, 3.0], [1.0]], "its vectors have 1, 3 numbers; the model takes 3"),
        (GOOD, [None], "its vectors have null numbers"),
        (GOOD, [[1e300, 0.0, 0.0]], "it holds a null, or a number outside the range of float32"),
        (GOOD, [[1.0, None, 3.0]], "it holds a null, or a number outside the range of float32"),
        (GOOD[0], [1.0, 2.0], "it holds 2 numbers, not a multiple of 3"),
    ],
)
def test_an_invalid_cell_is_refused_and_affects_no_other(good: Any, cell: Any, words: str) -> None:
    found = read_numbers(pa.array([good, cell, good]), WIDTH)
    assert shown(found) == [GOOD, None, GOOD]
    assert list(found[1]) == [1]
    assert words in found[1][1]


@pytest.mark.parametrize("column", [[1.0], ["text"], [["a"]], [[["a"]]], [{"a": 1}]], ids=str)
def test_a_column_of_another_type_is_an_error(column: Any) -> None:
    with pytest.raises(EnrichError, match="vectors are lists of numbers"):
        read_numbers(pa.array(column), WIDTH)


def test_ids_are_lists_of_integers() -> None:
    found = read_numbers(pa.array([[1, 2], None, [], [3, None], [2**63]], pa.list_(pa.uint64())), None)
    assert shown(found) == [[1, 2], None, [], None, None]
    message = "it holds a null, or a number outside the range of int64"
    assert found[1] == {3: message, 4: message}
    with pytest.raises(EnrichError, match="token ids are lists of integers"):
        read_numbers(pa.array([[1.5]]), None)


def test_texts_are_strings() -> None:
    texts = ["a b", None, ""]
    indices = pa.array([0, None, 1])
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        categories = pa.DictionaryArray.from_arrays(indices, pa.array(["a b", ""], kind))
        runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), pa.array(texts, kind))
        for column in (pa.array(texts, kind), categories, runs):
            assert read_texts(column) == (texts, {})
    with pytest.raises(EnrichError, match="takes strings"):
        read_texts(pa.array([1]))


def test_a_text_that_is_not_utf8_is_refused_and_affects_no_other() -> None:
    column = pa.array([b"a", b"b\xff", None]).view(pa.string())
    message = "it is not UTF-8: invalid start byte at byte 1"
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert read_texts(column.cast(kind)) == (["a", None, None], {1: message})
    assert read_texts(column.dictionary_encode()) == (["a", None, None], {1: message})
