"""OpenAI's endpoints: /v1/models, and /v1/embeddings as messages of attention.v1, which have no padding.

Source of the form: the reference of OpenAI's embeddings endpoint.
"""

import base64
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from starlette.exceptions import HTTPException

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server import NAME
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http import schemas
from attention_serving.server.http.exchange import Exchange, Reply, run
from attention_serving.server.http.infer import METHOD as INFER
from attention_serving.server.http.schemas import EmbeddingRequest

SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"].full_name
ATTEND, LIST_MODELS = f"/{SERVICE}/Attend", f"/{SERVICE}/ListModels"
INPUT = "input"
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER = 16
# The members that fields of the message are made of.
MEMBERS = {"text": INPUT, "token_ids": INPUT, "embedding": "model"}
CODES = {404: "model_not_found", 401: "invalid_api_key", 429: "rate_limit_exceeded"}


class Decoded(NamedTuple):
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


async def embed(exchange: Exchange) -> Reply:
    """Answers POST /v1/embeddings."""
    data = await exchange.read(INFER)
    exchange.take_place()
    decoded = await exchange.decoded(data, len(data), decode)
    exchange.memory.add(len(decoded.message))
    reply = await exchange.call(ATTEND, decoded.message, timeout=None)
    exchange.memory.add(len(reply))
    return await run(len(reply), partial(_encode, reply, decoded, exchange.memory))


async def models(exchange: Exchange) -> Reply:
    """Answers GET /v1/models and /v1/models/{model}: the ready text encoders that the caller may read."""
    ready = pb.Model.STATE_READY
    found = await list_models(exchange)
    names = {model.name for model in found if model.HasField("text_encoder") and model.state == ready}
    name = exchange.parameters.get("model")
    if name is None:
        return Reply.of_json({"object": "list", "data": [_encoder(each) for each in sorted(names)]})
    if name not in names:
        message = f"model: {name[:100]!r} is not a text encoder that is ready; GET /v1/models lists them"
        raise HTTPException(404, message)
    return Reply.of_json(_encoder(name))


async def list_models(exchange: Exchange) -> Sequence[pb.Model]:
    """Every version of the models that the caller may read, as the gRPC server describes them."""
    return pb.ListModelsResponse.FromString(await exchange.call(LIST_MODELS, b"")).models


def decode(body: bytearray) -> Decoded:
    """Decodes the JSON of a request.

    Raises:
        InvalidRequestError: A member is wrong or unknown.
    """
    request = schemas.parse(body, EmbeddingRequest)
    embedding = pb.EmbeddingOptions(dimensions=request.dimensions or 0)
    message = pb.AttendRequest(model_name=request.model, embedding=embedding)
    _add_input(message, request)
    is_base64 = request.encoding_format == "base64"
    return Decoded(message.SerializeToString(), request.model, is_base64, len(message.token_ids.ids))


def _add_input(message: pb.AttendRequest, request: EmbeddingRequest) -> None:
    """Adds texts with their options, or token lists."""
    given = request.input
    items = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(items, list) or not items:
        raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
    options = {"prompt": request.prompt, "truncate": request.truncate}
    stated: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if all(isinstance(item, str) for item in items):
        message.text.CopyFrom(pb.TextSequences(texts=items, **stated))
        return
    if not all(_is_tokens(item) for item in items):
        raise InvalidRequestError(INPUT, "must contain texts only, or non-empty lists of token ids only")
    for name in stated:
        raise InvalidRequestError(name, "needs texts; the request has token ids")
    message.token_ids.lengths.extend(map(len, items))
    try:
        message.token_ids.ids.extend(chain.from_iterable(items))
    except ValueError:
        raise InvalidRequestError(INPUT, "contains a token id of more than 64 bits") from None


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _encode(reply: bytes, request: Decoded, reservation: Reservation) -> Reply:
    message = pb.AttendResponse.FromString(reply)
    vectors = message.context_vectors
    rows = np.frombuffer(vectors.data, np.dtype("<f4")).reshape(-1, vectors.width)
    reservation.add(rows.size * JSON_BYTES_PER_NUMBER)
    count = request.token_count or sum(message.token_counts)
    shown = [base64.b64encode(row.tobytes()).decode() for row in rows] if request.is_base64 else rows
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(shown)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    document: dict[str, Any] = {"object": "list", "data": data, "model": request.model, "usage": usage}
    if message.truncated:
        document["truncated"] = list(message.truncated)
    return Reply.of_json(document)


def _encoder(name: str) -> dict[str, Any]:
    # Artifacts do not state when they were made.
    return {"id": name, "object": "model", "created": 0, "owned_by": NAME}


def error_json(error: HTTPException) -> dict[str, Any]:
    """An error as OpenAI's clients read it. `param` is the member that its message begins with."""
    code, message = CODES.get(error.status_code), error.detail
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    name = message.partition(":")[0]
    name = MEMBERS.get(name, name)
    member = name if name in EmbeddingRequest.model_fields else None
    kind = "rate_limit_error" if code == "rate_limit_exceeded" else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": member, "code": code}}
