"""Endpoints of text models, as messages of attention.v1, which have no padding.

Sources of the forms: OpenAI's reference of /v1/embeddings and /v1/models; Cohere's and Jina's of /v1/rerank;
and that of Hugging Face's Text Embeddings Inference (TEI) of /predict.
"""

import base64
from abc import abstractmethod
from collections.abc import Sequence
from http import HTTPStatus
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server import NAME
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.http import schemas
from attention_serving.server.http.connection import HttpError, HttpRequest, Reply, run
from attention_serving.server.http.infer import INFER, SERVICE
from attention_serving.server.settings import Settings

ATTEND, LIST_MODELS = f"/{SERVICE}/Attend", f"/{SERVICE}/ListModels"
INPUT = "input"
# A header of replies: the digest of the model, which their forms have no member for.
DIGEST_HEADER = "x-model-digest"
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER = 16
# The member with the texts of each path, if it has another name than INPUT.
TEXTS = {"/v1/rerank": "documents", "/classify": "inputs", "/predict": "inputs"}
NO_IDS = (
    "has token ids, which this server refuses (refuse_token_ids): those of another tokenizer would give wrong"
    " embeddings; send texts. In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False"
)
INPUTS = "must be a text, a pair [text, text], or a list of such lists of one text or two, all of one size"
# A reply in base64, like binary tensors, has the numbers of a model as they are.
NO_EMBEDDING = f"its embedding {schemas.NOT_FINITE}; encoding_format base64 returns it"
NO_SCORE = f"its score {schemas.NOT_FINITE}; POST /v2/models/MODEL/infer returns it as binary data"
CODES = {404: "model_not_found", 401: "invalid_api_key", 429: "rate_limit_exceeded"}
# What to do instead of a member of other servers.
PROMPT = "send prompt to /v1/embeddings: the name of one of the model's prompts"
TRUNCATE = "send truncate: true to cut texts at their end to what the model takes, false to refuse them"
EXPORTED = "the exported model decides it"
FORMAT = "embeddings are 32-bit floats; send encoding_format: float or base64"
TOP_N = "send top_n to /v1/rerank; the answers of the others are complete"
# Members of other servers that would change a result: this, and values that change nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("input_type", "task", "task_type", "instruction", "prompt", "prompt_name"), (PROMPT,)),
    **dict.fromkeys(("truncate_prompt_tokens", "max_tokens", "max_tokens_per_doc"), (TRUNCATE,)),
    **dict.fromkeys(("max_chunks_per_doc", "overlap_tokens"), (TRUNCATE,)),
    **dict.fromkeys(("truncation_side", "truncation_direction"), (TRUNCATE, "right", "Right")),
    **dict.fromkeys(("normalize", "normalized", "embd_normalize", "softmax"), (EXPORTED,)),
    **dict.fromkeys(("add_special_tokens", "activation", "use_activation"), (EXPORTED, True)),
    "raw_scores": (EXPORTED, False),
    "padding": (EXPORTED, "do_not_pad"),
    **dict.fromkeys(("embedding_type", "output_dtype", "embed_dtype"), (FORMAT, "float", "float32")),
    "embedding_types": (FORMAT, ["float"]),
    "endianness": (FORMAT, "native", "little"),
    **dict.fromkeys(("top_k", "top_n"), (TOP_N,)),
    "late_chunking": ("use spans of attention_client", False),
    "return_multivector": ("request the output context_vectors of /v2/models/MODEL/infer", False),
    "return_embeddings": ("send the texts to /v1/embeddings", False),
    "rank_fields": ("send documents as texts, or as objects with a member text", ["text"]),
    "messages": ("send input",),
    "modality": ("send texts", "text"),
    "parameters": ("send its members beside the inputs", {}),
}


Document = Annotated[str, BeforeValidator(lambda item: item.get("text") if isinstance(item, dict) else item)]
# A text or a list.
Texts = Annotated[Any, Field(json_schema_extra={"type": ["string", "array"]})]


