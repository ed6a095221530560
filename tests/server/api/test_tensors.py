"""Conversion between bytes and arrays, without copies."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attention_serving.server.api.tensors import DATATYPES, Output, from_bytes
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array

tensors = st.sampled_from(sorted(DATATYPES, key=str)).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(array=tensors)
def test_bytes_of_an_array_become_that_array(array: Array) -> None:
    data = array.tobytes()
    found = from_bytes("query", data, DATATYPES[array.dtype], array.shape)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert not found.flags.writeable
    assert array.size == 0 or np.shares_memory(found, np.frombuffer(data, np.uint8))


@given(array=tensors, wrong=st.integers(-3, 3).filter(bool))
def test_bytes_that_do_not_fit_the_shape_are_refused(array: Array, wrong: int) -> None:
    count = max(0, array.nbytes + wrong)
    if count == array.nbytes:
        count += 1
    with pytest.raises(
        InvalidRequestError, match=rf"has {count} bytes; .* need {array.nbytes} bytes"
    ) as caught:
        from_bytes("query", bytes(count), DATATYPES[array.dtype], array.shape)
    assert caught.value.field == "query"


def test_a_shape_that_exceeds_any_memory_is_refused() -> None:
    shape = (2**62, 2**62)
    with pytest.raises(InvalidRequestError, match=f"need {4 * math.prod(shape)} bytes"):
        from_bytes("query", b"", "FP32", shape)


@given(parts=st.lists(arrays(np.float32, array_shapes(max_dims=2, max_side=4)), min_size=1, max_size=4))
def test_arrays_are_concatenated(parts: list[Array]) -> None:
    expected, output = np.concatenate([part.ravel() for part in parts]), Output("x")
    np.testing.assert_array_equal(
        np.frombuffer(b"".join([part.data for part in output.parts(parts)]), np.float32), expected
    )
    assert output.size(parts) == expected.nbytes


def test_views_are_written_in_row_major_order() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = b"".join([part.data for part in Output("x").parts([array.T])])
    assert found == np.array([0, 3, 1, 4, 2, 5], np.float32).tobytes()
