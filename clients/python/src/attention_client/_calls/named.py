"""Inputs and outputs by name: those of any model, of any type and number of axes.

The server knows the axes of each input. An array is sent with its shape, and may be one sequence or a batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_client._calls.arrays import (
    DATA_TYPES,
    as_array,
    as_floats,
    as_integers,
    items_of,
    narrow,
    split,
    widen,
)
from attention_client._calls.attention import EncodedCall, request_of
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Array, Arrays, InferResult, RequestOptions, Wire, encodable, type_name
from attention_client.errors import invalid

_INT64, _BOOL = np.dtype("<i8"), np.dtype("?")


def encode_infer(
    options: RequestOptions, inputs: Mapping[str, Arrays], outputs: Sequence[str] | None
) -> EncodedCall[InferResult]:
    """Encodes a call with named inputs.

    Raises:
        InvalidArgumentError: An input has a wrong type, or lists differ in length; names the input.
    """
    if not isinstance(inputs, Mapping) or not inputs:
        raise invalid("inputs", "a mapping of names to arrays", type_name(inputs))
    if isinstance(outputs, str):
        raise invalid("outputs", "a list of names, or None", type_name(outputs))
    request = request_of(options)
    request.output_names.extend(_name("outputs", name) for name in outputs or ())
    first, expected = "", None  # the first input that is a list, and its number of sequences
    for name, value in inputs.items():
        arrays, is_list = _arrays(_name("inputs", name), value)
        if is_list and expected is None:
            first, expected = name, len(arrays)
        if is_list and len(arrays) != expected:
            raise invalid(name, f"as many sequences as {first}, {expected}", len(arrays))
        _fill(request.inputs.add(name=name), arrays, options.wire)
    return EncodedCall((request,), lambda responses: _decode(responses[0], expected))


def _decode(response: pb.AttendResponse, count: int | None) -> InferResult:
    """Decodes a response; the arrays are writable copies that do not keep the response in memory.

    Args:
        response: The response.
        count: Number of sequences of a list; None if no input is a list.

    Raises:
        ValueError: The response contradicts itself or the request.
    """
    outputs = {tensors.name: _output(tensors, count) for tensors in response.outputs}
    if not outputs:
        raise ValueError("it has no outputs")
    return InferResult(outputs, response.model_name, response.model_version, response.model_digest)


def _name(field: str, name: object) -> str:
    if not isinstance(name, str):
        raise invalid(field, "names, each a str", type_name(name))
    return encodable(field, name)


def _arrays(name: str, value: Arrays) -> tuple[list[Array], bool]:
    """The arrays of one input; and whether they are a list with one for each sequence."""
    items = items_of(value)
    if items is None:
        return [_converted(name, value)], False
    if not items:
        raise invalid(name, "at least one sequence", "an empty list")
    if not any(hasattr(item, "__array__") and not isinstance(item, np.generic) for item in items):
        try:
            plain = np.asarray(items)
        except ValueError:  # nested lists of different lengths: one for each sequence
            pass
        else:
            return [_converted(name, plain)], False
    return [_converted(f"{name}[{index}]", item) for index, item in enumerate(items)], True


def _converted(name: str, value: object) -> Array:
    """Booleans as they are, integers as int64, real numbers as float32."""
    array = as_array(name, value)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu":
        return as_integers(name, array)
    if array.dtype.kind in "OUS":
        raise invalid(name, "numbers or booleans; attend_text and embed take texts", f"dtype {array.dtype}")
    return as_floats(name, array)


def _fill(message: pb.NamedTensors, arrays: Sequence[Array], wire: Wire) -> None:
    name, first = message.name, arrays[0]
    for index, array in enumerate(arrays):
        if array.dtype != first.dtype or array.ndim != first.ndim:
            expected = f"{first.ndim} axes of {first.dtype}, as {name}[0]"
            raise invalid(f"{name}[{index}]", expected, f"{array.ndim} axes of {array.dtype}")
        message.shapes.extend(array.shape)
    message.num_tensors = len(arrays)
    if first.dtype == _BOOL:
        message.data_type = pb.DATA_TYPE_BOOL
    elif first.dtype == np.int64:
        message.data_type = pb.DATA_TYPE_INT64
        arrays = [array.astype(_INT64, copy=False) for array in arrays]
    else:
        message.data_type = DATA_TYPES[wire]
        arrays = [narrow(name, array, wire) for array in arrays]
    message.data = b"".join(array.tobytes() for array in arrays)


def _output(message: pb.NamedTensors, count: int | None) -> Any:
    """One array if the inputs were arrays, otherwise a list of them."""
    name, number = message.name, message.num_tensors
    if number != (1 if count is None else count):
        raise ValueError(f"{name}: it contains {number} tensors; the request has {count or 1}")
    rank, remainder = divmod(len(message.shapes), number)
    shapes = [tuple(message.shapes[at * rank : (at + 1) * rank]) for at in range(number)]
    dtype = {pb.DATA_TYPE_INT64: _INT64, pb.DATA_TYPE_BOOL: _BOOL}.get(message.data_type)
    numbers = widen(message.data_type, message.data) if dtype is None else np.frombuffer(message.data, dtype)
    flat = numbers.astype(np.float32 if dtype is None else dtype)  # a writable copy
    size = sum(map(math.prod, shapes))
    if remainder or size != flat.size:
        raise ValueError(f"{name}: its {flat.size} elements are not the {size} of its shapes")
    arrays = split(flat, shapes)
    return arrays[0] if count is None else arrays
