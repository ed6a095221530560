"""Requests and answers of /v1/embeddings as messages of the gRPC server.

Source of the form: the reference of OpenAI's embeddings endpoint.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import numpy as np
import orjson

from protos.inference import open_inference_pb2 as pb
from server.engine.budget import Reservation
from server.engine.errors import InvalidRequestError
from server.http import fields, tensors
from server.http.errors import HttpError, TooLargeError
from server.rpc import protobuf_bytes

RAW_INPUT_CONTENTS: Final = (pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)
EMBEDDING, LENGTHS, TEXT, TOKEN_IDS, KEY_LENGTHS = "embedding", "lengths", "text", "token_ids", "key_lengths"
FORMATS: Final = ("float", "base64")
INPUT: Final = "input"
# `user` names an end user, and has no effect. `prompt` and `truncate` are this server's own.
KNOWN: Final = frozenset({"model", INPUT, "encoding_format", "dimensions", "user", "prompt", "truncate"})
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER: Final = 16
TOKEN_BYTES: Final = 8
InputTensor = pb.ModelInferRequest.InferInputTensor


@dataclass(frozen=True)
class EmbeddingRequest:
    """A decoded request.

    Attributes:
        message: The serialized ModelInferRequest.
        model: Name of the model.
        is_base64: Whether embeddings are sent as base64 of their bytes, and not as numbers.
        token_count: Number of tokens of token lists; 0 for texts.
    """

    message: bytes
    model: str
    is_base64: bool
    token_count: int


def decode(body: bytearray, max_message_bytes: int) -> EmbeddingRequest:
    """Decodes a request.

    Args:
        body: The JSON.
        max_message_bytes: Size of the largest message to the gRPC server.

    Raises:
        InvalidRequestError: A member is wrong or unknown.
        TooLargeError: The message would be too large.
    """
    document = fields.parse(body)
    if unknown := sorted(set(document) - KNOWN):
        raise InvalidRequestError(unknown[0][:100], f"is unknown; known are {', '.join(sorted(KNOWN))}")
    document = {name: value for name, value in document.items() if value is not None}
    form = fields.optional(document, "encoding_format", str, "float")
    if form not in FORMATS:
        raise InvalidRequestError(
            "encoding_format", f"is {form[:100]!r}; must be one of {', '.join(FORMATS)}"
        )
    fields.optional(document, "user", str, "")
    model = fields.required(document, "model", str)
    message = pb.ModelInferRequest(model_name=model, parameters=_parameters(document))
    message.outputs.add(name=EMBEDDING)
    contents, token_count = _add_input(message, document, max_message_bytes)
    parts: list[Any] = [message.SerializeToString()]
    for content in contents:
        parts += protobuf_bytes.field(RAW_INPUT_CONTENTS, [content])
    if sum(map(len, parts)) > max_message_bytes:
        raise _too_large(max_message_bytes)
    return EmbeddingRequest(b"".join(parts), model, form == "base64", token_count)


def encode(reply: bytes, request: EmbeddingRequest, reservation: Reservation) -> bytes:
    """Encodes the reply of the gRPC server as JSON.

    Raises:
        OverloadedError: The memory is not available.
    """
    message = pb.ModelInferResponse.FromString(reply)
    outputs = dict(zip((output.name for output in message.outputs), message.raw_output_contents, strict=True))
    rows = np.frombuffer(outputs[EMBEDDING], np.dtype("<f4")).reshape(tuple(message.outputs[0].shape))
    reservation.add(rows.size * JSON_BYTES_PER_NUMBER)
    count = request.token_count
    if LENGTHS in outputs:
        count = int(np.frombuffer(outputs[LENGTHS], np.dtype("<i8")).sum())
    data = [
        {
            "object": EMBEDDING,
            "index": index,
            "embedding": base64.b64encode(row).decode() if request.is_base64 else row,
        }
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    document: dict[str, Any] = {"object": "list", "data": data, "model": request.model, "usage": usage}
    if "truncated" in message.parameters:
        document["truncated"] = [int(at) for at in message.parameters["truncated"].string_param.split(",")]
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def error_body(error: HttpError) -> bytes:
    """The JSON of an error as OpenAI's clients read it."""
    is_request = error.status < HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "invalid_request_error" if is_request else "server_error"
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    codes = {
        HTTPStatus.NOT_FOUND: "model_not_found",
        HTTPStatus.UNAUTHORIZED: "invalid_api_key",
        HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_exceeded",
    }
    found = {
        "message": error.message,
        "type": kind,
        "param": _parameter_of(error.message) if is_request else None,
        "code": codes.get(HTTPStatus(error.status)) if error.status in set(HTTPStatus) else None,
    }
    return orjson.dumps({"error": found})


def _parameter_of(message: str) -> str | None:
    """The member that a message begins with; the server's names of inputs are one member here."""
    name = message.partition(":")[0]
    name = INPUT if name in (TEXT, TOKEN_IDS, KEY_LENGTHS) else name
    return name if name in KNOWN else None


def _parameters(document: Mapping[str, Any]) -> dict[str, pb.InferParameter]:
    found = {}
    if "dimensions" in document:
        size = fields.natural("dimensions", document["dimensions"])
        if not size:
            raise InvalidRequestError("dimensions", "must be 1 or more")
        found["dimensions"] = pb.InferParameter(int64_param=size)
    if "prompt" in document:
        found["prompt"] = pb.InferParameter(string_param=fields.required(document, "prompt", str))
    if "truncate" in document:
        found["truncate"] = pb.InferParameter(bool_param=fields.required(document, "truncate", bool))
    return found


def _add_input(
    message: pb.ModelInferRequest, document: Mapping[str, Any], max_message_bytes: int
) -> tuple[list[bytes], int]:
    """Adds texts or token lists to a message; returns the contents, and the number of tokens."""
    if INPUT not in document:
        raise InvalidRequestError(INPUT, "is required")
    given = document[INPUT]
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
    if all(isinstance(item, str) for item in items):
        message.inputs.append(InputTensor(name=TEXT, datatype="BYTES", shape=[len(items)]))
        message.outputs.add(name=LENGTHS)
        return [tensors.to_bytes(INPUT, items, "BYTES", (len(items),))], 0
    if not all(_is_tokens(item) for item in items):
        raise InvalidRequestError(INPUT, "must contain texts only, or non-empty lists of token ids only")
    lengths = [len(item) for item in items]
    if len(items) * max(lengths) * TOKEN_BYTES > max_message_bytes:
        raise _too_large(max_message_bytes)
    shape = (len(items), max(lengths))
    message.inputs.append(InputTensor(name=TOKEN_IDS, datatype="INT64", shape=shape))
    message.inputs.append(InputTensor(name=KEY_LENGTHS, datatype="INT64", shape=[len(items)]))
    ids = np.zeros(shape, np.int64)
    for row, item in zip(ids, items, strict=True):
        row[: len(item)] = _numbers(item)
    return [ids.tobytes(), np.array(lengths, np.int64).tobytes()], sum(lengths)


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _numbers(item: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    try:
        return np.array(item, np.int64)
    except OverflowError:
        raise InvalidRequestError(INPUT, "contains a token id of more than 64 bits") from None


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"{INPUT}: is larger than the limit of {limit} bytes; send fewer texts at a time")
