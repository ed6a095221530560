"""Elements of tensors: JSON to little-endian bytes and back. NaN and infinity have no form in JSON."""

import math
import struct
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from attention_serving.server.api.open_inference.tensors import BYTES
from attention_serving.server.api.tensors import DTYPES
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array
from attention_serving.server.http.schemas import NOT_FINITE

Raw: TypeAlias = "bytes | memoryview"
LENGTH = struct.Struct("<I")
# The Python types of JSON values that a type of elements takes, by NumPy's kind of it.
ACCEPTED: dict[str, frozenset[type]] = {
    "b": frozenset({bool}),
    "i": frozenset({int}),
    "u": frozenset({int}),
    "f": frozenset({int, float}),
}
WORDS = {"b": "true and false", "i": "integers", "u": "integers", "f": "numbers"}
JSON_NAMES = {str: "a string", bool: "a boolean", type(None): "null", list: "an array", dict: "an object"}


def to_bytes(field: str, data: Any, datatype: str, shape: tuple[int, ...]) -> bytes:
    """The elements of `data`, row-major.

    Args:
        field: Name of the field, for errors.
        data: The JSON array: flat, or nested as the shape says.
        datatype: Type of the elements.
        shape: Sizes of the axes.

    Raises:
        InvalidRequestError: The data do not fit the type or the shape, or the type has no form in JSON.
    """
    if datatype != BYTES and datatype not in DTYPES:
        raise InvalidRequestError(field, f"{datatype} has no form in JSON; send it with binary_data_size")
    elements = _flat(field, data, shape)
    if datatype == BYTES:
        return _strings(field, elements)
    return _numbers(field, elements, datatype).tobytes()


def to_json(field: str, data: Raw, datatype: str) -> Any:
    """The elements of an output, flat: an array that the JSON encoder takes.

    Args:
        field: Name of the field, for errors.
        data: The elements.
        datatype: Type of the elements.

    Raises:
        InvalidRequestError: An element has no form in JSON.
    """
    if datatype == BYTES:
        return _texts(field, memoryview(data))
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise InvalidRequestError(field, f"{datatype} has no form in JSON; request it with binary_data")
    array = np.frombuffer(data, dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequestError(field, f"{NOT_FINITE}; request it with binary_data")
    return array


def _flat(field: str, data: Any, shape: tuple[int, ...]) -> list[Any]:
    """The elements of an array that is flat, or nested exactly as the shape says."""
    if not isinstance(data, list):
        raise InvalidRequestError(field, f"data is {_name(type(data))}; must be an array")
    is_nested = len(shape) > 1 and data and isinstance(data[0], list)
    elements: list[Any] = _unnested(field, data, shape) if is_nested else data
    if len(elements) != math.prod(shape):
        raise InvalidRequestError(field, f"has {len(elements)} elements; its shape is {list(shape)}")
    return elements


def _unnested(field: str, data: list[Any], shape: tuple[int, ...]) -> list[Any]:
    for axis, size in enumerate(shape[1:], 1):
        for row in data:
            if not isinstance(row, list) or len(row) != size:
                found = f"{len(row)} entries" if isinstance(row, list) else _name(type(row))
                raise InvalidRequestError(
                    field, f"data has {found} on axis {axis}; its shape is {list(shape)}"
                )
        data = list(chain.from_iterable(data))
    return data


def _numbers(field: str, elements: list[Any], datatype: str) -> Array:
    dtype = DTYPES[datatype]
    wrong = set(map(type, elements)) - ACCEPTED[dtype.kind]
    if wrong:
        found = ", ".join(sorted(_name(kind) for kind in wrong))
        raise InvalidRequestError(field, f"data contains {found}; {datatype} takes {WORDS[dtype.kind]}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements, dtype)
    except OverflowError:
        raise InvalidRequestError(field, f"data contains a number beyond the range of {datatype}") from None
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidRequestError(field, f"data contains a number beyond the range of {datatype}")
    return array


def _strings(field: str, elements: list[Any]) -> bytes:
    wrong = set(map(type, elements)) - {str}
    if wrong:
        found = ", ".join(sorted(_name(kind) for kind in wrong))
        raise InvalidRequestError(field, f"data contains {found}; BYTES takes strings")
    encoded = [element.encode() for element in elements]
    return b"".join(chain.from_iterable((LENGTH.pack(len(text)), text) for text in encoded))


def _texts(field: str, data: memoryview) -> list[str]:
    texts, at = [], 0
    try:
        while at < len(data):
            start = at + LENGTH.size
            at = start + LENGTH.unpack_from(data, at)[0]
            texts.append(str(data[start:at], "utf-8"))
    except (UnicodeDecodeError, struct.error):
        raise InvalidRequestError(field, "is not UTF-8; request it with binary_data") from None
    return texts


def _name(kind: type) -> str:
    return JSON_NAMES.get(kind, "a number with a fraction or beyond 64 bits" if kind is float else "a number")
