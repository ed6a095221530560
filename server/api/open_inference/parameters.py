"""The parameters of the protocol that this server honours, and those that it refuses by name.

A parameter that would change the meaning of the result is refused, never ignored. Others, which tell how
clients encode or trace, have no effect.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from attention_serving.server.api.shared_memory import SharedMemory, Slice
from attention_serving.server.api.tensors import FLOATS
from attention_serving.server.engine.errors import InvalidRequestError

T = TypeVar("T")
# Values by name; None for a parameter without a value.
Parameters = Mapping[str, object]
TIMEOUT = "timeout"
# Extensions of the protocol that this server lacks, by their parameters.
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
CLASSIFICATION = "classification"
# Triton's clients send it with every request: whether the last response of a stream to it is marked as such.
WANTS_FINAL = "triton_enable_empty_final_response"
# A parameter of this server: the type in which a requested output of FP32 is sent.
DATATYPE = "datatype"
# A parameter of this server for embeddings: the number of leading elements of each.
DIMENSIONS = "dimensions"
# A parameter of this server, of metadata and responses: the digest of the model.
MODEL_DIGEST = "model_digest"
# Where a tensor is in shared memory.
REGION, REGION_OFFSET = "shared_memory_region", "shared_memory_offset"
REGION_SIZE = "shared_memory_byte_size"


def read(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a map to messages with the oneof `parameter_choice`; None for those without one."""
    choices = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: choice and getattr(parameters[name], choice) for name, choice in choices.items()}


def place(field: str, parameters: Parameters, memory: SharedMemory) -> Slice | None:
    """Where a tensor's parameters say that it is in shared memory; None if they do not.

    Raises:
        InvalidRequestError: A parameter has a wrong type, or the place is not inside the region.
        RegionNotFoundError: The region is not registered.
        UnsupportedError: Shared memory is switched off.
    """
    region = typed(parameters, REGION, str, "the name of a region", field)
    if region is None:
        return None
    offset = typed(parameters, REGION_OFFSET, int, "a number of bytes", field) or 0
    size = typed(parameters, REGION_SIZE, int, "a number of bytes", field) or 0
    return memory.slice(field, region, offset, size)


def output_type(field: str, parameters: Parameters) -> str:
    """Checks the parameters of a requested output; the type of `datatype`, FP32 if it has none.

    Raises:
        InvalidRequestError: The output is to be classified, or the type is not one of real numbers.
    """
    if parameters.get(CLASSIFICATION):
        message = "is not supported by this server; request the output without it"
        raise InvalidRequestError(f"{field}.parameters[{CLASSIFICATION}]", message)
    wire = str(parameters.get(DATATYPE, "FP32"))
    if wire not in FLOATS:
        raise InvalidRequestError(f"{field}.parameters[{DATATYPE}]", f"must be one of {', '.join(FLOATS)}")
    return wire


def typed(parameters: Parameters, name: str, kind: type[T], words: str, tensor: str = "") -> T | None:
    """The value of a parameter of a type; None if the request, or the tensor, does not have it.

    Raises:
        InvalidRequestError: It has another type than that which `words` name.
    """
    if name not in parameters:
        return None
    value = parameters[name]
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        field = f"{tensor}.parameters[{name}]" if tensor else name
        raise InvalidRequestError(field, f"must be {words}")
    return value
