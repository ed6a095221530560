"""Numbers that were cut out of messages: the protobuf library agrees."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_serving.protos.attention.v1 import attention_pb2 as attention_pb
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import protobuf_bytes as protobuf_numbers
from attention_serving.server.api.open_inference.tensors import CONTENT_TYPES
from attention_serving.server.api.protobuf_bytes import PackedNumbers, field
from attention_serving.server.engine.errors import InvalidRequestError

ELEMENTS = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
}
fields = st.sampled_from(sorted(ELEMENTS)).flatmap(
    lambda name: st.tuples(
        st.just(name), st.lists(st.lists(ELEMENTS[name], min_size=1), min_size=1, max_size=3)
    )
)


def packed(name: str, elements: list[Any]) -> memoryview:
    """The content of a packed field, as the library serializes it."""
    data = pb.InferTensorContents(**{name: elements}).SerializeToString()
    size = 0
    while data[1 + size] > 0x7F:
        size += 1
    return memoryview(data)[2 + size :]


@given(field=fields, chunk=st.integers(10, 40))
def test_packed_numbers_become_the_array(field: tuple[str, list[list[Any]]], chunk: int) -> None:
    name, occurrences = field
    dtype = CONTENT_TYPES[name]
    with pytest.MonkeyPatch.context() as patch:  # so that numbers lie across the ends of chunks
        patch.setattr(protobuf_numbers, "CHUNK_BYTES", chunk)
        numbers = PackedNumbers([packed(name, elements) for elements in occurrences], dtype)
        found = numbers.array()
    expected = np.array([element for elements in occurrences for element in elements], dtype)
    np.testing.assert_array_equal(found, expected)
    assert (found.dtype, len(numbers)) == (dtype, len(expected))


@given(data=st.binary(max_size=60), name=st.sampled_from(sorted(ELEMENTS)))
def test_arbitrary_bytes_are_refused_or_counted(data: bytes, name: str) -> None:
    numbers = PackedNumbers([memoryview(data)], CONTENT_TYPES[name])
    try:
        found = numbers.array()
    except InvalidRequestError:
        return
    assert len(found) == len(numbers)


def test_a_field_that_is_not_sent_has_no_numbers() -> None:
    numbers = PackedNumbers((), np.dtype("<u4"))
    assert (len(numbers), numbers.array().tolist()) == (0, [])


def test_numbers_of_a_fixed_width_are_not_copied() -> None:
    data = memoryview(struct.pack("<3f", 1, 2, 3))
    assert np.shares_memory(PackedNumbers([data], np.dtype("<f4")).array(), np.frombuffer(data, np.uint8))


@given(parts=st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1), min_size=1, max_size=3))
def test_integers_of_a_fixed_width_become_the_array(parts: list[list[int]]) -> None:
    packed_parts = [memoryview(struct.pack(f"<{len(part)}I", *part)) for part in parts]
    numbers = PackedNumbers(packed_parts, np.dtype("<u4"), is_fixed=True)
    expected = attention_pb.Spans.FromString(
        b"".join(part for content in packed_parts for part in field((2,), [content]))
    )
    assert numbers.array().tolist() == list(expected.starts) == [number for part in parts for number in part]
    assert len(numbers) == len(expected.starts)


def test_a_narrow_number_takes_the_lowest_bits_as_in_the_library() -> None:
    data = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x81\x80\x80\x80\x20"
    expected = pb.InferTensorContents.FromString(b"\x12\x0f" + data)
    found = PackedNumbers([memoryview(data)], np.dtype("<i4")).array().tolist()
    assert found == list(expected.int_contents)


@pytest.mark.parametrize(
    "content",
    [[b"\x80"], [b"\x01\xff"], [b"\x80" * 11], [b"\x80" * 10 + b"\1"], [b"\x80", b"\x01"]],
    ids=["one", "second", "endless", "too long", "in two places"],
)
def test_numbers_that_are_damaged_are_refused(content: list[bytes]) -> None:
    with pytest.raises(InvalidRequestError, match="number"):
        PackedNumbers([memoryview(part) for part in content], np.dtype("<u4")).array()
