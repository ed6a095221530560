"""Cells of every type of column as sequences, and results as columns."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from attention_client.enrich.cells import (
    Cells,
    check_widths,
    pooled_column,
    read_ids,
    read_texts,
    read_vectors,
    vectors_column,
    vectors_type,
    weights_column,
    weights_type,
)
from attention_client.enrich.outcome import EnrichError

WIDTH = 3
ROWS = [[[1.0, 2, 3], [4, 5, 6]], None, [], [[7, 8, 9]]]
FLAT = [None if row is None else [number for vector in row for number in vector] for row in ROWS]
NESTED_TYPES = [
    pa.list_(pa.list_(pa.float32())),
    pa.list_(pa.list_(pa.float64())),
    pa.list_(pa.list_(pa.float16())),
    pa.list_(pa.list_(pa.int32())),
    pa.large_list(pa.large_list(pa.float32())),
    pa.list_(pa.list_(pa.float32(), WIDTH)),
]


def shown(cells: Cells) -> list[Any]:
    return [None if value is None else value.tolist() for value in cells.values]


@pytest.mark.parametrize("kind", NESTED_TYPES, ids=str)
def test_lists_of_vectors_are_sequences(kind: pa.DataType) -> None:
    cells = read_vectors(pa.array(ROWS, kind), WIDTH)
    assert shown(cells) == ROWS
    assert not cells.refused
    assert {value.dtype for value in cells.values if value is not None} == {np.dtype(np.float32)}
    assert [value.shape for value in cells.values if value is not None] == [
        (2, WIDTH),
        (0, WIDTH),
        (1, WIDTH),
    ]


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float64())], ids=str)
def test_flat_lists_are_consecutive_vectors(kind: pa.DataType) -> None:
    assert shown(read_vectors(pa.array(FLAT, kind), WIDTH)) == ROWS


def test_a_fixed_list_is_a_sequence_of_fixed_length() -> None:
    column = pa.array([[1, 2, 3, 4, 5, 6], None, [7, 8, 9, 10, 11, 12]], pa.list_(pa.float32(), 2 * WIDTH))
    assert shown(read_vectors(column, WIDTH)) == [[[1, 2, 3], [4, 5, 6]], None, [[7, 8, 9], [10, 11, 12]]]


def test_a_tensor_of_fixed_shape_is_a_sequence() -> None:
    tensors = np.arange(12, dtype=np.float32).reshape(2, 2, WIDTH)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)
    assert shown(read_vectors(column, WIDTH)) == tensors.tolist()


def test_a_tensor_with_permuted_axes_is_an_error() -> None:
    stored = np.zeros((1, WIDTH, 2), np.float32)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(stored.transpose(0, 2, 1))
    with pytest.raises(EnrichError, match=r"axes are permuted, \[1, 0\]"):
        read_vectors(tensors, WIDTH)


def test_infinities_are_numbers() -> None:
    values = [[[float("inf"), float("nan"), -float("inf")]], [[1e300, 0.0, 0.0]]]
    cells = read_vectors(pa.array(values, pa.list_(pa.list_(pa.float64()))), WIDTH)
    np.testing.assert_array_equal(cells.values[0], np.array(values[0], np.float32))
    assert list(cells.refused) == [1]


@pytest.mark.parametrize("kind", [NESTED_TYPES[0], NESTED_TYPES[-1], pa.list_(pa.float32())], ids=str)
def test_a_slice_reads_as_its_own_rows(kind: pa.DataType) -> None:
    rows = ROWS if pa.types.is_nested(kind.value_type) else FLAT
    whole = pa.array([*rows, *rows], kind)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            assert shown(read_vectors(whole[start:stop], WIDTH)) == [*ROWS, *ROWS][start:stop]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ([[1.0, 2.0]], "its vectors have 2 numbers; the model takes 3"),
        ([[1.0, 2.0, 3.0], [1.0]], "its vectors have 1, 3 numbers"),
        ([None], "its vectors have null numbers"),
        ([[1.0, None, 3.0]], "it holds a null, or a number outside the range of float32"),
    ],
    ids=["narrow", "uneven", "null vector", "null number"],
)
def test_an_invalid_cell_is_refused_and_affects_no_other(cell: Any, words: str) -> None:
    good = [[1.0, 2.0, 3.0]]
    cells = read_vectors(pa.array([good, cell, good], pa.list_(pa.list_(pa.float32()))), WIDTH)
    assert shown(cells) == [good, None, good]
    assert list(cells.refused) == [1]
    assert words in cells.refused[1]


@pytest.mark.parametrize(
    ("cell", "words"),
    [([1.0, 2.0], "it holds 2 numbers, not a multiple of 3"), ([1.0, None, 3.0], "it holds a null")],
    ids=["remainder", "null number"],
)
def test_an_invalid_flat_cell_is_refused(cell: Any, words: str) -> None:
    cells = read_vectors(pa.array([[1.0, 2.0, 3.0], cell], pa.list_(pa.float32())), WIDTH)
    assert shown(cells) == [[[1, 2, 3]], None]
    assert words in cells.refused[1]


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0]), pa.array(["text"]), pa.array([["a"]]), pa.array([[["a"]]]), pa.array([{"a": 1}])],
    ids=["number", "text", "texts", "nested texts", "struct"],
)
def test_a_column_of_another_type_is_an_error(column: pa.Array) -> None:
    with pytest.raises(EnrichError, match="vectors are lists of numbers"):
        read_vectors(column, WIDTH)


def test_an_id_outside_int64_is_refused_and_affects_no_other() -> None:
    cells = read_ids(pa.array([[1, 2**63], [3]], pa.list_(pa.uint64())))
    assert shown(cells) == [None, [3]]
    assert cells.refused == {0: "it holds a null, or a number outside the range of int64"}


@pytest.mark.parametrize("column", [pa.nulls(2), pa.array([[], None]), pa.array([[[]], [[1.0, 2, 3]]]),
                                    pa.array(ROWS), pa.array(FLAT)], ids=str)  # fmt: skip
def test_a_column_with_one_vector_of_the_width_or_without_vectors_is_accepted(column: pa.Array) -> None:
    check_widths(column, WIDTH)


def test_ids_are_lists_of_integers() -> None:
    cells = read_ids(pa.array([[1, 2], None, [], [3, None]], pa.list_(pa.int32())))
    assert shown(cells) == [[1, 2], None, [], None]
    assert cells.refused == {3: "it holds a null, or a number outside the range of int64"}
    with pytest.raises(EnrichError, match="token ids are lists of integers"):
        read_ids(pa.array([[1.5]]))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_texts_are_strings(kind: pa.DataType) -> None:
    assert read_texts(pa.array(["a b", None, ""], kind)) == ["a b", None, ""]
    with pytest.raises(EnrichError, match="takes strings"):
        read_texts(pa.array([1]))


def test_results_convert_to_columns_of_their_types() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.random((2, WIDTH), np.float32), None, np.empty((0, WIDTH), np.float32)]
    column = vectors_column(rows, WIDTH)
    assert column.type == vectors_type(WIDTH, pooled=False)
    assert column.to_pylist() == [None if row is None else row.tolist() for row in rows]
    pooled = pooled_column([rows[0][0], None], WIDTH)
    assert pooled.type == vectors_type(WIDTH, pooled=True)
    assert pooled.to_pylist() == [rows[0][0].tolist(), None]
    weights = [rng.random((2, 1, 4), np.float32), None, rng.random((2, 3, 1), np.float32)]
    column = weights_column(weights)
    assert column.type == weights_type()
    assert column.to_pylist() == [None if row is None else row.tolist() for row in weights]


def test_empty_columns_have_their_types() -> None:
    assert vectors_column([], WIDTH).type == vectors_type(WIDTH, pooled=False)
    assert pooled_column([], WIDTH).type == vectors_type(WIDTH, pooled=True)
    assert weights_column([]).type == weights_type()
    assert shown(read_vectors(pa.array([], NESTED_TYPES[0]), WIDTH)) == []
