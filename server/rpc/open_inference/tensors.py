"""Converts tensors of the Open Inference Protocol to arrays."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from protos.inference import open_inference_pb2 as pb
from server.engine.errors import InvalidRequestError
from server.engine.types import Array
from server.rpc.tensors import from_bytes, reshaped

BYTES = "BYTES"
DTYPES = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
# The typed field for elements of each type. FP16 has none: it is sent as raw contents.
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
Raw: TypeAlias = "bytes | memoryview"
InputTensor = pb.ModelInferRequest.InferInputTensor


def decode_tensors(message: pb.ModelInferRequest, contents: Sequence[Raw] = ()) -> dict[str, Array]:
    """Decodes the inputs of a request, by name. BYTES become arrays of `bytes` objects.

    Args:
        message: The request.
        contents: Its raw_input_contents, if they were cut out of the message.

    Raises:
        InvalidRequestError: An input contradicts itself, is repeated, or is not in a known form.
    """
    contents = contents or message.raw_input_contents
    raw = iter(contents)
    tensors: dict[str, Array] = {}
    for tensor in message.inputs:
        name, datatype = tensor.name, tensor.datatype
        if name in tensors:
            raise InvalidRequestError(name, "is given twice; each input must be given once")
        if in_shared_memory(tensor.parameters):
            raise InvalidRequestError(name, "is in shared memory, which this server does not support")
        if datatype not in DTYPES and datatype != BYTES:
            known = ", ".join([*DTYPES, BYTES])
            raise InvalidRequestError(name, f"datatype {datatype!r} is unknown; must be one of {known}")
        tensors[name] = _decode_raw(tensor, raw) if contents else _decode_typed(tensor)
    if next(raw, None) is not None:
        raise InvalidRequestError(
            "raw_input_contents", f"has {len(contents)} entries; the request has {len(tensors)} inputs"
        )
    return tensors


def in_shared_memory(parameters: Mapping[str, object]) -> bool:
    """Whether a tensor's parameters say that it is in shared memory."""
    return bool(parameters) and any(name.startswith("shared_memory") for name in parameters)


def _decode_raw(tensor: InputTensor, raw: Iterator[Raw]) -> Array:
    if tensor.HasField("contents"):
        raise InvalidRequestError(tensor.name, "has contents, but the request has raw_input_contents too")
    data = next(raw, None)
    if data is None:
        raise InvalidRequestError("raw_input_contents", f"has no entry for input {tensor.name!r}")
    if tensor.datatype == BYTES:
        return _shaped(tensor, list(_split_bytes(tensor.name, data)), np.dtype(object))
    return from_bytes(tensor.name, data, DTYPES[tensor.datatype], tensor.shape)


def _decode_typed(tensor: InputTensor) -> Array:
    field = CONTENTS.get(tensor.datatype)
    if field is None:
        raise InvalidRequestError(tensor.name, f"{tensor.datatype} must be sent in raw_input_contents")
    filled = [descriptor.name for descriptor, _ in tensor.contents.ListFields()]
    if filled not in ([], [field]):
        raise InvalidRequestError(
            tensor.name, f"is {tensor.datatype} and fills {', '.join(filled)}; must fill {field} only"
        )
    elements = list(getattr(tensor.contents, field))
    dtype = DTYPES.get(tensor.datatype, np.dtype(object))
    try:
        return _shaped(tensor, elements, dtype)
    except OverflowError as error:
        raise InvalidRequestError(tensor.name, f"{error}") from error


def _shaped(tensor: InputTensor, elements: list[Any], dtype: np.dtype[Any]) -> Array:
    if len(elements) != math.prod(tensor.shape):
        raise InvalidRequestError(
            tensor.name, f"has {len(elements)} elements; its shape is {list(tensor.shape)}"
        )
    return reshaped(tensor.name, np.array(elements, dtype), tensor.shape)


def _split_bytes(name: str, data: Raw) -> Iterator[bytes]:
    """Elements of a BYTES tensor: for each its length in 4 bytes, little-endian, and its data."""
    at = 0
    while at < len(data):
        start = at + 4
        end = start + struct.unpack_from("<I", data, at)[0] if start <= len(data) else start
        if end > len(data):
            raise InvalidRequestError(name, f"the element at byte {at} extends beyond the end of the data")
        yield bytes(data[start:end])
        at = end


def decode_texts(name: str, tensor: NDArray[Any]) -> tuple[str, ...]:
    """Decodes the texts of a BYTES tensor, in row-major order.

    Raises:
        InvalidRequestError: It is not a BYTES tensor, is empty, or has bytes that are not UTF-8.
    """
    if tensor.dtype != object or tensor.size == 0:
        raise InvalidRequestError(name, "must be a BYTES tensor with at least one element")
    try:
        return tuple(element.decode() for element in tensor.ravel())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(name, f"is not UTF-8: {error}") from error
