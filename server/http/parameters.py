"""Parameters of the protocol: JSON values and the messages InferParameter and ModelRepositoryParameter."""

from collections.abc import Mapping
from typing import Any

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.fields import MAX_INT64, MAX_UINT64, bounded, optional

# Parameters that say how HTTP carries tensors. They are not passed on.
BINARY_DATA, BINARY_DATA_SIZE, BINARY_DATA_OUTPUT = "binary_data", "binary_data_size", "binary_data_output"
SHARED_MEMORY = "shared_memory_region"


def read(owner: Mapping[str, Any], field: str = "parameters") -> dict[str, Any]:
    """The parameters of a request, an input or an output.

    Raises:
        InvalidRequestError: They are not an object, or too many.
    """
    found: dict[str, Any] = optional(owner, "parameters", dict, {}, field)
    bounded(field, found)
    return found


def encode(
    parameters: Mapping[str, Any], *, without: str, field: str = "parameters"
) -> dict[str, pb.InferParameter]:
    """The messages of all parameters but one.

    Raises:
        InvalidRequestError: A value is null, an array or an object, or an integer of more than 64 bits.
    """
    return {
        name: _message(f"{field}[{name}]", value) for name, value in parameters.items() if name != without
    }


def decode(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """The JSON values of messages."""
    return {name: value_of(message) for name, message in parameters.items()}


def value_of(message: Any) -> Any:
    """The value of a message with the oneof `parameter_choice`; None if it has none."""
    choice = message.WhichOneof("parameter_choice")
    return None if choice is None else getattr(message, choice)


def _message(field: str, value: Any) -> pb.InferParameter:
    if isinstance(value, bool):
        return pb.InferParameter(bool_param=value)
    if isinstance(value, str):
        return pb.InferParameter(string_param=value)
    if isinstance(value, float):
        return pb.InferParameter(double_param=value)
    if isinstance(value, int) and -MAX_INT64 - 1 <= value <= MAX_UINT64:
        return (
            pb.InferParameter(int64_param=value)
            if value <= MAX_INT64
            else pb.InferParameter(uint64_param=value)
        )
    raise InvalidRequestError(field, "must be a boolean, an integer of 64 bits, a number or a string")
