"""Elements of tensors in JSON: every finite value survives, in every type that has a form in JSON."""

import sys
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attention_serving.server.api.open_inference.tensors import BYTES
from attention_serving.server.api.tensors import DATATYPES, DTYPES
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.infer import to_bytes, to_json
from attention_serving.server.http.schemas import memory_of

SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def finite(dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:
    options = {"allow_nan": False, "allow_infinity": False} if dtype.kind == "f" else {}
    return arrays.arrays(dtype, SHAPES, elements=arrays.from_dtype(dtype, **options))  # type: ignore[arg-type]


@given(st.sampled_from(list(DTYPES.values())).flatmap(finite))
def test_numbers_survive(array: Any) -> None:
    datatype = DATATYPES[array.dtype]
    written = orjson.dumps(to_json("x", array.tobytes(), datatype), option=orjson.OPT_SERIALIZE_NUMPY)
    flat = orjson.loads(written)
    assert to_bytes("x", flat, datatype, array.shape) == array.tobytes()


@given(st.sampled_from(list(DTYPES.values())).flatmap(finite))
def test_nested_arrays_are_flat_ones(array: Any) -> None:
    datatype = DATATYPES[array.dtype]
    nested = array.tolist() if array.ndim else [array.tolist()]
    assert to_bytes("x", nested, datatype, array.shape) == array.tobytes()


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_survive(texts: list[str]) -> None:
    data = to_bytes("x", texts, BYTES, (len(texts),))
    assert to_json("x", data, BYTES) == texts


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_json_lacks(value: float, datatype: str) -> None:
    data = np.array([0, value], DTYPES[datatype]).tobytes()
    with pytest.raises(InvalidRequestError, match="contains NaN or infinity"):
        to_json("x", data, datatype)


@pytest.mark.parametrize("data", [b"\1\0\0\0\xff", b"\1\0\0"], ids=["not UTF-8", "cut"])
def test_bytes_that_are_no_strings(data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="is not UTF-8; request it with binary_data"):
        to_json("x", data, BYTES)


def size_of(value: Any) -> int:
    """What Python needs for a value and all that is in it, and for the pointer to it."""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return 8 + sys.getsizeof(value) + sum(map(size_of, inner))


@pytest.mark.parametrize(
    "entry",
    [
        b"0.5",
        b"12345678901",
        b"[]",
        b"[0.5]",
        b"{}",
        b'{"a":1.5}',
        b'{"a":1.5,"bcd":{"e":[1e9,2e9,"f"]}}',
        b'"a"',
        b'"abcdefghijklmnopqrstuvwxyz\xf0\x9d\x84\x9e"',
        b"[[[[[[[[0.5]]]]]]]]",
        b"null",
    ],
)
def test_the_estimate_of_memory_is_not_too_low(entry: bytes) -> None:
    written = b"[" + b",".join([entry] * 1000) + b"]"
    assert size_of(orjson.loads(written)) <= memory_of(written, len(written))
