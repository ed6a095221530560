"""Checks of plain arguments that several modules share."""

import operator
from typing import Any

from attention_client.errors import invalid


def whole_number(field: str, value: Any, lowest: int, highest: int) -> int:
    """An integer within a range.

    Raises:
        InvalidArgumentError: The value is not an integer or lies outside the range.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not lowest <= number <= highest:
        raise invalid(field, f"an integer from {lowest} to {highest}", repr(value))
    return int(number)


def type_name(value: object) -> str:
    """The value's type, for messages that must not contain a value that is secret or long."""
    return f"a value of type {type(value).__name__}"


def encodable(field: str, text: str) -> str:
    """The text, if UTF-8 can encode it.

    Raises:
        InvalidArgumentError: It contains a surrogate without its other half.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(field, "text that UTF-8 can encode", error) from error
    return text
