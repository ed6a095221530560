"""FP16 and BF16 on the wire, against PyTorch's own conversions: every value, and every rounding."""

import numpy as np
import pytest
import torch

from attention_serving.server.api.tensors import Allowance, from_bytes, narrowed
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.types import Array

HALVES = {"FP16": torch.float16, "BF16": torch.bfloat16}
EVERY_VALUE = np.arange(1 << 16, dtype=np.uint16)


def bits(values: torch.Tensor) -> Array:
    found: Array = values.view(torch.uint16).numpy()
    return found


@pytest.fixture
def numbers() -> Array:
    """Numbers of every magnitude, numbers in the middle of two others, and those that are none."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    ties = ((EVERY_VALUE.astype(np.uint32) << 16) | 0x8000).view(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 65_504, 65_519, 65_520, 3.4e38, -3.4e38, 1e-45, 6e-8]
    return np.concatenate([random, ties, np.array(special, np.float32)])


@pytest.mark.parametrize("wire", HALVES)
def test_every_value_is_read_as_pytorch_reads_it(wire: str) -> None:
    found = from_bytes("query", EVERY_VALUE.tobytes(), wire, EVERY_VALUE.shape)
    expected = torch.from_numpy(EVERY_VALUE.copy()).view(HALVES[wire]).float().numpy()
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == np.float32


@pytest.mark.parametrize("wire", HALVES)
def test_every_number_is_rounded_as_pytorch_rounds_it(wire: str, numbers: Array) -> None:
    found = narrowed(numbers, wire)
    expected = torch.from_numpy(numbers).to(HALVES[wire])
    none = np.isnan(numbers)
    np.testing.assert_array_equal(found.view(np.uint16)[~none], bits(expected)[~none])
    assert np.isnan(from_bytes("x", found.tobytes(), wire, found.shape)[none]).all()


@pytest.mark.parametrize("wire", HALVES)
def test_part_of_a_larger_array_is_rounded_like_a_whole_one(wire: str, numbers: Array) -> None:
    table = numbers[:6000].reshape(60, 100)
    np.testing.assert_array_equal(narrowed(table[:, :7], wire), narrowed(table, wire)[:, :7])


def test_fp32_is_neither_copied_nor_counted(numbers: Array) -> None:
    nothing = Allowance(Limits(max_input_bytes=0))
    data = numbers.tobytes()
    found = from_bytes("query", data, "FP32", numbers.shape, nothing)
    assert np.shares_memory(found, np.frombuffer(data, np.uint8))
    assert narrowed(numbers, "FP32") is numbers


@pytest.mark.parametrize("wire", HALVES)
def test_other_types_than_float32_are_not_converted(wire: str) -> None:
    assert narrowed(EVERY_VALUE, wire) is EVERY_VALUE


@pytest.mark.parametrize("wire", HALVES)
def test_the_copy_is_checked_and_counted_before_it_is_made(wire: str) -> None:
    reservation = MemoryBudget(1 << 20).reserve(0)
    from_bytes("query", bytes(20), wire, (2, 5), Allowance(Limits(max_input_bytes=40), reservation))
    assert reservation.size == 40
    with pytest.raises(LimitExceededError, match="query: would have 40 bytes decoded; the limit is 39"):
        from_bytes("query", bytes(20), wire, (2, 5), Allowance(Limits(max_input_bytes=39)))
