"""Fields, numbers and elements that are extracted from messages: the protobuf library and PyTorch agree."""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attention_serving.protos.attention.v1 import attention_pb2 as typed
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import requests as attention
from attention_serving.server.api.attention.handlers import MAX_ID_BYTES
from attention_serving.server.api.open_inference import requests as open_inference
from attention_serving.server.api.open_inference.requests import CONTENT_TYPES
from attention_serving.server.api.tensors import NAME_BY_DTYPE, Allowance, cast_floats, from_bytes
from attention_serving.server.api.wire import (
    ExtractedFields,
    FieldExtractor,
    PackedNumbers,
    encode_field,
    leading_text,
    select_fields,
)
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.types import Array
from tests.server.api.messages import UNCOUNTED, allowing, read_infer

INFER = select_fields(pb.ModelInferRequest.DESCRIPTOR, open_inference.PATHS)
ATTEND = select_fields(typed.AttendRequest.DESCRIPTOR, attention.PATHS)
ATTEND_STREAM = select_fields(
    typed.AttendStreamRequest.DESCRIPTOR, [f"request.{path}" for path in attention.PATHS]
)
Fields = dict[tuple[str | int, ...], list[bytes]]
WIDE = (10_000, 100_000)
content = st.binary(max_size=300)
numbers = st.integers(0, 2**64 - 1)


@st.composite
def infer_requests(draw: st.DrawFn) -> pb.ModelInferRequest:
    """Requests with every kind of field: numbers, strings, maps, submessages, contents."""
    message = pb.ModelInferRequest(model_name=draw(st.text()), id=draw(st.text()))
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.inputs.add(name=draw(st.text()), shape=draw(st.lists(st.integers(-(2**62), 2**62))))
        tensor.contents.uint64_contents.extend(draw(st.lists(numbers, max_size=5)))
        tensor.contents.fp32_contents.extend(draw(st.lists(st.floats(width=32, allow_nan=False), max_size=3)))
        tensor.contents.bytes_contents.extend(draw(st.lists(content, max_size=3)))
    message.parameters["timeout"].int64_param = draw(st.integers(-(2**63), 2**63 - 1))
    message.parameters["share"].double_param = draw(st.floats(allow_nan=False))
    message.raw_input_contents.extend(draw(st.lists(content, max_size=4)))
    return message


def vectors(data: bytes, lengths: Sequence[int] = (1, 300)) -> typed.VectorSequences:
    return typed.VectorSequences(data_type=typed.DATA_TYPE_FP32, width=3, lengths=lengths, data=data)


@st.composite
def attend_requests(draw: st.DrawFn) -> typed.AttendRequest:
    """Requests, or parts of requests, with one kind of query or none."""
    lengths = draw(st.lists(st.integers(0, 2**32 - 1), max_size=4))
    signed = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
    texts = draw(st.lists(st.text(), max_size=3))
    members: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"query": vectors(draw(content), lengths)},
                {"token_ids": typed.TokenSequences(lengths=lengths, ids=signed)},
                {"text": typed.TextSequences(texts=texts, pairs=texts)},
                {"text": typed.TextSequences(prompt="query")},
                {"key": vectors(draw(content), lengths)},
            ]
        )
    )
    return typed.AttendRequest(model_name=draw(st.text()), positions=signed, **members)


def group(number: int, content: bytes) -> bytes:
    """A group with a number below 16, which the library takes as an unknown field."""
    return bytes([number << 3 | 3]) + content + bytes([number << 3 | 4])


# With fields of the numbers of those that are extracted, in a group in a group.
GROUPS = b"".join(group(number, group(2, b"\x3a\x01a\x2a\x00") + b"\x1a\x01b") for number in (1, 3, 5, 7, 15))
REPLACED = [
    typed.AttendRequest(token_ids=typed.TokenSequences(lengths=[1], ids=[5])),
    typed.AttendRequest(text=typed.TextSequences()),
    typed.AttendRequest(token_ids=typed.TokenSequences(lengths=[1], ids=[6])),
]


def put_back(rest: Message, fields: Fields) -> None:
    """Adds fields that were extracted to the message that is left."""
    for path, occurrences in fields.items():
        message: Any = rest
        for step in path[:-1]:
            message = message[step] if isinstance(step, int) else getattr(message, step)
        number = message.DESCRIPTOR.fields_by_name[path[-1]].number
        # Numbers in one occurrence or in many, strings and bytes: the library merges them.
        message.MergeFromString(b"".join(b"".join(encode_field((number,), [found])) for found in occurrences))


def extract(data: bytes, root: ExtractedFields, bounds: tuple[int, int] = WIDE) -> tuple[bytes, Fields]:
    extractor = FieldExtractor(data, *bounds)
    remainder = extractor.extract(root, (), 0, len(data))
    fields = {
        path: [data[start:end] for start, end in spans] for path, spans in extractor.byte_ranges.items()
    }
    return remainder, fields


def assert_extracted(data: bytes, root: ExtractedFields, parse: Callable[[bytes], Message]) -> None:
    rest, fields = extract(data, root)
    found = parse(rest)
    put_back(found, fields)
    assert found == parse(data)


