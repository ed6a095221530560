"""Messages as JSON: the names of the proto file, all members, and integers as numbers.

protobuf's own JSON writes integers of 64 bits as strings, which clients of the protocol do not expect.
"""

import base64
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


def to_json(message: Message) -> dict[str, Any]:
    """The members of a message without maps. A member of a message type that is not set is left out."""
    return {
        field.name: _member(message, field)
        for field in message.DESCRIPTOR.fields
        if _is_stated(message, field)
    }


def _is_stated(message: Message, field: FieldDescriptor) -> bool:
    return not field.has_presence or message.HasField(field.name)


def _member(message: Message, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    return [_value(each, field) for each in value] if field.is_repeated else _value(value, field)


def _value(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
