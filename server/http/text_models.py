"""Endpoints of text models, as messages of attention.v1, which have no padding.

Sources of the forms: OpenAI's reference of /v1/embeddings and /v1/models; Cohere's and Jina's of /v1/rerank;
and that of Hugging Face's Text Embeddings Inference (TEI) of /predict.
"""

import base64
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server import NAME
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.http import schemas
from attention_serving.server.http.connection import HttpError, HttpRequest, Reply, run
from attention_serving.server.http.infer import METHOD as INFER
from attention_serving.server.http.infer import SERVICE
from attention_serving.server.http.schemas import ClassifyRequest, EmbeddingRequest, RerankRequest

ATTEND, LIST_MODELS = f"/{SERVICE}/Attend", f"/{SERVICE}/ListModels"
INPUT = "input"
# A header of answers: the digest of the model, which their forms have no member for.
DIGEST_HEADER = "x-model-digest"
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER = 16
# The member with the texts of each path, if it has another name than INPUT.
TEXTS = {"/v1/rerank": "documents", "/classify": "inputs", "/predict": "inputs"}
MEMBERS = {name for body in (EmbeddingRequest, RerankRequest, ClassifyRequest) for name in body.model_fields}
MEMBERS |= schemas.REFUSED.keys()
NO_IDS = (
    "has token ids, which this server refuses (refuse_token_ids): those of another tokenizer would give wrong"
    " embeddings; send texts. In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False"
)
INPUTS = "must be a text, a pair [text, text], or a list of such lists of one text or two, all of one size"
# An answer in base64, like binary tensors, has the numbers of a model as they are.
NO_EMBEDDING = f"its embedding {schemas.NOT_FINITE}; encoding_format base64 returns it"
NO_SCORE = f"its score {schemas.NOT_FINITE}; POST /v2/models/MODEL/infer returns it as binary data"
CODES = {404: "model_not_found", 401: "invalid_api_key", 429: "rate_limit_exceeded"}


# Makes the JSON of a reply, whose memory it reserves.
Encode: TypeAlias = Callable[[pb.AttendResponse, Reservation], Any]


async def answer(request: HttpRequest, decode: Callable[[bytearray], tuple[bytes, Encode]]) -> Reply:
    """Answers a request, of whose body `decode` makes a serialized AttendRequest."""
    data = await request.read(INFER)
    request.take_place()
    message, encode = await request.decode_body(data, len(data), decode)
    request.memory.add(len(message))
    reply = await request.call(ATTEND, message, timeout=None)
    request.memory.add(len(reply))

    def work() -> Reply:
        response = pb.AttendResponse.FromString(reply)
        document = encode(response, request.memory)
        return Reply.of_json(document, headers={DIGEST_HEADER: response.model_digest})

    return await run(len(reply), work)


async def embed(request: HttpRequest) -> Reply:
    """Answers POST /v1/embeddings."""
    return await answer(request, partial(decode, takes_ids=not request.service.settings.refuse_token_ids))


async def models(request: HttpRequest) -> Reply:
    """Answers GET /v1/models[/{model}]: the ready text encoders and classifiers that the caller may read."""
    ready = [model for model in await list_models(request) if model.state == pb.Model.STATE_READY]
    names = {
        model.name for model in ready if model.HasField("text_encoder") or model.HasField("text_classifier")
    }
    name = request.parameters.get("model")
    if name is None:
        return Reply.of_json({"object": "list", "data": [_encoder(model) for model in sorted(names)]})
    if name not in names:
        message = f"model: {name[:100]!r} is not a text model that is ready; GET /v1/models lists them"
        raise HttpError(404, message)
    return Reply.of_json(_encoder(name))


async def explore(request: HttpRequest) -> Reply:
    """Answers GET /explore/models: the models that the caller may read, as attention.v1 describes them."""
    models = await list_models(request)
    return Reply.of_json({"models": [schemas.to_json(model) for model in models]})


async def rerank(request: HttpRequest) -> Reply:
    """Answers POST /v1/rerank: the documents by their relevance to the query."""
    return await answer(request, partial(_decode_documents, request.service.settings.max_message_bytes))


async def classify(request: HttpRequest) -> Reply:
    """Answers POST /predict and /classify: the scores of all labels."""
    return await answer(request, _decode_inputs)


async def list_models(request: HttpRequest) -> Sequence[pb.Model]:
    """Every version of the models that the caller may read, as the gRPC server describes them."""
    return pb.ListModelsResponse.FromString(await request.call(LIST_MODELS, b"")).models


def decode(body: bytearray, *, takes_ids: bool = True) -> tuple[bytes, Encode]:
    """The serialized AttendRequest of a body, and what encodes its reply.

    Raises:
        InvalidRequestError: A member is wrong.
    """
    request = schemas.parse(body, EmbeddingRequest)
    embedding = pb.EmbeddingOptions(dimensions=request.dimensions or 0)
    message = pb.AttendRequest(model_name=request.model, embedding=embedding)
    _add_input(message, request)
    count = len(message.token_ids.ids)
    if count and not takes_ids:
        raise InvalidRequestError(INPUT, NO_IDS)

    def encode(reply: pb.AttendResponse, memory: Reservation) -> Any:
        rows = _rows(reply, memory, JSON_BYTES_PER_NUMBER)
        is_base64 = request.encoding_format == "base64"
        if not is_base64:
            schemas.check_finite(INPUT, rows, NO_EMBEDDING)
        texts = [base64.b64encode(row.tobytes()).decode() for row in rows] if is_base64 else rows
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(texts)]
        return _with_usage({"object": "list", "data": data, "model": request.model}, reply, count)

    return message.SerializeToString(), encode


