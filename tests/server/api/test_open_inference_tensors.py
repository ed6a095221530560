"""Tensors of the Open Inference Protocol: raw, typed and BYTES."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference.tensors import BYTES, CONTENTS, KNOWN_DATATYPES, decode_texts
from attention_serving.server.api.tensors import DTYPES
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array
from tests.server.api.messages import decode_inputs, packed

shapes = array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
named_tensors = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: st.tuples(st.just(name), arrays(DTYPES[name], shapes))
)


def raw(datatype: str, shape: list[int], data: bytes, **contents: Any) -> pb.ModelInferRequest:
    """A request with one input in raw contents."""
    message = pb.ModelInferRequest(raw_input_contents=[data])
    message.inputs.add(name="query", datatype=datatype, shape=shape)
    if contents:
        message.inputs[0].contents.CopyFrom(pb.InferTensorContents(**contents))
    return message


def typed(datatype: str, shape: list[int], **contents: Any) -> pb.ModelInferRequest:
    """A request with one input in typed fields."""
    message = pb.ModelInferRequest()
    message.inputs.add(
        name="query", datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents)
    )
    return message


def prepared(build: Callable[[pb.ModelInferRequest], object]) -> pb.ModelInferRequest:
    """A valid request with two inputs, with changes."""
    message = pb.ModelInferRequest(raw_input_contents=[bytes(4), bytes(8)])
    message.inputs.add(name="query", datatype="FP32", shape=[1])
    message.inputs.add(name="key", datatype="FP32", shape=[2])
    build(message)
    return message


@given(tensors=st.lists(named_tensors, min_size=1, max_size=3))
def test_raw_entries_are_matched_by_position_and_not_copied(tensors: list[tuple[str, Array]]) -> None:
    message = pb.ModelInferRequest()
    for index, (datatype, array) in enumerate(tensors):
        message.inputs.add(name=f"in{index}", datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    found = decode_inputs(message)
    assert list(found) == [f"in{index}" for index in range(len(tensors))]
    for decoded, (datatype, array) in zip(found.values(), tensors, strict=True):
        np.testing.assert_array_equal(decoded, array)
        assert decoded.dtype == DTYPES[datatype]
        assert not decoded.flags.owndata
        assert not decoded.flags.writeable


@given(tensor=named_tensors.filter(lambda tensor: tensor[0] != "FP16"))
def test_typed_elements_become_the_array(tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    message = typed(datatype, list(array.shape), **{CONTENTS[datatype]: array.ravel().tolist()})
    found = decode_inputs(message)["query"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == DTYPES[datatype]


@given(elements=st.lists(st.binary(max_size=9), min_size=1, max_size=6), as_raw=st.booleans())
def test_elements_of_type_bytes_are_decoded(elements: list[bytes], *, as_raw: bool) -> None:
    shape = [len(elements), 1]
    message = raw(BYTES, shape, packed(elements)) if as_raw else typed(BYTES, shape, bytes_contents=elements)
    found = decode_inputs(message)["query"]
    assert found.shape == (len(elements), 1)
    assert found.ravel().tolist() == elements


KNOWN = "must be one of " + ", ".join(KNOWN_DATATYPES)
REFUSALS = {
    "too few bytes": (
        raw("FP32", [2, 3], bytes(23)),
        "query: has 23 bytes; 2 x 3 elements of float32 need 24 bytes",
    ),
    "unknown type": (raw("FP8", [1], b"1"), f"query: datatype 'FP8' is unknown; {KNOWN}"),
    "too many axes": (raw("FP32", [1] * 65, bytes(4)), "query: has 65 axes; the limit is 64"),
    "negative size": (
        raw("FP32", [-1, -1], bytes(4)),
        "query: has shape [-1, -1]; every size must be 1 or more",
    ),
    "too many sequences": (
        raw("FP32", [4097, 1, 4], b""),
        "query: contains 4097 sequences; the limit is 4096",
    ),
    "raw beside typed": (
        raw("FP32", [1], bytes(4), fp32_contents=[1.0]),
        "query: has contents, but the request has raw_input_contents too",
    ),
    "missing raw entry": (
        prepared(lambda message: message.raw_input_contents.pop()),
        "raw_input_contents: has no entry for input 'key'",
    ),
    "extra raw entry": (
        prepared(lambda message: message.raw_input_contents.append(b"")),
        "raw_input_contents: has 3 entries; the request has 2 inputs",
    ),
    "input twice": (
        prepared(lambda message: setattr(message.inputs[1], "name", "query")),
        "query: is sent twice; each input must be sent once",
    ),
    "shared memory": (
        prepared(lambda m: setattr(m.inputs[1].parameters["shared_memory_region"], "string_param", "r")),
        "key.parameters[shared_memory_byte_size]: is missing",
    ),
    "typed count": (typed("FP32", [2, 2], fp32_contents=[1]), "query: has 1 elements; its shape is [2, 2]"),
    "typed in the wrong field": (
        typed("FP32", [1], fp64_contents=[1]),
        "query: is FP32 and fills fp64_contents; must fill fp32_contents only",
    ),
    "typed fp16": (typed("FP16", [1], fp32_contents=[1]), "query: FP16 must be sent in raw_input_contents"),
    "uint16 overflow": (
        typed("UINT16", [1], uint_contents=[65536]),
        "query: contains 65536; UINT16 takes 0 to 65535",
    ),
    "bytes count": (raw(BYTES, [2], packed([b"a"])), "query: has 1 elements; its shape is [2]"),
    "bytes cut in a length": (
        raw(BYTES, [2], packed([b"ab"]) + b"\x01\x00"),
        "query: the element at byte 6 extends beyond the end of the data",
    ),
    "bytes cut in an element": (
        raw(BYTES, [1], struct.pack("<I", 2**32 - 1) + b"ab"),
        "query: the element at byte 0 extends beyond the end of the data",
    ),
}


@pytest.mark.parametrize(("message", "says"), REFUSALS.values(), ids=REFUSALS)
def test_an_inconsistent_message_is_refused_and_names_the_field(
    message: pb.ModelInferRequest, says: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_inputs(message)
    assert (caught.value.field, caught.value.message) == (says.partition(": ")[0], says)


def test_texts_are_decoded_in_row_major_order() -> None:
    tensor = np.array([[b"Life", "ä".encode()], [b"", b"x"]], object)
    assert decode_texts("text", tensor) == (b"Life", "ä".encode(), b"", b"x")


@pytest.mark.parametrize("tensor", [np.zeros(2, np.int64), np.array([], object)], ids=["numbers", "none"])
def test_a_tensor_without_text_is_refused(tensor: Array) -> None:
    with pytest.raises(InvalidRequestError, match="text: must be a BYTES tensor with at least one element"):
        decode_texts("text", tensor)
