"""Writes messages in protobuf's text format, from nested values, without the message's own Python classes.

The schema of Triton's configurations cannot be imported here: two copies of it in one process, this project's
and tritonclient's, exclude each other. The tests parse what is written with tritonclient's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


class EnumName(str):
    """A value of an enumeration, which is written without quotes."""

    __slots__ = ()


def dumps(message: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    r"""Writes one message.

    Args:
        message: Values by field name: str, int, bool, EnumName, a mapping for a message, or a sequence of
            these for a repeated field. Sequences of numbers are written on one line.
        comments: By name of an outermost field, the text above it; may have several lines.

    Raises:
        TypeError: A value has another type.

    >>> print(dumps({"name": "a\"b", "input": [{"dims": [-1, 4]}]}), end="")
    name: "a\"b"
    input {
      dims: [ -1, 4 ]
    }
    """
    return "".join(f"{line}\n" for line in _lines(message, comments or {}))


def _lines(message: Mapping[str, Any], comments: Mapping[str, str]) -> Iterator[str]:
    for name, value in message.items():
        if name in comments:
            yield from (f"# {line}" for line in comments[name].splitlines())
        for element in _elements(value):
            if isinstance(element, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(element, {}))
                yield "}"
            else:
                yield f"{name}: {_scalar(element)}"


def _elements(value: Any) -> Sequence[Any]:
    """The elements that are written one by one."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value]
    return value if any(isinstance(element, Mapping) for element in value) else [value]


def _scalar(value: Any) -> str:
    if isinstance(value, EnumName):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return f'"{_escaped(value)}"'
    if isinstance(value, Sequence):
        return f"[ {', '.join(map(_scalar, value))} ]"
    raise TypeError(f"{value!r} cannot be written as a protobuf value")


def _escaped(text: str) -> str:
    """UTF-8 bytes; those that are not printable ASCII, and quotes and backslashes, in octal."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F and byte not in b'"\\' else f"\\{byte:03o}"  # noqa: PLR2004 - ASCII
        for byte in text.encode()
    )