def _add_input(message: pb.AttendRequest, request: EmbeddingRequest) -> None:
    """Adds texts with their options, or token lists."""
    items = request.input
    if isinstance(items, str) or _is_tokens(items):
        items = [items]
    if not isinstance(items, list) or not items:
        raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
    if all(isinstance(item, str) for item in items):
        text = pb.TextSequences(texts=items, prompt=request.prompt, truncate=request.truncate)
        message.text.CopyFrom(text)
        return
    if not all(_is_tokens(item) for item in items):
        raise InvalidRequestError(INPUT, "must contain texts only, or non-empty lists of token ids only")
    for name in ("prompt", "truncate"):
        if getattr(request, name) is not None:
            raise InvalidRequestError(name, "needs texts; the request has token ids")
    message.token_ids.lengths.extend(map(len, items))
    try:
        message.token_ids.ids.extend(chain.from_iterable(items))
    except ValueError:
        raise InvalidRequestError(INPUT, "contains a token id of more than 64 bits") from None


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(token) is int for token in item)


def _decode_documents(limit: int, body: bytearray) -> tuple[bytes, Encode]:
    """As `decode`, for a query and documents; the queries may have `limit` bytes in all."""
    request = schemas.parse(body, RerankRequest)
    query, documents = request.query, request.documents
    if (size := len(query.encode()) * len(documents)) > limit:  # it is the first text of every pair
        message = f"has {size} bytes, once for each of {len(documents)} documents; the limit is {limit}"
        raise LimitExceededError("query", message)
    text = pb.TextSequences(texts=[query] * len(documents), pairs=documents, truncate=request.truncate)

    def encode(reply: pb.AttendResponse, memory: Reservation) -> Any:
        scores = _rows(reply, memory, schemas.OBJECT_BYTES)
        if (count := scores.shape[1]) > 1:
            message = f"{request.model!r} has {count} labels, and a reranker has one; use POST /predict"
            raise InvalidRequestError("model", message)
        schemas.check_finite("documents", scores, NO_SCORE)
        results = list[dict[str, Any]]()
        for at in _highest_first(scores[:, 0])[: request.top_n]:
            document = {"document": {"text": documents[at]}} if request.return_documents else {}
            results.append({"index": at, "relevance_score": scores[at, 0], **document})
        return _with_usage({"model": request.model, "results": results}, reply)

    return pb.AttendRequest(model_name=request.model, text=text).SerializeToString(), encode


def _decode_inputs(body: bytearray) -> tuple[bytes, Encode]:
    """As `decode`, for texts or pairs of texts; and a classifier, the only one if its name is left out."""
    request = schemas.parse(body, ClassifyRequest)
    inputs = request.inputs
    is_single = not isinstance(inputs, list) or any(isinstance(item, str) for item in inputs)
    items = [inputs if isinstance(inputs, list) else [inputs]] if is_single else inputs
    are_lists = {type(item) for item in items} == {list} and {len(item) for item in items} in ({1}, {2})
    if not are_lists or {type(text) for item in items for text in item} != {str}:
        raise InvalidRequestError("inputs", INPUTS)
    texts, *pairs = zip(*items, strict=True)
    text = pb.TextSequences(texts=texts, pairs=chain.from_iterable(pairs), return_labels=True)
    if request.truncate is not None:
        text.truncate = request.truncate
    message = pb.AttendRequest(model_name=request.model or "", text=text)

    def encode(reply: pb.AttendResponse, memory: Reservation) -> Any:
        rows, labels = _rows(reply, memory, schemas.OBJECT_BYTES), reply.labels
        schemas.check_finite("inputs", rows, NO_SCORE)
        scores = [[{"label": labels[at], "score": row[at]} for at in _highest_first(row)] for row in rows]
        return scores[0] if is_single else scores

    return message.SerializeToString(), encode


def _highest_first(scores: NDArray[np.float32]) -> list[int]:
    """The indices of finite scores (n,); of equal ones, the lowest first."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def _rows(reply: pb.AttendResponse, memory: Reservation, number_bytes: int) -> NDArray[np.float32]:
    """The embeddings or scores of a reply, (B, d), for each of which an answer takes so many bytes."""
    vectors = reply.context_vectors
    rows = np.frombuffer(vectors.data, np.dtype("<f4")).reshape(-1, vectors.width)
    memory.add(rows.size * number_bytes)
    return rows


def _with_usage(document: dict[str, Any], reply: pb.AttendResponse, token_count: int = 0) -> dict[str, Any]:
    """The JSON of an answer with the number of tokens, of texts if it is 0, and which texts were cut."""
    count = token_count or sum(reply.token_counts)
    document["usage"] = {"prompt_tokens": count, "total_tokens": count}
    if reply.truncated:
        document["truncated"] = list(reply.truncated)
    return document


def _encoder(name: str) -> dict[str, Any]:
    # Artifacts do not state when they were made.
    return {"id": name, "object": "model", "created": 0, "owned_by": NAME}


def error_json(error: HttpError, path: str) -> dict[str, Any]:
    """An error as clients of a path read it: an object as OpenAI's API has it, or a text.

    `param` is the member that the message begins with.
    """
    code, message = CODES.get(error.status), error.message
    if not f"{path}/".startswith("/v1/") and path not in TEXTS:
        return {"error": message}
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    name, texts = message.partition(":")[0], TEXTS.get(path, INPUT)
    name = {
        "text": texts,
        "token_ids": texts,
        "embedding": "model",
        "pairs": "model",
        "model_name": "model",
    }.get(name, name)
    member = name if name.partition("[")[0] in MEMBERS else None
    kind = "rate_limit_error" if code == "rate_limit_exceeded" else "invalid_request_error"
    code = None if name.startswith("/") else code  # a path that does not exist, rather than a model
    return {"error": {"message": message, "type": kind, "param": member, "code": code}}
