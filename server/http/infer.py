"""Inference and stored contexts: bodies, JSON and the binary tensors that follow it, as messages, and back.

The body of a context is one of inference, whose inputs are the rows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import schemas, wire
from attention_serving.server.api.open_inference.requests import BYTES, split_bytes, values_of
from attention_serving.server.api.schemas import NOT_FINITE, ContextRequest, InferenceRequest, InputTensor
from attention_serving.server.api.tensors import DTYPE_BY_NAME
from attention_serving.server.api.text_bodies import SERVICE
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.types import Array
from attention_serving.server.http.connection import HttpError, HttpRequest, Reply, run

INFER = "/inference.GRPCInferenceService/ModelInfer"
PUT, APPEND = f"/{SERVICE}/PutContext", f"/{SERVICE}/AppendContext"
HEADER_LENGTH, BINARY_MEDIA_TYPE = "inference-header-content-length", "application/octet-stream"
# Parameters that say how HTTP carries tensors. They are not passed on.
BINARY_DATA, BINARY_DATA_SIZE, BINARY_DATA_OUTPUT = "binary_data", "binary_data_size", "binary_data_output"
SHARED_MEMORY, TIMEOUT = "shared_memory_region", "timeout"
RAW_INPUT_CONTENTS = (pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)
# How much longer than a request's own timeout the call may take: the server reports that it has passed.
TIMEOUT_MARGIN_SECONDS = 1.0
# JSON of this size is the same from request to request if the tensors follow it, and is parsed once.
CACHED_BYTES, CACHED_HEADERS = 1024, 256
# Of the size of the JSON.
MAX_DIGITS = 19
# The longest element in JSON for its size: false, with a comma, for one byte.
JSON_BYTES_PER_BYTE = 6
# Inputs of contexts; and copies of their rows: in a message as of inference, and in the one that is sent.
MASK = "mask"
CONTEXT_INPUTS, CONTEXT_COPIES = ("key", "value", MASK), 2
# What a type of elements takes in JSON, by NumPy's kind of it: Python's types, and the words for them.
ACCEPTED: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true and false"),
    "i": (frozenset({int}), "integers"),
    "u": (frozenset({int}), "integers"),
    "f": (frozenset({int, float}), "numbers"),
    "S": (frozenset({str}), "strings"),
}


@dataclass(frozen=True)
class InferenceHeader:
    """What the JSON of a request says.

    Attributes:
        message: The ModelInferRequest without the elements of tensors, serialized.
        contents: For each input that is not in shared memory: its name, and its elements or, if they follow
            the JSON, their size.
        binary: Whether outputs are sent as binary data if they say nothing else.
        outputs: The same for single outputs.
        timeout_seconds: How long the call may take; None if the request does not say.
    """

    message: bytes
    contents: tuple[tuple[str, bytes | int], ...]
    binary: bool
    outputs: Mapping[str, bool]
    timeout_seconds: float | None


async def infer(request: HttpRequest) -> Reply:
    """Answers POST .../infer."""
    message, header = await receive(request, INFER)
    reply = await request.call(INFER, message, header.timeout_seconds)
    request.memory.add(len(reply))
    return await run(len(reply), partial(encode, reply, header, request.memory))


async def receive(request: HttpRequest, method: str) -> tuple[bytes, InferenceHeader]:
    """Takes a place, and reads and decodes the body of a request that a method of the gRPC server answers.

    Returns:
        As `decode`.
    """
    data = await request.read(method)
    request.take_place()  # a body that does not arrive takes none
    length, most = request.headers.get(HEADER_LENGTH), request.backend.settings.max_message_bytes
    size = len(data) if length is None else _json_size(length, len(data))
    model, version = request.parameters["model"], request.parameters.get("version", "")
    return await request.decode_body(
        data, size, lambda body: decode(body, size, model, version, most, request.memory)
    )


def decode(
    body: bytearray, size: int, model: str, version: str, max_bytes: int, reservation: Reservation
) -> tuple[bytes, InferenceHeader]:
    """Decodes a body: JSON, and the binary tensors that follow it.

    Args:
        body: The body.
        size: Size of the JSON.
        model: Name of the model.
        version: Its version; empty for the highest that is ready.
        max_bytes: Size of the largest message.
        reservation: Takes the memory of the message.

    Returns:
        The serialized ModelInferRequest, and what the JSON says.

    Raises:
        InvalidRequestError: The body contradicts itself.
        HttpError: The message would be too large.
        OverloadedError: The memory is not available.
    """
    json: Any = body if size == len(body) else bytes(memoryview(body)[:size])
    is_cached = size < len(body) and size + len(model) + len(version) <= CACHED_BYTES
    header = (_cached_header if is_cached else _read_header)(json, model, version)
    parts: list[Any] = [header.message]
    used = size
    with memoryview(body) as binary:
        for name, content in header.contents:
            data: Any = content
            if isinstance(content, int):
                if content > len(body) - used:
                    remaining = f"the body has {len(body) - used} bytes left for it"
                    raise InvalidRequestError(name, f"has {BINARY_DATA_SIZE} {content}; {remaining}")
                data = binary[used : used + content]
                used += content
            parts += wire.encode_field(RAW_INPUT_CONTENTS, [data])
        if used != len(body):
            sizes = f"has {len(body) - size} bytes of binary data; the inputs use {used - size}"
            raise InvalidRequestError("body", sizes)
        total = sum(map(len, parts))
        if total > max_bytes:
            message = f"the tensors have {total} bytes as a message; the limit is {max_bytes}"
            raise HttpError(413, message)
        reservation.add(total)
        return b"".join(parts), header


def _json_size(header: str, most: int) -> int:
    is_number = header.isascii() and header.isdigit() and len(header) <= MAX_DIGITS
    if not is_number or not 0 < int(header) <= most:
        message = f"is {header[:40]!r}; must be the size of the JSON in bytes, 1..{most}"
        raise InvalidRequestError("Inference-Header-Content-Length", message)
    return int(header)


def _read_header(json: bytes | bytearray, model: str, version: str) -> InferenceHeader:
    request = schemas.parse(json, InferenceRequest)
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=request.id)
    binary = _taken_flag(request.parameters, BINARY_DATA_OUTPUT, "parameters", default=False)
    schemas.set_parameters(message.parameters, request.parameters, "parameters")
    outputs = {}
    for index, output in enumerate(request.outputs):
        field = f"outputs[{index}].parameters"
        outputs[output.name] = _taken_flag(output.parameters, BINARY_DATA, field, default=binary)
        schemas.set_parameters(message.outputs.add(name=output.name).parameters, output.parameters, field)
    contents = [
        (tensor.name, content)
        for index, tensor in enumerate(request.inputs)
        if (content := _add_input(message, tensor, f"inputs[{index}].parameters")) is not None
    ]
    timeout = request.parameters.get(TIMEOUT)  # in microseconds; the server refuses other types
    seconds = timeout / 1e6 + TIMEOUT_MARGIN_SECONDS if type(timeout) is int and timeout > 0 else None
    return InferenceHeader(message.SerializeToString(), tuple(contents), binary, outputs, seconds)


_cached_header = lru_cache(CACHED_HEADERS)(_read_header)


def _taken_flag(parameters: dict[str, Any], name: str, field: str, *, default: bool) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{field}[{name}]", "must be true or false")
    return value


def _add_input(message: pb.ModelInferRequest, tensor: InputTensor, field: str) -> bytes | int | None:
    """Adds an input; returns its elements, or their size after the JSON, or None for shared memory."""
    name, parameters = tensor.name, tensor.parameters
    # An input says once where its elements are.
    sources = ["data"] if "data" in tensor.model_fields_set else []
    sources += [source for source in (BINARY_DATA_SIZE, SHARED_MEMORY) if source in parameters]
    if len(sources) != 1:
        count = f"has {' and '.join(sources) or 'none'} of data, {BINARY_DATA_SIZE} and {SHARED_MEMORY}"
        raise InvalidRequestError(name, f"{count}; must have exactly one")
    content: bytes | int | None = parameters.pop(BINARY_DATA_SIZE, None)
    if sources == [BINARY_DATA_SIZE] and (type(content) is not int or content < 0):
        raise InvalidRequestError(f"{field}[{BINARY_DATA_SIZE}]", "must be an integer, 0 or more")
    if sources == ["data"]:
        content = to_bytes(name, tensor.data, tensor.datatype, tuple(tensor.shape))
    added = message.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
    schemas.set_parameters(added.parameters, parameters, field)
    return content


def encode(reply: bytes, header: InferenceHeader, reservation: Reservation) -> Reply:
    """Encodes a reply.

    Args:
        reply: The serialized ModelInferResponse.
        header: How the client wants the outputs.
        reservation: Takes the memory of the body.

    Raises:
        InvalidRequestError: An output has no form in JSON and was not requested as binary data.
        OverloadedError: The memory is not available.
    """
    message = pb.ModelInferResponse.FromString(reply)
    document: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.id:
        document["id"] = message.id
    if message.parameters:
        document["parameters"] = values_of(message.parameters)
    document["outputs"], binary = [], []
    for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
        name, parameters = output.name, values_of(output.parameters)
        tensor: dict[str, Any] = {"name": name, "datatype": output.datatype, "shape": list(output.shape)}
        if SHARED_MEMORY in parameters:
            pass  # the server has written it there
        elif header.outputs.get(name, header.binary):
            parameters[BINARY_DATA_SIZE] = len(data)
            reservation.add(len(data))
            binary.append(data)
        else:
            reservation.add(JSON_BYTES_PER_BYTE * len(data))
            tensor["data"] = to_json(f"outputs[{name}]", data, output.datatype)
        if parameters:
            tensor["parameters"] = parameters
        document["outputs"].append(tensor)
    answer = Reply.of_json(document)
    if not binary:
        return answer
    size = str(len(answer.parts[0]))
    return Reply([*answer.parts, *binary], headers={"content-type": BINARY_MEDIA_TYPE, HEADER_LENGTH: size})


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
    if datatype != BYTES and datatype not in DTYPE_BY_NAME:
        raise InvalidRequestError(field, f"{datatype} has no form in JSON; send it with binary_data_size")
    elements = _flat(field, data, shape)
    accepted, words = ACCEPTED["S" if datatype == BYTES else DTYPE_BY_NAME[datatype].kind]
    if set(map(type, elements)) - accepted:
        kind = next(type(item).__name__ for item in elements if type(item) not in accepted)
        raise InvalidRequestError(field, f"data contains a value of type {kind}; {datatype} takes {words}")
    if datatype != BYTES:
        return _numbers(field, elements, datatype).tobytes()
    encoded = [element.encode() for element in elements]
    return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)


def to_json(field: str, data: bytes, datatype: str) -> Any:
    """The elements of an output, flat: an array that the JSON encoder takes.

    Args:
        field: Name of the field, for errors.
        data: The elements.
        datatype: Type of the elements.

    Raises:
        InvalidRequestError: An element has no form in JSON.
    """
    if datatype == BYTES:
        try:
            return [str(element, "utf-8") for element in split_bytes(field, data)]
        except UnicodeDecodeError:
            raise InvalidRequestError(field, "is not UTF-8; request it with binary_data") from None
    dtype = DTYPE_BY_NAME.get(datatype)
    if dtype is None:
        raise InvalidRequestError(field, f"{datatype} has no form in JSON; request it with binary_data")
    array = np.frombuffer(data, dtype)
    schemas.check_finite(field, array, f"{NOT_FINITE}; request it with binary_data")
    return array


def _flat(field: str, data: Any, shape: tuple[int, ...]) -> list[Any]:
    """The elements of an array that is flat, or nested exactly as the shape says."""
    elements = data
    is_nested = len(shape) > 1 and isinstance(data, list) and data and isinstance(data[0], list)
    for size in shape[1:] if is_nested else ():
        if not all(isinstance(row, list) and len(row) == size for row in elements):
            raise InvalidRequestError(field, f"data is not nested as its shape {list(shape)} says")
        elements = list(chain.from_iterable(elements))
    count = math.prod(shape)
    if not isinstance(elements, list) or len(elements) != count:
        message = f"data must be an array of {count} elements; its shape is {list(shape)}"
        raise InvalidRequestError(field, message)
    return elements


def _numbers(field: str, elements: list[Any], datatype: str) -> Array:
    dtype = DTYPE_BY_NAME[datatype]
    try:
        with np.errstate(over="ignore"):
            array = np.array(elements, dtype)
        if dtype.kind != "f" or np.isfinite(array).all():
            return array
    except OverflowError:
        pass
    raise InvalidRequestError(field, f"data contains a number beyond the range of {datatype}")


async def put_context(request: HttpRequest) -> Reply:
    """Answers POST .../contexts: puts a context, or appends rows to one."""
    message, _ = await receive(request, PUT)
    request.memory.add(CONTEXT_COPIES * len(message))
    method, context = await run(len(message), partial(encode_context, message))
    reply_type = attention_pb2.PutContextResponse if method == PUT else attention_pb2.AppendContextResponse
    reply = await request.call(method, context, timeout=None)
    return Reply.of_json(schemas.to_json(reply_type.FromString(reply).context))


def encode_context(message: bytes) -> tuple[str, bytes]:
    """Encodes the request to put a context, or to append to one.

    Args:
        message: The body as a serialized ModelInferRequest.

    Returns:
        The method of the gRPC server, and its serialized request.

    Raises:
        InvalidRequestError: A parameter or an input is wrong.
    """
    body = pb.ModelInferRequest.FromString(message)
    content = {"parameters": values_of(body.parameters), "inputs": []}
    parameters = schemas.check(content, ContextRequest).parameters
    request: Any = attention_pb2.PutContextRequest(shared=parameters.shared)
    if parameters.append_to:
        request = attention_pb2.AppendContextRequest(id=parameters.append_to)
    request.model_name, request.model_version = body.model_name, body.model_version
    request.ttl_seconds = parameters.ttl_seconds
    if len(body.inputs) != len(body.raw_input_contents):
        raise InvalidRequestError("inputs", "must not be in shared memory")
    rows = {}
    for tensor, data in zip(body.inputs, body.raw_input_contents, strict=True):
        name = tensor.name
        if name not in CONTEXT_INPUTS or name in rows:
            raise InvalidRequestError(name, "is unknown or given twice; inputs are key, value and mask")
        fill = _fill_mask if name == MASK else _fill_vectors
        try:
            rows[name] = fill(getattr(request, name), tensor, data)
        except ValueError:
            kind = f"is {tensor.datatype} of the shape {list(tensor.shape)}"
            must = "BOOL (rows)" if name == MASK else "FP32, FP16 or BF16 (rows, width) or (1, rows, width)"
            raise InvalidRequestError(name, f"{kind}; must be {must}") from None
    if len(set(rows.values())) > 1:
        raise InvalidRequestError("inputs", f"have different numbers of rows: {rows}")
    return APPEND if parameters.append_to else PUT, request.SerializeToString()


def _fill_vectors(message: attention_pb2.VectorSequences, tensor: Any, data: bytes) -> int:
    """Sets one sequence; returns its number of rows. ValueError if the type or the shape is another."""
    *batch, rows, width = tensor.shape
    if batch not in ([], [1]):
        raise ValueError
    message.data_type = attention_pb2.DataType.Value(f"DATA_TYPE_{tensor.datatype}")
    message.lengths.append(rows)
    message.width, message.data = width, data
    return int(rows)


def _fill_mask(message: attention_pb2.AttentionMask, tensor: Any, data: bytes) -> int:
    """Packs a mask; returns its number of elements. ValueError if the type or the shape is another."""
    if tensor.datatype != "BOOL" or list(tensor.shape) != [len(data)]:
        raise ValueError
    message.kind = attention_pb2.AttentionMask.KIND_KEYS
    message.bits = np.packbits(np.frombuffer(data, bool), bitorder="little").tobytes()
    return len(data)
