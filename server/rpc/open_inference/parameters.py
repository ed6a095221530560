"""The parameters of the protocol that this server honours, and those that it refuses by name.

A parameter that would change the meaning of the result is refused, never ignored. Others, which tell how
clients encode or trace, have no effect.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.rpc.deadlines import deadline_after
from attention_serving.server.rpc.tensors import WireFloat

T = TypeVar("T")
Parameters = Mapping[str, pb.InferParameter]
TIMEOUT = "timeout"
# Extensions of the protocol that this server lacks, by their parameters.
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
CLASSIFICATION = "classification"
# Triton's clients send it with every request.
WANTS_FINAL = "triton_enable_empty_final_response"
# A parameter of this server: the type in which a requested output of FP32 is sent.
DATATYPE = "datatype"
# Parameters of this server for texts and embeddings.
PROMPT, TRUNCATE, DIMENSIONS = "prompt", "truncate", "dimensions"
MAX_DIMENSIONS = 2**31 - 1
REGION, REGION_OFFSET, REGION_SIZE = (
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
)


class Place(NamedTuple):
    """Where a tensor is in shared memory.

    Attributes:
        region: Name of the region.
        offset: Where the tensor begins in the region, in bytes.
        size: The bytes that are set aside for it.
    """

    region: str
    offset: int
    size: int


def wants_final(parameters: Parameters) -> bool:
    """Whether the last response of a stream to a request is to be marked as such."""
    return bool(parameters) and WANTS_FINAL in parameters and parameters[WANTS_FINAL].bool_param


def place(field: str, parameters: Parameters) -> Place | None:
    """Where a tensor's parameters say that it is in shared memory; None if they do not.

    Raises:
        InvalidRequestError: The name of the region or the size is missing, or one of them has a wrong type.
    """
    if not parameters or not any(name in parameters for name in (REGION, REGION_OFFSET, REGION_SIZE)):
        return None
    region = _value(parameters[REGION]) if REGION in parameters else None
    if not isinstance(region, str) or not region:
        raise InvalidRequestError(f"{field}.parameters[{REGION}]", "must be the name of a region")
    if REGION_SIZE not in parameters:
        raise InvalidRequestError(f"{field}.parameters[{REGION_SIZE}]", "is missing")
    return Place(region, _bytes(field, parameters, REGION_OFFSET), _bytes(field, parameters, REGION_SIZE))


def _bytes(field: str, parameters: Parameters, name: str) -> int:
    found = _value(parameters[name]) if name in parameters else 0
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise InvalidRequestError(f"{field}.parameters[{name}]", "must be a number of bytes, at least 0")
    return found


def check_request(parameters: Parameters) -> None:
    """Checks the parameters of a request.

    Raises:
        InvalidRequestError: The request belongs to a stateful sequence.
    """
    for name in SEQUENCE if parameters else ():
        if name in parameters and _value(parameters[name]):
            raise InvalidRequestError(
                f"parameters[{name}]", "is not supported by this server: its models keep no state"
            )


def check_output(field: str, parameters: Parameters) -> None:
    """Checks the parameters of a requested output.

    Raises:
        InvalidRequestError: The output is to be converted in a way that this server lacks.
    """
    if parameters and CLASSIFICATION in parameters and _value(parameters[CLASSIFICATION]):
        raise InvalidRequestError(
            f"{field}.parameters[{CLASSIFICATION}]",
            "is not supported by this server; request the output without it",
        )


def output_type(field: str, parameters: Parameters) -> WireFloat:
    """The type of the parameter `datatype` of a requested output; FP32 if it has none.

    Raises:
        InvalidRequestError: The type is not one of real numbers.
    """
    if DATATYPE not in parameters:
        return WireFloat.FP32
    wire = WireFloat.__members__.get(str(_value(parameters[DATATYPE])))
    if wire is None:
        raise InvalidRequestError(
            f"{field}.parameters[{DATATYPE}]", f"must be one of {', '.join(WireFloat.__members__)}"
        )
    return wire


class TextOptions(NamedTuple):
    """What a request asks of a text encoder.

    Attributes:
        prompt: As of `prompt`.
        truncate: As of `truncate`.
        dimensions: As of `dimensions`.
    """

    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int = 0


NO_TEXT_OPTIONS = TextOptions()


def text_options(parameters: Parameters) -> TextOptions:
    """The parameters of a request that concern text encoders.

    Raises:
        InvalidRequestError: One of them has a wrong type or value.
    """
    if not parameters:
        return NO_TEXT_OPTIONS
    size = dimensions(parameters)  # the first to be refused, if several are wrong
    return TextOptions(prompt(parameters), truncate(parameters), size)


def prompt(parameters: Parameters) -> str | None:
    """The name of the prompt that is put before each text; None if the request names none.

    Raises:
        InvalidRequestError: The parameter is not a string.
    """
    return _typed(parameters, PROMPT, str, "a string")


def truncate(parameters: Parameters) -> bool | None:
    """Whether long texts are cut; None if the request does not say.

    Raises:
        InvalidRequestError: The parameter is not a boolean.
    """
    return _typed(parameters, TRUNCATE, bool, "a boolean")


def dimensions(parameters: Parameters) -> int:
    """Number of leading elements of each embedding; 0 for all.

    Raises:
        InvalidRequestError: The parameter is not a positive integer.
    """
    found = _typed(parameters, DIMENSIONS, int, "a positive integer")
    if found is not None and not 0 < found <= MAX_DIMENSIONS:
        raise InvalidRequestError(DIMENSIONS, f"is {found}; must be a positive integer")
    return found or 0


def _typed(parameters: Parameters, name: str, kind: type[T], words: str) -> T | None:
    if name not in parameters:
        return None
    value = _value(parameters[name])
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise InvalidRequestError(name, f"must be {words}")
    return value


def timeout(parameters: Parameters) -> float:
    """The deadline of the parameter `timeout`, which is in microseconds; infinite for 0 and below.

    Raises:
        InvalidRequestError: The timeout is not an integer.
    """
    if TIMEOUT not in parameters:
        return math.inf
    parameter = parameters[TIMEOUT]
    if parameter.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
        raise InvalidRequestError(TIMEOUT, "must be an integer: microseconds, or 0 for no timeout")
    microseconds = parameter.int64_param or parameter.uint64_param
    return deadline_after(microseconds / 1e6) if microseconds > 0 else math.inf


def _value(parameter: pb.InferParameter) -> object:
    """The value of a parameter; None if it has none."""
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)
