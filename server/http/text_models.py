"""Endpoints of text models, whose bodies are in `server.api.text_bodies`: answers, models and errors."""

import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.tei.v1 import tei_pb2 as tei
from attention_serving.server import NAME
from attention_serving.server.api import schemas, text_bodies
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.http.connection import HttpError, HttpRequest, Reply, run
from attention_serving.server.http.infer import INFER

LIST_MODELS, INFO = f"/{text_bodies.SERVICE}/ListModels", "/tei.v1.Info/Info"
# The header that names the model of a request.
MODEL_HEADER = "model-id"
# A header of replies: the digest of the model, which their forms have no member for.
DIGEST_HEADER = "x-model-digest"
# Paths of Cohere, with the name of their texts, and others whose errors have OpenAI's form, as under /v1.
COHERE_TEXTS = {"/v1/embed": "texts", "/v2/embed": "texts", "/rerank": "texts"}
COHERE_TEXTS |= {"/v1/rerank": "documents", "/v2/rerank": "documents"}
OPENAI_PATHS = {"/embeddings", "/models", "/v2/embed", "/v2/rerank"}
# What messages of errors begin with that are about texts.
TEXTS = re.compile(r"^(text|token_ids|input)(?=[:[.])")
# What TEI calls the errors of a status; others are those of Validation.
ERROR_TYPES = {429: "Overloaded", 500: "Backend", 501: "Backend", 503: "Unhealthy", 504: "Backend"}
NO_IDS = (
    "has token ids, which this server refuses (refuse_token_ids): those of another tokenizer would give wrong"
    " embeddings; send texts. In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False"
)
CODES = {404: "model_not_found", 401: "invalid_api_key", 429: "rate_limit_exceeded"}
MEMBERS = {*text_bodies.CohereEmbedRequest.model_fields, *text_bodies.RerankRequest.model_fields, "texts"}
MEMBERS |= text_bodies.REFUSED.keys()


async def answer(choose: Callable[[Any], type[text_bodies.TextBody]], request: HttpRequest) -> Reply:
    """Answers a request whose members decide of which type its body is."""
    data = await request.read(INFER)
    request.take_place()

    def decode(data: bytearray) -> tuple[text_bodies.TextBody, list[bytes]]:
        members = schemas.load(data)
        body = schemas.check(members, choose(members if isinstance(members, dict) else {}))
        body.model = request.headers.get(MODEL_HEADER, body.model)
        settings = request.backend.settings
        message = body.message(settings.max_message_bytes)
        has_ids = isinstance(message, pb.AttendRequest) and message.HasField("token_ids")
        if settings.refuse_token_ids and has_ids:
            raise InvalidRequestError(text_bodies.INPUT, NO_IDS)
        return body, list(body.serialize(message))

    body, messages = await request.decode_body(data, len(data), decode)
    request.memory.add(sum(map(len, messages)))
    replies = []
    for message in messages:
        replies.append(await request.call(body.rpc[0], message, timeout=None))
        request.memory.add(len(replies[-1]))

    def encode() -> Reply:
        responses = [body.rpc[1].FromString(reply) for reply in replies]
        body.model = body.model or responses[0].model_name
        digest = getattr(responses[0], "model_digest", "")
        document = body.document(responses, request.memory)
        return Reply.of_json(document, headers={DIGEST_HEADER: digest} if digest else {})

    return await run(sum(map(len, replies)), encode)


async def answer_any(request: HttpRequest) -> Reply:
    """Answers a request without a path of its own, by the form of its body and by what the model computes."""
    is_encoder = (await _info(request)).model_type == tei.MODEL_TYPE_EMBEDDING

    def choose(members: dict[str, Any]) -> type[text_bodies.TextBody]:
        if {"texts", "documents"} & members.keys():
            return text_bodies.rerank_body(members)
        if isinstance(members.get("inputs"), dict):
            return text_bodies.SimilarityRequest
        return text_bodies.EmbedRequest if is_encoder else text_bodies.ClassifyRequest

    return await answer(choose, request)


async def info(request: HttpRequest) -> Reply:
    """Answers GET /info: the model that answers requests that name none, or the one of the header."""
    reply = await _info(request)
    kind = tei.ModelType.Name(reply.model_type).removeprefix("MODEL_TYPE_").lower()
    document = {"sha": None, "docker_label": None, "served_model_name": reply.model_id}
    return Reply.of_json(document | schemas.to_json(reply) | {"model_type": {kind: {}}})


async def _info(request: HttpRequest) -> tei.InfoResponse:
    return tei.InfoResponse.FromString(await request.call(INFO, b""))


async def models(request: HttpRequest) -> Reply:
    """Answers GET /v1/models[/{model}]: the ready text encoders and classifiers that the caller may read."""
    ready = [model for model in await list_models(request) if model.state == pb.Model.STATE_READY]
    served = [model for model in ready if model.HasField("text_encoder") or model.HasField("text_classifier")]
    names = {name: model.name for model in served for name in (model.name, *model.aliases)}
    name = request.parameters.get("model")
    if name is None:
        data = [_encoder(model) for model in sorted({*names.values()})]
        return Reply.of_json({"object": "list", "data": data})
    if name not in names:
        message = f"model: {name[:100]!r} is not a text model that is ready; GET /v1/models lists them"
        raise HttpError(404, message)
    return Reply.of_json(_encoder(names[name]))


async def explore(request: HttpRequest) -> Reply:
    """Answers GET /explore/models: the models that the caller may read, as attention.v1 describes them."""
    return Reply.of_json({"models": [schemas.to_json(model) for model in await list_models(request)]})


async def list_models(request: HttpRequest) -> Sequence[pb.Model]:
    """Every version of the models that the caller may read, as the gRPC server describes them."""
    return pb.ListModelsResponse.FromString(await request.call(LIST_MODELS, b"")).models


def _encoder(name: str) -> dict[str, Any]:
    # Artifacts do not state when they were made.
    return {"id": name, "object": "model", "created": 0, "owned_by": NAME}


def error_json(error: HttpError, path: str) -> dict[str, Any]:
    """An error as clients of a path read it: an object as OpenAI's API has it, or a text, as those of TEI."""
    is_openai = f"{path}/".startswith("/v1/") or path in OPENAI_PATHS
    if path.startswith("/v2") and not is_openai:
        return {"error": error.message}
    message = TEXTS.sub(COHERE_TEXTS.get(path, "input" if is_openai else "inputs"), error.message)
    document = {"error": _openai_error(error.status, message) if is_openai else message}
    if not is_openai:
        error_type = ERROR_TYPES.get(error.status, "Validation")
        document["error_type"] = "Empty" if message.endswith(text_bodies.EMPTY) else error_type
    return document | ({"message": message} if path in COHERE_TEXTS else {})


def _openai_error(status: int, message: str) -> dict[str, Any]:
    """The object of an error; `param` is the member that the message begins with."""
    code = CODES.get(status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return {"message": message, "type": "server_error", "param": None, "code": None}
    name = message.partition(":")[0]
    if name in ("embedding", "pairs", "model_name"):
        name = "model"
    member = name if name.partition("[")[0] in MEMBERS else None
    kind = "rate_limit_error" if code == "rate_limit_exceeded" else "invalid_request_error"
    code = None if name.startswith("/") else code  # a path that does not exist, rather than a model
    return {"message": message, "type": kind, "param": member, "code": code}
