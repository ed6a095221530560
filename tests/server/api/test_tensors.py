"""Elements on the wire as arrays and back: without copies, and FP16 and BF16 as PyTorch converts them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attention_serving.server.api.tensors import DATATYPES, Allowance, from_bytes, narrow
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.types import Array
from tests.server.api.messages import UNCOUNTED, allowing

HALVES = {"FP16": torch.float16, "BF16": torch.bfloat16}
EVERY_VALUE = np.arange(1 << 16, dtype=np.uint16)
tensors = st.sampled_from(sorted(DATATYPES, key=str)).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(array=tensors)
def test_bytes_of_an_array_become_that_array(array: Array) -> None:
    data, nothing = array.tobytes(), allowing(Limits(max_input_bytes=0))
    found = from_bytes("query", data, DATATYPES[array.dtype], array.shape, nothing)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert not found.flags.writeable
    assert array.size == 0 or np.shares_memory(found, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("wire", HALVES)
def test_every_value_is_read_as_pytorch_reads_it(wire: str) -> None:
    reservation, size = MemoryBudget(1 << 20).reserve(0), 4 * EVERY_VALUE.size
    allowance = Allowance(Limits(max_input_bytes=size), reservation)
    found = from_bytes("query", EVERY_VALUE.tobytes(), wire, EVERY_VALUE.shape, allowance)
    expected = torch.from_numpy(EVERY_VALUE.copy()).view(HALVES[wire]).float().numpy()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32
    assert reservation.size == size
    allowance = allowing(Limits(max_input_bytes=size - 1))
    with pytest.raises(LimitExceededError, match=f"query: would have {size} bytes decoded; the limit is"):
        from_bytes("query", EVERY_VALUE.tobytes(), wire, EVERY_VALUE.shape, allowance)


@pytest.mark.parametrize("wire", HALVES)
def test_every_number_is_rounded_as_pytorch_rounds_it(wire: str) -> None:
    """Numbers of every magnitude, those in the middle of two others, and those that are none."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    ties = ((EVERY_VALUE.astype(np.uint32) << 16) | 0x8000).view(np.float32)
    special = np.array([-0.0, math.inf, math.nan, 65_504, 65_519, 65_520, 3.4e38, 1e-45, 6e-8], np.float32)
    numbers = np.concatenate([random, ties, special, -special])
    found = narrow(numbers, wire)
    expected: Array = torch.from_numpy(numbers).to(HALVES[wire]).view(torch.uint16).numpy()
    none = np.isnan(numbers)
    np.testing.assert_array_equal(found.view(np.uint16)[~none], expected[~none])
    assert np.isnan(from_bytes("x", found.tobytes(), wire, found.shape, UNCOUNTED)[none]).all()
    table = numbers[:6000].reshape(60, 100)
    np.testing.assert_array_equal(narrow(table[:, :7], wire), narrow(table, wire)[:, :7])
    assert narrow(EVERY_VALUE, wire) is EVERY_VALUE
