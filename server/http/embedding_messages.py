"""Requests and answers of /v1/embeddings as messages of attention.v1, whose sequences have no padding.

Source of the form: the reference of OpenAI's embeddings endpoint.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

import numpy as np
import orjson

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server import NAME
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http import fields
from attention_serving.server.http.errors import BackendError, HttpError

FORMATS: Final = ("float", "base64")
INPUT: Final = "input"
# `user` names an end user, and has no effect. `prompt` and `truncate` are this server's own.
KNOWN: Final = frozenset({"model", INPUT, "encoding_format", "dimensions", "user", "prompt", "truncate"})
# How the gRPC server refuses a model that is not a text encoder.
NO_ENCODER: Final = "is not a text encoder"
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER: Final = 16
# The member that a field of the message was made of.
MEMBERS: Final = {"text": INPUT, "token_ids": INPUT, "embedding": "model"}
# Options of texts.
OPTIONS: Final[Mapping[str, type]] = {"prompt": str, "truncate": bool}
MAX_UINT32: Final = 2**32 - 1


@dataclass(frozen=True)
class EmbeddingRequest:
    """A decoded request.

    Attributes:
        message: The serialized AttendRequest.
        model: Name of the model.
        is_base64: Whether embeddings are sent as base64 of their bytes, and not as numbers.
        token_count: Number of tokens of token lists; 0 for texts.
    """

    message: bytes
    model: str
    is_base64: bool
    token_count: int


def decode(body: bytearray) -> EmbeddingRequest:
    """Decodes the JSON of a request.

    Raises:
        InvalidRequestError: A member is wrong or unknown.
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
    message = pb.AttendRequest(
        model_name=model, embedding=pb.EmbeddingOptions(dimensions=_dimensions(document))
    )
    _add_input(message, document)
    return EmbeddingRequest(message.SerializeToString(), model, form == "base64", len(message.token_ids.ids))


def encode(reply: bytes, request: EmbeddingRequest, reservation: Reservation) -> bytes:
    """Encodes the reply of the gRPC server as JSON.

    Raises:
        OverloadedError: The memory is not available.
    """
    message = pb.AttendResponse.FromString(reply)
    vectors = message.context_vectors
    rows = np.frombuffer(vectors.data, np.dtype("<f4")).reshape(-1, vectors.width)
    reservation.add(rows.size * JSON_BYTES_PER_NUMBER)
    count = request.token_count or sum(message.token_counts)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(row.tobytes()).decode() if request.is_base64 else row,
        }
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    document: dict[str, Any] = {"object": "list", "data": data, "model": request.model, "usage": usage}
    if message.truncated:
        document["truncated"] = list(message.truncated)
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def encoders(models: Iterable[pb.Model]) -> dict[str, Any]:
    """The text encoders that are ready, by their names in order, as members of the answer of /v1/models.

    Artifacts do not state when they were made, so `created` is 0.
    """
    ready = pb.Model.STATE_READY
    names = {model.name for model in models if model.HasField("text_encoder") and model.state == ready}
    return {name: {"id": name, "object": "model", "created": 0, "owned_by": NAME} for name in sorted(names)}


def of_refusal(error: BackendError, model: str) -> HttpError:
    """The error of a call that the gRPC server refused. A model without embeddings is told apart."""
    if not error.message.endswith(NO_ENCODER):
        return error
    message = (
        f"model: {model!r} {NO_ENCODER}; request its outputs with POST /v2/models/{model}/infer, or choose a "
        "model that GET /v1/models lists"
    )
    return HttpError(error.status, message)


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
    """The member that a message begins with, by its own name or by the name of the gRPC server's field."""
    name = message.partition(":")[0]
    name = MEMBERS.get(name, name)
    return name if name in KNOWN else None


def _dimensions(document: Mapping[str, Any]) -> int:
    if "dimensions" not in document:
        return 0
    size = fields.natural("dimensions", document["dimensions"], MAX_UINT32)
    if not size:
        raise InvalidRequestError("dimensions", "must be 1 or more")
    return size


def _add_input(message: pb.AttendRequest, document: Mapping[str, Any]) -> None:
    """Adds texts with their options, or token lists."""
    if INPUT not in document:
        raise InvalidRequestError(INPUT, "is required")
    given = document[INPUT]
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
    options: dict[str, Any] = {
        name: fields.required(document, name, kind) for name, kind in OPTIONS.items() if name in document
    }
    if all(isinstance(item, str) for item in items):
        message.text.CopyFrom(pb.TextSequences(texts=items, **options))
        return
    if not all(_is_tokens(item) for item in items):
        raise InvalidRequestError(INPUT, "must contain texts only, or non-empty lists of token ids only")
    for name in options:
        raise InvalidRequestError(name, "needs texts; the request has token ids")
    message.token_ids.lengths.extend(map(len, items))
    try:
        message.token_ids.ids.extend(chain.from_iterable(items))
    except ValueError:
        raise InvalidRequestError(INPUT, "contains a token id of more than 64 bits") from None


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)
