"""JSON and messages: pydantic models that check and describe bodies, their messages, and JSON of replies."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import numpy as np
import orjson
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from attention_serving.server.api.open_inference.requests import values_of
from attention_serving.server.engine.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)
# Entries of one list or object of a request, other than elements of tensors.
MAX_ENTRIES = 256
# NumPy's own limit, which is the gRPC server's too.
MAX_AXES = 64
# What Python needs for JSON, at most: for each byte of text, value with its pointer, array and object.
TEXT_BYTES, VALUE_BYTES, ARRAY_BYTES, OBJECT_BYTES = 4, 88, 96, 256
# What many writers of JSON write although it has no such values.
NOT_IN_JSON = (b"NaN", b"Infinity", b"-Infinity")
NOT_FINITE = "contains NaN or infinity, which JSON cannot express"
# For errors of pydantic whose own words do not fit behind the name of a member.
WORDS = {"missing": "is required", "extra_forbidden": "is unknown", "model_type": "must be an object"}
# The members of the oneof `parameter_choice` that may take a JSON value, by its type.
CHOICES = {
    bool: ("bool_param",),
    int: ("int64_param", "uint64_param"),
    float: ("double_param",),
    str: ("string_param",),
}


def drop_nulls(content: Any) -> Any:
    """A JSON object without members that are null, which count as absent; other values as they are."""
    if isinstance(content, dict):
        return {name: value for name, value in content.items() if value is not None}
    return content


Natural = Annotated[int, Field(ge=0, le=2**63 - 1)]
Unsigned = Annotated[int, Field(ge=0, le=2**64 - 1)]
Entries = Annotated[dict[str, Any], Field(max_length=MAX_ENTRIES), BeforeValidator(drop_nulls)]


class Body(BaseModel):
    """The JSON object of a request. Unknown members are ignored, as other servers of the protocol do.

    Members that are null count as absent.
    """

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _read_members(cls, content: Any) -> Any:
        return drop_nulls(content)

    def fill(self, message: Message) -> None:
        """Sets the fields of the same names in the message of the gRPC server."""
        for name, value in self:
            setattr(message, name, value)


class RepositoryIndex(Body):
    """Which models are listed."""

    ready: bool = False


class RepositoryChange(Body):
    """Parameters of loading or unloading a model."""

    parameters: Entries = {}

    def fill(self, message: Any) -> None:
        """Sets the parameters."""
        set_parameters(message.parameters, self.parameters, "parameters")


class SystemRegion(Body):
    """A region of system shared memory."""

    key: str
    offset: Unsigned = 0
    byte_size: Unsigned


class InputTensor(Body):
    """An input. Its elements are `data`, or binary data after the JSON, or in shared memory.

    The parameter binary_data_size says that the elements are that many bytes after the JSON; the parameters
    shared_memory_region, shared_memory_byte_size and shared_memory_offset, that they are in shared memory.
    `data` is row-major: flat, or nested as the shape says. It cannot express FP16, BF16, NaN and infinity.
    """

    name: str
    datatype: str
    shape: Annotated[list[Natural], Field(max_length=MAX_AXES)]
    parameters: Entries = {}
    data: Annotated[Any, Field(json_schema_extra={"type": "array"})] = None


class RequestedOutput(Body):
    """An output that is asked for.

    Parameters: binary_data, whether the elements follow the JSON; datatype, FP16, BF16 or FP32, the type in
    which real numbers are sent; and the three parameters of shared memory, as for inputs.
    """

    name: str
    parameters: Entries = {}


class InferenceRequest(Body):
    """The JSON of a request of inference.

    Parameters: timeout, the deadline in microseconds; binary_data_output, whether outputs are binary data.
    """

    id: str = ""
    parameters: Entries = {}
    inputs: Annotated[list[InputTensor], Field(max_length=MAX_ENTRIES)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=MAX_ENTRIES)] = []


class ContextParameters(Body):
    """Parameters of a new context.

    ttl_seconds: seconds until it expires; 0 for the server's default, an hour. shared: whether callers with
    other identities may use it. append_to: the id of the context that the rows are appended to; the new one
    is shared if that one is, and is the caller's own.
    """

    model_config = ConfigDict(extra="forbid")

    ttl_seconds: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    shared: bool = False
    append_to: str = ""


class ContextRequest(Body):
    """The JSON of a new context.

    Its inputs are the rows: key and, for models that take it, value, each of the shape (rows, width) or
    (1, rows, width); and optionally mask, BOOL of the shape (rows), which is false for rows that are hidden.
    """

    parameters: ContextParameters = ContextParameters()
    inputs: Annotated[list[InputTensor], Field(max_length=3)]


def parse(data: bytes | bytearray, model: type[M]) -> M:
    """The JSON of a body, checked; an empty body is an empty object.

    Raises:
        InvalidRequestError: The body is not JSON, or a member is wrong.
    """
    return check(load(data), model)


def load(data: bytes | bytearray) -> Any:
    """The JSON of a body; an empty body is an empty object.

    Raises:
        InvalidRequestError: The body is not JSON, or has too many members.
    """
    try:
        content = orjson.loads(data or b"{}")
    except orjson.JSONDecodeError as error:
        if data[error.pos : error.pos + 9].startswith(NOT_IN_JSON):
            raise InvalidRequestError("body", f"{NOT_FINITE}; send binary tensors") from None
        raise InvalidRequestError("body", f"is not JSON: {error}") from None
    if isinstance(content, dict) and len(content) > MAX_ENTRIES:  # an error for each would take memory
        raise InvalidRequestError("body", f"has {len(content)} members; the limit is {MAX_ENTRIES}")
    return content


def check(content: Any, model: type[M]) -> M:
    """Parsed JSON as a model.

    Raises:
        InvalidRequestError: A member is wrong.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _invalid(error) from None


