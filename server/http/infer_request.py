"""The body of an inference request as a ModelInferRequest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http import fields, parameters, tensors
from attention_serving.server.http.errors import TooLargeError
from attention_serving.server.http.parameters import (
    BINARY_DATA,
    BINARY_DATA_OUTPUT,
    BINARY_DATA_SIZE,
    SHARED_MEMORY,
)

RAW_INPUT_CONTENTS = (pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)
TIMEOUT = "timeout"
# NumPy's own limit, which is the gRPC server's too.
MAX_AXES = 64
InputTensor = pb.ModelInferRequest.InferInputTensor
OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor
Raw = tensors.Raw


@dataclass(frozen=True)
class ModelPath:
    """The model that the path of a request names; an empty version takes the highest that is ready."""

    name: str
    version: str = ""


@dataclass(frozen=True)
class OutputForm:
    """How the client wants outputs.

    Attributes:
        binary: Whether outputs are sent as binary data if they say nothing else.
        outputs: The same for single outputs.
        shared: Outputs that the server writes to shared memory.
    """

    binary: bool
    outputs: Mapping[str, bool]
    shared: frozenset[str]

    def is_binary(self, name: str) -> bool:
        """Whether an output is sent as binary data."""
        return self.outputs.get(name, self.binary)


class Decoded(NamedTuple):
    """A decoded request.

    Attributes:
        message: The serialized ModelInferRequest.
        form: How the outputs are to be sent.
        timeout_seconds: The timeout that the request states; None if it states none.
    """

    message: bytes
    form: OutputForm
    timeout_seconds: float | None


class Limits(NamedTuple):
    """What decoding may take.

    Attributes:
        message_bytes: Largest message.
        json_bytes: Most memory for parsed JSON.
        reservation: Takes the memory of the message.
        scratch: Takes the memory of the parsed JSON, which is free again once the request is decoded.
    """

    message_bytes: int
    json_bytes: int
    reservation: Reservation
    scratch: Reservation


def decode(body: bytearray, header: str | None, model: ModelPath, limits: Limits) -> Decoded:
    """Decodes a body: JSON, and the binary tensors that follow it.

    Args:
        body: The body.
        header: The header Inference-Header-Content-Length: the size of the JSON; None if all of it is JSON.
        model: The model of the path.
        limits: What it may take.

    Raises:
        InvalidRequestError: The body contradicts itself.
        TooLargeError: The message would be too large.
        OverloadedError: The memory is not available.
    """
    json, binary = _parts(body, header)
    limits.scratch.add(fields.check_memory(json, limits.json_bytes))
    document = fields.parse(json)
    given = parameters.read(document)
    message = pb.ModelInferRequest(
        model_name=model.name,
        model_version=model.version,
        id=fields.optional(document, "id", str, ""),
        parameters=parameters.encode(given, without=BINARY_DATA_OUTPUT),
    )
    form = _add_outputs(
        message, document, binary=fields.optional(given, BINARY_DATA_OUTPUT, bool, default=False)
    )
    contents = _add_inputs(message, document, binary)
    return Decoded(_serialized(message, contents, limits), form, _timeout(given))


def _parts(body: bytearray, header: str | None) -> tuple[bytearray, memoryview]:
    if header is None:
        return body, memoryview(b"")
    name = "Inference-Header-Content-Length"
    if not (header.isascii() and header.isdigit() and len(header) <= len(str(fields.MAX_INT64))):
        raise InvalidRequestError(name, "must be the size of the JSON in bytes")
    size = int(header)
    if not 0 < size <= len(body):
        raise InvalidRequestError(name, f"is {size}; must lie in 1..{len(body)}, the size of the body")
    return body[:size], memoryview(body)[size:]


def _add_outputs(message: pb.ModelInferRequest, document: dict[str, Any], *, binary: bool) -> OutputForm:
    outputs, shared = {}, set()
    for index, output in enumerate(_objects(document, "outputs", required=False)):
        field = f"outputs[{index}]"
        name = fields.required(output, "name", str, f"{field}.name")
        given = parameters.read(output, f"{field}.parameters")
        if BINARY_DATA in given:
            path = f"{field}.parameters[{BINARY_DATA}]"
            outputs[name] = fields.checked(path, given[BINARY_DATA], bool)
        if SHARED_MEMORY in given:
            shared.add(name)
        encoded = parameters.encode(given, without=BINARY_DATA, field=f"{field}.parameters")
        message.outputs.append(OutputTensor(name=name, parameters=encoded))
    return OutputForm(binary, outputs, frozenset(shared))


def _add_inputs(message: pb.ModelInferRequest, document: dict[str, Any], binary: memoryview) -> list[Raw]:
    """Adds the inputs to a message; returns the elements of those that are not in shared memory."""
    contents: list[Raw] = []
    used = 0
    for index, tensor in enumerate(_objects(document, "inputs", required=True)):
        field = f"inputs[{index}]"
        name = fields.required(tensor, "name", str, f"{field}.name")
        given = parameters.read(tensor, f"{field}.parameters")
        shape = _shape(tensor, field)
        datatype = fields.required(tensor, "datatype", str, f"{field}.datatype")
        _check_source(name, tensor, given)
        if BINARY_DATA_SIZE in given:
            size = fields.natural(f"{field}.parameters[{BINARY_DATA_SIZE}]", given[BINARY_DATA_SIZE])
            if size > len(binary) - used:
                raise InvalidRequestError(
                    name, f"has binary_data_size {size}; the body has {len(binary) - used} bytes left for it"
                )
            contents.append(binary[used : used + size])
            used += size
        elif SHARED_MEMORY not in given:
            contents.append(tensors.to_bytes(name, tensor["data"], datatype, shape))
        encoded = parameters.encode(given, without=BINARY_DATA_SIZE, field=f"{field}.parameters")
        message.inputs.append(InputTensor(name=name, datatype=datatype, shape=shape, parameters=encoded))
    if used != len(binary):
        raise InvalidRequestError("body", f"has {len(binary)} bytes of binary data; the inputs use {used}")
    return contents


def _check_source(name: str, tensor: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """An input says once where its elements are."""
    sources = ["data"] if "data" in tensor else []
    sources += [source for source in (BINARY_DATA_SIZE, SHARED_MEMORY) if source in given]
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise InvalidRequestError(
            name, f"has {found} of data, {BINARY_DATA_SIZE} and {SHARED_MEMORY}; must have exactly one"
        )


def _shape(tensor: Mapping[str, Any], field: str) -> tuple[int, ...]:
    shape = fields.required(tensor, "shape", list, f"{field}.shape")
    if len(shape) > MAX_AXES:
        raise InvalidRequestError(f"{field}.shape", f"has {len(shape)} axes; the limit is {MAX_AXES}")
    return tuple(fields.natural(f"{field}.shape[{axis}]", size) for axis, size in enumerate(shape))


def _objects(document: Mapping[str, Any], name: str, *, required: bool) -> list[dict[str, Any]]:
    entries: list[Any] = (
        fields.required(document, name, list) if required else fields.optional(document, name, list, [])
    )
    fields.bounded(name, entries)
    return [fields.checked(f"{name}[{index}]", entry, dict) for index, entry in enumerate(entries)]


def _serialized(message: pb.ModelInferRequest, contents: list[Raw], limits: Limits) -> bytes:
    head = message.SerializeToString()
    parts: list[Any] = [head]
    for content in contents:
        parts += protobuf_bytes.field(RAW_INPUT_CONTENTS, [content])
    size = sum(map(len, parts))
    if size > limits.message_bytes:
        raise TooLargeError(
            f"the tensors have {size} bytes as a message; the limit is {limits.message_bytes}"
        )
    limits.reservation.add(size)
    return b"".join(parts)


def _timeout(given: Mapping[str, Any]) -> float | None:
    """The parameter `timeout`, which is in microseconds. The gRPC server refuses one of another type."""
    microseconds = given.get(TIMEOUT)
    if isinstance(microseconds, int) and not isinstance(microseconds, bool) and microseconds > 0:
        return microseconds / 1e6
    return None