class TextBody(schemas.Body):
    """The JSON object of a request to a text model, whose members have other names in some APIs.

    Attributes:
        synonyms: The member that another name stands for, other than truncation.
        truncate: Whether texts with too many tokens are cut; None for the model's default.
    """

    synonyms: ClassVar[dict[str, str]] = {}

    truncate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_members(cls, content: Any) -> Any:
        """Raises InvalidRequestError for members that would change the result elsewhere, and not here."""
        if not isinstance(content, dict):
            return content
        members, synonyms = dict[str, Any](), cls.synonyms | {"truncation": "truncate"}
        for name, value in schemas.drop_nulls(content).items():
            member = synonyms.get(name, name)
            if member in members:
                raise InvalidRequestError(member, "has two names in the request; send one of them")
            advice, *neutral = REFUSED.get(name, ("",))
            if advice and member not in cls.model_fields and value not in neutral:
                raise InvalidRequestError(name, f"is not supported; {advice}")
            members[member] = value
        return members

    @abstractmethod
    def message(self, settings: Settings) -> pb.AttendRequest:
        """The request as a message.

        Raises:
            InvalidRequestError: A member is wrong.
        """

    @abstractmethod
    def document(self, reply: pb.AttendResponse, memory: Reservation) -> Any:
        """The JSON of the reply, for which memory is reserved.

        Raises:
            InvalidRequestError: A number has no form in JSON.
            OverloadedError: The memory is not available.
        """


class EmbeddingRequest(TextBody):
    """As OpenAI's API has it, with `prompt` and `truncate` in addition.

    `input` is a text, a list of texts, a list of token ids, or a list of such lists. `prompt` is the name of
    the prompt that is put before each text, and `truncate` says whether texts with too many tokens are cut.
    """

    synonyms: ClassVar = {"prompt_name": "prompt", "output_dimension": "dimensions"}

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    prompt: str | None = None
    _token_count = 0

    def message(self, settings: Settings) -> pb.AttendRequest:
        """Texts with their options, or token lists."""
        embedding = pb.EmbeddingOptions(dimensions=self.dimensions or 0)
        message = pb.AttendRequest(model_name=self.model, embedding=embedding)
        items = [self.input] if isinstance(self.input, str) or _is_tokens(self.input) else self.input
        if not isinstance(items, list) or not items:
            raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
        if all(isinstance(item, str) for item in items):
            text = pb.TextSequences(texts=items, prompt=self.prompt, truncate=self.truncate)
            message.text.CopyFrom(text)
            return message
        if not all(_is_tokens(item) for item in items):
            raise InvalidRequestError(INPUT, "must contain texts only, or non-empty lists of token ids only")
        for name in ("prompt", "truncate"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(name, "needs texts; the request has token ids")
        if settings.refuse_token_ids:
            raise InvalidRequestError(INPUT, NO_IDS)
        message.token_ids.lengths.extend(map(len, items))
        try:
            message.token_ids.ids.extend(chain.from_iterable(items))
        except ValueError:
            raise InvalidRequestError(INPUT, "contains a token id of more than 64 bits") from None
        self._token_count = len(message.token_ids.ids)
        return message

    def document(self, reply: pb.AttendResponse, memory: Reservation) -> Any:
        """The embeddings."""
        rows: Any = _rows(reply, memory, JSON_BYTES_PER_NUMBER)
        if self.encoding_format == "base64":
            rows = [base64.b64encode(row.tobytes()).decode() for row in rows]
        else:
            schemas.check_finite(INPUT, rows, NO_EMBEDDING)
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return _with_usage({"object": "list", "data": data, "model": self.model}, reply, self._token_count)


class RerankRequest(TextBody):
    """As in the APIs of Cohere and Jina. Names of TEI and Voyage stand for the same.

    `documents` are texts, or objects with a text as the member `text`. `truncate` says whether pairs with too
    many tokens are cut. Scores are those of the model with its activation.
    """

    synonyms: ClassVar = {"texts": "documents", "return_text": "return_documents", "top_k": "top_n"}

    model: str
    query: str
    documents: list[Document] = Field(min_length=1)
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False

    def message(self, settings: Settings) -> pb.AttendRequest:
        """Pairs of the query and each document. The queries may have the bytes of a message in all."""
        count, limit = len(self.documents), settings.max_message_bytes
        if (size := len(self.query.encode()) * count) > limit:
            message = f"has {size} bytes, once for each of {count} documents; the limit is {limit}"
            raise LimitExceededError("query", message)
        text = pb.TextSequences(texts=[self.query] * count, pairs=self.documents, truncate=self.truncate)
        return pb.AttendRequest(model_name=self.model, text=text)

    def document(self, reply: pb.AttendResponse, memory: Reservation) -> Any:
        """The documents by their relevance to the query."""
        scores = _rows(reply, memory, schemas.OBJECT_BYTES)
        if (count := scores.shape[1]) > 1:
            message = f"{self.model!r} has {count} labels, and a reranker has one; use POST /predict"
            raise InvalidRequestError("model", message)
        schemas.check_finite("documents", scores, NO_SCORE)
        results = list[dict[str, Any]]()
        for at in _highest_first(scores[:, 0])[: self.top_n]:
            text = {"document": {"text": self.documents[at]}} if self.return_documents else {}
            results.append({"index": at, "relevance_score": scores[at, 0], **text})
        return _with_usage({"model": self.model, "results": results}, reply)


class ClassifyRequest(TextBody):
    """As in the API of TEI, with `model` in addition, which is optional if one classifier is ready.

    `inputs` is a text, a pair of texts as a list, or a list of lists of one text each, or of two each.
    """

    inputs: Texts
    model: str | None = None

    @property
    def _is_single(self) -> bool:
        """Whether it is a text or one pair."""
        return not isinstance(self.inputs, list) or any(isinstance(item, str) for item in self.inputs)

    def message(self, settings: Settings) -> pb.AttendRequest:  # noqa: ARG002 - as of the others
        """Texts or pairs of texts."""
        items = self.inputs
        if self._is_single:
            items = [items if isinstance(items, list) else [items]]
        are_lists = {type(item) for item in items} == {list} and {len(item) for item in items} in ({1}, {2})
        if not are_lists or {type(text) for item in items for text in item} != {str}:
            raise InvalidRequestError("inputs", INPUTS)
        texts, *pairs = zip(*items, strict=True)
        text = pb.TextSequences(
            texts=texts, pairs=chain.from_iterable(pairs), return_labels=True, truncate=self.truncate
        )
        return pb.AttendRequest(model_name=self.model or "", text=text)

    def document(self, reply: pb.AttendResponse, memory: Reservation) -> Any:
        """The scores of all labels of each input."""
        rows, labels = _rows(reply, memory, schemas.OBJECT_BYTES), reply.labels
        schemas.check_finite("inputs", rows, NO_SCORE)
        scores = [[{"label": labels[at], "score": row[at]} for at in _highest_first(row)] for row in rows]
        return scores[0] if self._is_single else scores


MEMBERS = {name for body in (EmbeddingRequest, RerankRequest, ClassifyRequest) for name in body.model_fields}
MEMBERS |= REFUSED.keys()


async def answer(body: type[TextBody], request: HttpRequest) -> Reply:
    """Answers a request whose body is of a type."""
    data = await request.read(INFER)
    request.take_place()

    def decode(data: bytearray) -> tuple[TextBody, bytes]:
        content = schemas.parse(data, body)
        return content, content.message(request.backend.settings).SerializeToString()

    content, message = await request.decode_body(data, len(data), decode)
    request.memory.add(len(message))
    reply = await request.call(ATTEND, message, timeout=None)
    request.memory.add(len(reply))

    def encode() -> Reply:
        response = pb.AttendResponse.FromString(reply)
        document = content.document(response, request.memory)
        return Reply.of_json(document, headers={DIGEST_HEADER: response.model_digest})

    return await run(len(reply), encode)


async def models(request: HttpRequest) -> Reply:
    """Answers GET /v1/models[/{model}]: the ready text encoders and classifiers that the caller may read."""
    ready = [model for model in await list_models(request) if model.state == pb.Model.STATE_READY]
    served = [model for model in ready if model.HasField("text_encoder") or model.HasField("text_classifier")]
    names = {name: model.name for model in served for name in (model.name, *model.aliases)}
    name = request.parameters.get("model")
    if name is None:
        return Reply.of_json(
            {"object": "list", "data": [_encoder(model) for model in sorted({*names.values()})]}
        )
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


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(token) is int for token in item)


