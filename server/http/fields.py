"""Reads values out of parsed JSON. Errors name the field, what it is, and what it must be."""

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.errors import TooLargeError

T = TypeVar("T")
# Entries of one list or object of a request, beside elements of tensors.
MAX_ENTRIES = 256
MAX_INT64, MAX_UINT64 = 2**63 - 1, 2**64 - 1
# What Python needs for JSON, at most: for each byte of text, value with its pointer, array and object.
TEXT_BYTES, VALUE_BYTES, ARRAY_BYTES, OBJECT_BYTES = 4, 88, 96, 256
# What many writers of JSON write although it has no such values.
NOT_IN_JSON = (b"NaN", b"Infinity", b"-Infinity")
NOT_FINITE = "contains NaN or infinity, which JSON cannot express"
NAMES = {str: "a string", bool: "true or false", int: "an integer", list: "an array", dict: "an object"}


def memory_of(data: bytes | bytearray) -> int:
    """How many bytes JSON may take once it is parsed, without parsing it.

    Every value and every name follows a comma, a colon or a bracket.
    """
    values = 1 + data.count(b",") + data.count(b":")
    containers = ARRAY_BYTES * data.count(b"[") + OBJECT_BYTES * data.count(b"{")
    return TEXT_BYTES * len(data) + VALUE_BYTES * values + containers


def check_memory(data: bytes | bytearray, limit: int) -> int:
    """Returns the bytes that JSON may take once it is parsed.

    Raises:
        TooLargeError: It could take more than the limit.
    """
    size = memory_of(data)
    if size > limit:
        raise TooLargeError(
            f"the JSON could take {size} bytes of memory; the limit is {limit}; send binary tensors"
        )
    return size


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """The object that a body contains; an empty one if it is empty.

    Raises:
        InvalidRequestError: The body is not a JSON object.
    """
    if not data:
        return {}
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if data[error.pos : error.pos + 9].startswith(NOT_IN_JSON):
            raise InvalidRequestError("body", f"{NOT_FINITE}; send binary tensors") from None
        raise InvalidRequestError("body", f"is not JSON: {error}") from None
    return checked("body", found, dict)


def checked(field: str, value: Any, kind: type[T]) -> T:
    """The value, if it has that type. A boolean is not an integer.

    Raises:
        InvalidRequestError: It has another type.
    """
    if isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    raise InvalidRequestError(field, f"must be {NAMES[kind]}")


def required(owner: Mapping[str, Any], name: str, kind: type[T], field: str = "") -> T:
    """The value of a member that must be there.

    Raises:
        InvalidRequestError: It is absent or has another type.
    """
    field = field or name
    if name not in owner:
        raise InvalidRequestError(field, f"is required and must be {NAMES[kind]}")
    return checked(field, owner[name], kind)


def optional(owner: Mapping[str, Any], name: str, kind: type[T], default: T, field: str = "") -> T:
    """The value of a member that may be absent.

    Raises:
        InvalidRequestError: It has another type.
    """
    return checked(field or name, owner[name], kind) if name in owner else default


def bounded(field: str, entries: list[Any] | dict[str, Any]) -> None:
    """Checks the number of entries.

    Raises:
        InvalidRequestError: There are too many.
    """
    if len(entries) > MAX_ENTRIES:
        raise InvalidRequestError(field, f"has {len(entries)} entries; the limit is {MAX_ENTRIES}")


def natural(field: str, value: Any, most: int = MAX_INT64) -> int:
    """An integer from 0.

    Raises:
        InvalidRequestError: It is something else, or too large.
    """
    if not 0 <= checked(field, value, int) <= most:
        raise InvalidRequestError(field, f"is {value}; must lie in 0..{most}")
    return int(value)