@given(
    messages=st.lists(infer_requests(), min_size=1, max_size=3)
    | st.lists(attend_requests(), min_size=1, max_size=4)
)
@example(messages=REPLACED)
def test_what_is_cut_out_and_what_is_left_are_what_the_library_parses(messages: list[Any]) -> None:
    # Messages in a row are one message: their fields are merged, repeated fields are joined, and of a oneof
    # the member that comes last is kept.
    data, kind = GROUPS.join([*(message.SerializeToString() for message in messages), b""]), type(messages[0])
    assert_extracted(data, INFER if kind is pb.ModelInferRequest else ATTEND, kind.FromString)
    if kind is typed.AttendRequest:
        streamed = [typed.AttendStreamRequest(request=message).SerializeToString() for message in messages]
        assert_extracted(b"".join(streamed), ATTEND_STREAM, typed.AttendStreamRequest.FromString)


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x3a", b"\x3a\x05ab", b"\x3b", b"\x3b\x2c", b"\x3c", b"\x0b" * 101 + b"\x0c" * 101),
        *(b"\x0d\x00", b"\xff" * 11, b"\x3a" + b"\xff" * 9 + b"\x01", b"\x1a\x01\xff"),
    ],
    ids=[
        *("no length", "short content", "open group", "wrong group", "no group", "deep group"),
        *("short number", "endless number", "huge length", "id"),
    ],
)
def test_malformed_messages_are_refused_as_the_library_refuses_them(data: bytes) -> None:
    with pytest.raises(DecodeError):
        pb.ModelInferRequest.FromString(data)
    with pytest.raises(DecodeError):
        read_infer(data)


BEYOND = {
    "fields": (b"\x08\x01" * 21, "has more than 20 fields, which is the limit"),
    "fields of groups": (group(15, b"\x08\x01" * 21), "has more than 20 fields"),
    "fields of inputs": (b"\x2a\x2c\x2a\x2a" + b"\x08\x01" * 21, "has more than 20 fields"),
    "rest": (b"\x0a\x31" + bytes(49), "has at least 51 bytes besides tensors, numbers and texts"),
}


@pytest.mark.parametrize(("data", "says"), BEYOND.values(), ids=BEYOND)
def test_messages_beyond_the_bounds_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(LimitExceededError, match=says):
        extract(data, INFER, (20, 50))


@given(text=st.text())
@example(text="i" * MAX_ID_BYTES)
def test_the_text_that_a_message_begins_with_is_read(text: str) -> None:
    message = typed.AttendStreamRequest(id=text, request=typed.AttendRequest(query=vectors(bytes(5000))))
    assert leading_text(message.SerializeToString(), 1) == text
    for data in (b"", b"\x0a", b"\x0a\x05ab", b"\x12\x01a", b"\xff" * 20, b"\x0a\xff\x7f"):
        assert leading_text(data, 1) == ""


@pytest.mark.parametrize("name", CONTENT_TYPES)
def test_packed_numbers_become_the_array(name: str) -> None:
    dtype = CONTENT_TYPES[name]
    # Of a narrow type all bits but the sign, which is sent in ten bytes.
    expected = np.array([0, 1, 0.5, -1] if dtype.kind in "if" else [0, 1, 2**31], dtype)
    data = pb.InferTensorContents(**{name: expected.tolist()}).SerializeToString()
    _, fields = extract(data * 2, select_fields(pb.InferTensorContents.DESCRIPTOR, [name]))
    numbers = PackedNumbers([memoryview(part) for part in fields[name,]], dtype)
    np.testing.assert_array_equal(numbers.array(), [*expected, *expected])
    assert (numbers.array().dtype, len(numbers)) == (dtype, 2 * len(expected))


def test_integers_of_a_fixed_width_are_a_view_of_the_message() -> None:
    content = memoryview(struct.pack("<2I", 7, 2**32 - 1))
    numbers = PackedNumbers([content], np.dtype("<u4"), is_fixed=True)
    assert (numbers.array().tolist(), len(numbers)) == ([7, 2**32 - 1], 2)
    assert np.shares_memory(numbers.array(), np.frombuffer(content, np.uint8))
    assert PackedNumbers([content] * 2, np.dtype("<u4"), is_fixed=True).array().tolist() == [7, 2**32 - 1] * 2


@pytest.mark.parametrize(
    ("is_fixed", "content"),
    [(False, [b"\x80"]), (False, [b"\x80" * 11]), (False, [b"\x80", b"\x01"]), (True, [bytes(7)])],
    ids=["unfinished", "endless", "in two places", "within a number"],
)
def test_numbers_that_are_damaged_are_refused(content: list[bytes], *, is_fixed: bool) -> None:
    with pytest.raises(InvalidRequestError, match="number"):
        PackedNumbers([memoryview(part) for part in content], np.dtype("<u4"), is_fixed=is_fixed).array()


HALVES = {"FP16": torch.float16, "BF16": torch.bfloat16}
EVERY_VALUE = np.arange(1 << 16, dtype=np.uint16)
tensors = st.sampled_from(sorted(NAME_BY_DTYPE, key=str)).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(array=tensors)
def test_bytes_of_an_array_become_that_array(array: Array) -> None:
    data, nothing = array.tobytes(), allowing(Limits(max_input_bytes=0))
    found = from_bytes("query", data, NAME_BY_DTYPE[array.dtype], array.shape, nothing)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert not found.flags.writeable
    assert array.size == 0 or np.shares_memory(found, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("wire", HALVES)
def test_every_value_is_read_as_pytorch_reads_it(wire: str) -> None:
    reservation, size = Reservation(MemoryBudget(1 << 20)), 4 * EVERY_VALUE.size
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
    found = cast_floats(numbers, wire)
    expected: Array = torch.from_numpy(numbers).to(HALVES[wire]).view(torch.uint16).numpy()
    none = np.isnan(numbers)
    np.testing.assert_array_equal(found.view(np.uint16)[~none], expected[~none])
    assert np.isnan(from_bytes("x", found.tobytes(), wire, found.shape, UNCOUNTED)[none]).all()
    table = numbers[:6000].reshape(60, 100)
    np.testing.assert_array_equal(cast_floats(table[:, :7], wire), cast_floats(table, wire)[:, :7])
    assert cast_floats(EVERY_VALUE, wire) is EVERY_VALUE