def check_finite(field: str, array: NDArray[Any], message: str) -> None:
    """Checks that JSON has a form for the numbers of an answer.

    Args:
        field: What they belong to. The index of the first element or row that has no form follows it.
        array: The numbers (n,), or rows of them (n, d).
        message: What is wrong and what to do, for the error.

    Raises:
        InvalidRequestError: A number is NaN or infinite.
    """
    finite = np.isfinite(array)
    if not finite.all():
        index = int(np.unravel_index(finite.argmin(), finite.shape)[0])
        raise InvalidRequestError(f"{field}[{index}]", message)


def memory_of(data: bytes | bytearray, size: int) -> int:
    """How many bytes JSON may take once it is parsed, without parsing it.

    Every value and every name follows a comma, a colon or a bracket.
    """
    values = 1 + data.count(b",", 0, size) + data.count(b":", 0, size)
    containers = ARRAY_BYTES * data.count(b"[", 0, size) + OBJECT_BYTES * data.count(b"{", 0, size)
    return TEXT_BYTES * size + VALUE_BYTES * values + containers


def _invalid(error: ValidationError) -> InvalidRequestError:
    """The first of pydantic's errors, with the path of the member in the JSON."""
    details = error.errors(include_url=False)[0]
    field = ""
    for part in details["loc"]:
        in_brackets = isinstance(part, int) or field.endswith("parameters")
        field += f"[{part}]" if in_brackets else f".{part}" if field else str(part)
    text = details["msg"].replace("Input should", "must", 1)
    return InvalidRequestError(field[:200] or "body", WORDS.get(details["type"], text))


def set_parameters(messages: Any, parameters: Mapping[str, object], field: str) -> None:
    """Sets, for each parameter, the member of the oneof `parameter_choice` that takes its JSON value.

    Raises:
        InvalidRequestError: There is none.
    """
    for parameter, value in parameters.items():
        message = messages[parameter]
        members = [name for name in message.DESCRIPTOR.fields_by_name if name != "bytes_param"]
        for name in CHOICES.get(type(value), ()):
            if name in members:
                with suppress(ValueError):  # beyond the range
                    setattr(message, name, value)
                    break
        else:
            kinds = " or ".join(name.removesuffix("_param") for name in members)
            raise InvalidRequestError(f"{field}[{parameter}]", f"must be a value of the type {kinds}")


def to_json(message: Message) -> dict[str, Any]:
    """The members of a message, by the names of the proto file. Its maps are parameters, texts or messages.

    A member of a message type that is not set is left out. protobuf's own JSON writes integers of 64 bits as
    strings, which clients of the protocol do not expect.
    """
    return {
        field.name: _member(getattr(message, field.name), field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _member(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"].message_type
        if entry is None:
            return dict(value)
        return values_of(value) if entry.oneofs else {name: to_json(item) for name, item in value.items()}
    return [_value(item, field) for item in value] if field.is_repeated else _value(value, field)


def _value(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