def _highest_first(scores: NDArray[np.float32]) -> list[int]:
    """The indices of finite scores (n,); of equal ones, the lowest first."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def _rows(reply: pb.AttendResponse, memory: Reservation, number_bytes: int) -> NDArray[np.float32]:
    """The embeddings or scores of a reply, (B, d), for each of which the JSON takes so many bytes."""
    vectors = reply.context_vectors
    rows = np.frombuffer(vectors.data, np.dtype("<f4")).reshape(-1, vectors.width)
    memory.add(rows.size * number_bytes)
    return rows


def _with_usage(document: dict[str, Any], reply: pb.AttendResponse, token_count: int = 0) -> dict[str, Any]:
    """The JSON of a reply with the number of tokens, of texts if it is 0, and which texts were cut."""
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
    name = message.partition(":")[0]
    if name in ("text", "token_ids"):
        name = TEXTS.get(path, INPUT)
    elif name in ("embedding", "pairs", "model_name"):
        name = "model"
    member = name if name.partition("[")[0] in MEMBERS else None
    kind = "rate_limit_error" if code == "rate_limit_exceeded" else "invalid_request_error"
    code = None if name.startswith("/") else code  # a path that does not exist, rather than a model
    return {"error": {"message": message, "type": kind, "param": member, "code": code}}
