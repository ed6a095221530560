"""JSON bodies of requests to text models as messages of attention.v1, and replies as JSON.

Sources of the forms: OpenAI's reference of /v1/embeddings; Cohere's of embed and rerank; those of Jina and
Voyage; and the router of Hugging Face's Text Embeddings Inference (TEI), whose gRPC has the same members.
"""

import base64
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Annotated, Any, ClassVar, Literal, TypeAlias
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import schemas
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError

SERVICE = pb.DESCRIPTOR.services_by_name["AttentionService"].full_name
INPUT = "input"
# A number in JSON has fewer characters, with a comma.
JSON_BYTES_PER_NUMBER = 16
EMPTY = "is empty; at least one text is required"
INPUTS = "must be a text, a pair [text, text], or a list of such lists of one text or two, all of one size"
# A reply in base64, like binary tensors, has the numbers of a model as they are.
NO_EMBEDDING = f"its embedding {schemas.NOT_FINITE}; encoding_format base64 returns it"
NO_SPARSE_EMBEDDING = f"its sparse embedding {schemas.NOT_FINITE}; attention.v1 returns it"
NO_SCORE = f"its score {schemas.NOT_FINITE}; POST /v2/models/MODEL/infer returns it as binary data"
# The type that the server is asked for, by a type of embeddings in Cohere's API; 0 for that of the model.
TYPES: dict[str, Any] = {"int8": pb.DATA_TYPE_INT8, "uint8": pb.DATA_TYPE_UINT8}
TYPES |= dict.fromkeys(("float", "base64"), 0) | dict.fromkeys(("binary", "ubinary"), pb.DATA_TYPE_BITS)
OutputType: TypeAlias = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]
DTYPES = {pb.DATA_TYPE_INT8: "i1", pb.DATA_TYPE_UINT8: "u1", pb.DATA_TYPE_BITS: "u1"}
SIGN_BIT = np.uint8(128)
# What to do instead of a member of other servers.
PROMPT = "send prompt to /v1/embeddings or /v1/rerank: the name of one of the model's prompts"
TRUNCATE = "send truncate: true to cut texts to what the model takes, false to refuse them"
EXPORTED = "the exported model decides it"
FORMAT = "embeddings are float, int8, uint8, binary or ubinary, little-endian"
# Members of other servers that would change a result: this, and values that change nothing.
REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("task", "task_type", "instruction", "prompt"), (PROMPT,)),
    **dict.fromkeys(("truncate_prompt_tokens", "max_tokens", "max_tokens_per_doc"), (TRUNCATE,)),
    **dict.fromkeys(("max_chunks_per_doc", "overlap_tokens"), (TRUNCATE,)),
    **dict.fromkeys(("embd_normalize", "softmax"), (EXPORTED,)),
    **dict.fromkeys(("normalize", "input_type", "dimensions"), ("it is for embeddings",)),
    **dict.fromkeys(("add_special_tokens", "activation", "use_activation"), (EXPORTED, True)),
    "raw_scores": ("it is for scores", False),
    "padding": (EXPORTED, "do_not_pad"),
    **dict.fromkeys(("output_dtype", "embed_dtype"), (FORMAT, "float", "float32")),
    "embedding_types": ("send them to /v2/embed", ["float"]),
    "endianness": (FORMAT, "native", "little"),
    **dict.fromkeys(("top_k", "top_n"), ("send top_n to /v1/rerank; other answers are complete",)),
    "late_chunking": ("use spans of attention_client", False),
    "return_multivector": ("request the output context_vectors of /v2/models/MODEL/infer", False),
    "return_embeddings": ("send the texts to /v1/embeddings", False),
    "rank_fields": ("send documents as texts, or as objects with a member text", ["text"]),
    "images": ("send texts", []),
    "messages": ("send input",),
    "modality": ("send texts", "text"),
}


Document = Annotated[str, BeforeValidator(lambda item: item.get("text") if isinstance(item, dict) else item)]
Side = Annotated[Literal["left", "right"], BeforeValidator(lambda side: str(side).lower().rpartition("_")[2])]
# A text or a list.
Texts = Annotated[Any, Field(json_schema_extra={"type": ["string", "array"]})]


# What `truncate` says in Cohere's API: whether texts are cut, and which end.
CUTS: dict[Any, tuple[bool | None, str | None]]
CUTS = {"NONE": (False, None), "START": (True, "left"), "END": (True, "right")}
# Other names of members, on every path.
SYNONYMS = {"truncation": "truncate", "truncation_direction": "truncation_side", "prompt_name": "prompt"}
SYNONYMS |= {"output_dimension": "dimensions", "normalized": "normalize", "embedding_type": "output_dtype"}


class TextBody(schemas.Body):
    """The JSON object of a request to a text model, whose members have other names in some APIs.

    The members of `parameters` count as members of the body.

    Attributes:
        synonyms: The member that another name stands for, other than truncation.
        rpc: The method of gRPC that answers, and the type of its replies.
        model: Name of the model; empty if the server chooses.
        truncate: Whether texts with too many tokens are cut, or where; None for the model's default.
        truncation_side: Which end is cut; None for the model's default.
    """

    synonyms: ClassVar[dict[str, str]] = {}
    rpc: ClassVar[tuple[str, Any]] = f"/{SERVICE}/Attend", pb.AttendResponse

    model: str = ""
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    truncation_side: Side | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_members(cls, content: Any) -> Any:
        """Raises InvalidRequestError for members that would change the result elsewhere, and not here."""
        if not isinstance(content, dict):
            return content
        parameters = content.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequestError("parameters", "must be an object")
        members, synonyms = dict[str, Any](), SYNONYMS | cls.synonyms
        for name, value in schemas.drop_nulls(parameters | content).items():
            member = synonyms.get(name, name)
            if member in members:
                raise InvalidRequestError(member, "has two names in the request; send one of them")
            advice, *neutral = REFUSED.get(member, ("",))
            if advice and member not in cls.model_fields and value not in neutral:
                raise InvalidRequestError(name, f"is not supported; {advice}")
            members[member] = value
        return members

    def text(self, texts: Sequence[str], **fields: Any) -> pb.TextSequences:
        """Texts with what the body says of all of them.

        Raises:
            InvalidRequestError: There are none.
        """
        if not texts:
            raise InvalidRequestError(INPUT, EMPTY)
        cut: Any = self.truncate
        truncate, side = CUTS.get(cut, (cut, self.truncation_side))
        fields["truncation_side"] = f"TRUNCATION_SIDE_{side.upper()}" if side else None
        return pb.TextSequences(texts=texts, truncate=truncate, **fields)

    @abstractmethod
    def message(self, max_bytes: int) -> Any:
        """The request as a message.

        Raises:
            InvalidRequestError: A member is wrong.
        """

    def serialize(self, message: Any) -> Iterator[bytes]:
        """The message of each call that the answer needs."""
        yield message.SerializeToString()

    @abstractmethod
    def document(self, replies: Sequence[Any], memory: Reservation) -> Any:
        """The JSON of the replies, for which memory is reserved.

        Raises:
            InvalidRequestError: A number has no form in JSON.
            OverloadedError: The memory is not available.
        """


class TextsRequest(TextBody):
    """Texts for a text encoder, under the names that OpenAI, TEI and Cohere have for them."""

    synonyms: ClassVar = {"inputs": INPUT, "texts": INPUT}

    input: Texts
    prompt: str | None = None
    input_type: str | None = Field(
        None, pattern="^(?i:(search_)?(query|document|classification|clustering))$"
    )

    @property
    def items(self) -> Any:
        """The texts, or lists of token ids."""
        return [self.input] if isinstance(self.input, str) or _is_tokens(self.input) else self.input

    def message(self, max_bytes: int) -> pb.AttendRequest:  # noqa: ARG002 - as of the others
        """Texts with their options, or token lists."""
        items = self.items
        if not isinstance(items, list):
            raise InvalidRequestError(INPUT, "must be a text, a list of texts, token ids or a list of them")
        if all(isinstance(item, str) for item in items):
            kind = (self.input_type or "unspecified").upper().removeprefix("SEARCH_")
            text = self.text(items, prompt=self.prompt, input_kind=f"INPUT_KIND_{kind}")
            return pb.AttendRequest(model_name=self.model, text=text)
        for name in ("prompt", "input_type", "truncate", "truncation_side"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(name, "needs texts; the request has token ids")
        return pb.AttendRequest(model_name=self.model, token_ids=_token_sequences(INPUT, items))


class EmbeddingRequest(TextsRequest):
    """As OpenAI's API has it, with `prompt`, `truncate`, `truncation_side` and `normalize` in addition.

    `input` is a text, a list of texts, a list of token ids, or a list of such lists. `prompt` is the name of
    the prompt that is put before each text; `input_type` selects it, as query, document, classification or
    clustering. `truncate` says whether texts with too many tokens are cut, and `truncation_side` where.
    `output_dtype` is float, int8, uint8, binary or ubinary.
    """

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    normalize: bool | None = None
    output_dtype: OutputType = "float"
    _token_count = 0

    @property
    def kinds(self) -> Sequence[OutputType]:
        """The types of embeddings that are asked for."""
        return [self.output_dtype]

    def message(self, max_bytes: int) -> pb.AttendRequest:
        """The texts with the options of embeddings."""
        message = super().message(max_bytes)
        options = pb.EmbeddingOptions(dimensions=self.dimensions or 0, normalised=self.normalize)
        message.embedding.CopyFrom(options)
        self._token_count = len(message.token_ids.ids)
        return message

    def serialize(self, message: Any) -> Iterator[bytes]:
        """One for each type that the server has for the types that are asked for."""
        for data_type in dict.fromkeys(TYPES[kind] for kind in self.kinds):
            message.output_data_type = data_type
            yield message.SerializeToString()

    def embeddings(self, reply: pb.AttendResponse, memory: Reservation, kind: OutputType) -> Any:
        """The embeddings of a reply in a type, which is that of the reply or is made of it."""
        is_text = "base64" in (kind, self.encoding_format)
        rows = _rows(reply, memory, INPUT, "" if is_text else NO_EMBEDDING)
        if kind == "binary":
            rows = (rows ^ SIGN_BIT).view(np.int8)
        return [base64.b64encode(row.tobytes()).decode() for row in rows] if is_text else rows

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The embeddings."""
        rows = self.embeddings(replies[0], memory, self.output_dtype)
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        document = {"object": "list", "data": data, "model": self.model}
        return _with_usage(document, replies[0], self._token_count)


class CohereEmbedRequest(EmbeddingRequest):
    """As Cohere's API has it, of version 1: without `embedding_types`, the answer has floats only."""

    embedding_types: Annotated[list[OutputType], Field(min_length=1)] | None = None

    @property
    def kinds(self) -> Sequence[OutputType]:
        """The types of embeddings that are asked for."""
        return self.embedding_types or ["float"]

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The embeddings by their types."""
        by_type = dict(zip(dict.fromkeys(TYPES[kind] for kind in self.kinds), replies, strict=True))
        rows = {kind: self.embeddings(by_type[TYPES[kind]], memory, kind) for kind in self.kinds}
        is_typed = self.embedding_types is not None
        return _of_cohere(replies[0], self._token_count) | {
            "response_type": f"embeddings_{'by_type' if is_typed else 'floats'}",
            "embeddings": rows if is_typed else rows["float"],
            "texts": self.items,
        }


class CohereEmbedV2Request(CohereEmbedRequest):
    """As Cohere's API has it, of version 2."""

    embedding_types: Annotated[list[OutputType], Field(min_length=1)] = Field(["float"])


class EmbedRequest(EmbeddingRequest):
    """As TEI's API has it. Embeddings have length 1 unless `normalize` is false."""

    normalize: bool | None = True

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The embeddings."""
        return self.embeddings(replies[0], memory, self.output_dtype)


class EmbedAllRequest(TextsRequest):
    """As TEI's API has it: a vector for each token, special tokens included unless the model skips them."""

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The vectors of each text."""
        rows = _rows(replies[0], memory, INPUT, NO_EMBEDDING)
        return np.split(rows, np.cumsum(replies[0].context_vectors.lengths)[:-1])


class EmbedSparseRequest(TextsRequest):
    """As TEI's API has it, with `top_k` in addition: the largest number of weights of a text."""

    top_k: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None

    def message(self, max_bytes: int) -> pb.AttendRequest:
        """The texts with the option of sparse embeddings."""
        message = super().message(max_bytes)
        message.sparse.CopyFrom(pb.SparseOptions(top_k=self.top_k or 0))
        return message

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The token ids and weights of each text."""
        vectors = replies[0].sparse_embeddings
        memory.add(schemas.OBJECT_BYTES * len(vectors.values))
        values = np.split(np.array(vectors.values, np.float32), np.cumsum(vectors.lengths)[:-1])
        largest = np.array([np.abs(weights).max(initial=0) for weights in values])
        schemas.check_finite(INPUT, largest, NO_SPARSE_EMBEDDING)
        indices = iter(vectors.indices)
        return [
            [{"index": index, "value": value} for value, index in zip(weights, indices, strict=False)]
            for weights in values
        ]


class Sentences(schemas.Body):
    """A sentence, and those that it is compared with."""

    source_sentence: str
    sentences: Annotated[list[str], Field(min_length=1)]


class SimilarityRequest(TextsRequest):
    """As TEI's API has it: the cosines between the embedding of a sentence and those of others."""

    input: Sentences

    @property
    def items(self) -> Any:
        """All sentences."""
        return [self.input.source_sentence, *self.input.sentences]

    def message(self, max_bytes: int) -> pb.AttendRequest:
        """The sentences, whose embeddings have length 1."""
        message = super().message(max_bytes)
        message.embedding.normalised = True
        return message

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The cosines."""
        rows = _rows(replies[0], memory, INPUT, NO_EMBEDDING)
        return rows[1:] @ rows[0]


class RerankRequest(TextBody):
    """As in the APIs of Cohere and Jina. Names of TEI and Voyage stand for the same.

    `documents` are texts, or objects with a text as the member `text`. `truncate` says whether pairs with too
    many tokens are cut. Scores are those of the model with its activation, or without it if `raw_scores`.
    `prompt` is the name of a prompt, such as an instruction of a causal reranker.

    Attributes:
        has_objects: Whether documents of the answer are objects with a text.
    """

    synonyms: ClassVar = {"texts": "documents", "return_text": "return_documents", "top_k": "top_n"}

    has_objects: ClassVar = True

    query: str
    documents: list[Document]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    raw_scores: bool = False
    prompt: str | None = None

    def message(self, max_bytes: int) -> pb.AttendRequest:
        """Pairs of the query and each document. The queries may have the bytes of a message in all."""
        count = len(self.documents)
        if (size := len(self.query.encode()) * count) > max_bytes:
            message = f"has {size} bytes, once for each of {count} documents; the limit is {max_bytes}"
            raise LimitExceededError("query", message)
        fields = {"pairs": self.documents, "raw_scores": self.raw_scores, "prompt": self.prompt}
        text = self.text([self.query] * count, **fields)
        return pb.AttendRequest(model_name=self.model, text=text)

    def ranks(self, reply: pb.AttendResponse, memory: Reservation) -> list[tuple[int, Any]]:
        """Index and score of each document, by their relevance to the query."""
        if (count := reply.context_vectors.width) != 1:
            problem = f"{reply.model_name!r} has {count} labels, and a reranker has one; use POST /predict"
            raise InvalidRequestError("model", problem)
        scores = _rows(reply, memory, "documents", NO_SCORE)
        return [(at, scores[at, 0]) for at in _highest_first(scores[:, 0])[: self.top_n]]

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The documents by their relevance to the query."""
        results = list[dict[str, Any]]()
        for at, score in self.ranks(replies[0], memory):
            text = self.documents[at]
            document = {"document": {"text": text} if self.has_objects else text}
            results.append(
                {"index": at, "relevance_score": score} | (document if self.return_documents else {})
            )
        return _with_usage(_of_cohere(replies[0]) | {"model": self.model, "results": results}, replies[0])


class InfinityRerankRequest(RerankRequest):
    """As infinity's API has it: documents of the answer are texts."""

    has_objects: ClassVar = False


class RankRequest(RerankRequest):
    """As TEI's API has it: `texts` as Cohere's `documents`, and `return_text` as `return_documents`."""

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The texts by their relevance to the query."""
        return [
            {"index": at, "score": score} | ({"text": self.documents[at]} if self.return_documents else {})
            for at, score in self.ranks(replies[0], memory)
        ]


class ClassifyRequest(TextBody):
    """As in the API of TEI, with `model` in addition, which is optional if one classifier is ready.

    `inputs` is a text, a pair of texts as a list, or a list of lists of one text each, or of two each.
    `prompt` is as for a reranker.
    """

    inputs: Texts
    raw_scores: bool = False
    prompt: str | None = None

    @property
    def _is_single(self) -> bool:
        """Whether it is a text or one pair."""
        return not isinstance(self.inputs, list) or any(isinstance(item, str) for item in self.inputs)

    def message(self, max_bytes: int) -> pb.AttendRequest:  # noqa: ARG002 - as of the others
        """Texts or pairs of texts."""
        items = self.inputs
        if self._is_single:
            items = [items if isinstance(items, list) else [items]]
        sizes = {len(item) if isinstance(item, list) else 0 for item in items}
        if sizes not in (set(), {1}, {2}) or {type(text) for item in items for text in item} - {str}:
            raise InvalidRequestError("inputs", INPUTS)
        texts, pairs = [item[0] for item in items], [item[1] for item in items if len(item) > 1]
        fields = {"pairs": pairs, "raw_scores": self.raw_scores, "prompt": self.prompt}
        text = self.text(texts, return_labels=True, **fields)
        return pb.AttendRequest(model_name=self.model, text=text)

    def document(self, replies: Sequence[pb.AttendResponse], memory: Reservation) -> Any:
        """The scores of all labels of each input."""
        rows, labels = _rows(replies[0], memory, "inputs", NO_SCORE), replies[0].labels
        scores = [[{"label": labels[at], "score": row[at]} for at in _highest_first(row)] for row in rows]
        return scores[0] if self._is_single else scores


class TokenizeRequest(TextBody):
    """As TEI's API has it: `inputs` is a text or a list of texts."""

    rpc: ClassVar = f"/{SERVICE}/Tokenize", pb.TokenizeResponse

    inputs: Annotated[list[str], BeforeValidator(lambda item: [item] if isinstance(item, str) else item)]
    add_special_tokens: bool = True
    prompt: str | None = None

    def message(self, max_bytes: int) -> pb.TokenizeRequest:  # noqa: ARG002 - as of the others
        """The texts."""
        text, omits = self.text(self.inputs, prompt=self.prompt), not self.add_special_tokens
        return pb.TokenizeRequest(model_name=self.model, text=text, omit_special_tokens=omits)

    def document(self, replies: Sequence[pb.TokenizeResponse], memory: Reservation) -> Any:
        """The tokens of each text.

        `start` and `stop` count characters of the text as it was sent. Tokens without any there, which are
        special ones and those of a prompt, have none, and their `text` is that of the vocabulary.
        """
        (reply,) = replies
        memory.add(2 * schemas.OBJECT_BYTES * len(reply.tokens))
        bounds = reply.token_offsets.starts, reply.token_offsets.ends
        rows = zip(reply.token_ids.ids, reply.tokens, reply.special, *bounds, strict=True)
        return [
            [
                {"id": token, "text": text[start:stop] or piece, "special": special}
                | {"start": start if stop else None, "stop": stop or None}
                for token, piece, special, start, stop in islice(rows, length)
            ]
            for text, length in zip(self.inputs, reply.token_ids.lengths, strict=True)
        ]


class DecodeRequest(TextBody):
    """As TEI's API has it: `ids` is a list of token ids, or a list of such lists."""

    rpc: ClassVar = f"/{SERVICE}/Detokenize", pb.DetokenizeResponse

    ids: list[Any]
    skip_special_tokens: bool = True

    def message(self, max_bytes: int) -> pb.DetokenizeRequest:  # noqa: ARG002 - as of the others
        """The ids."""
        ids = _token_sequences("ids", [self.ids] if _is_tokens(self.ids) else self.ids)
        keeps = not self.skip_special_tokens
        return pb.DetokenizeRequest(model_name=self.model, token_ids=ids, keep_special_tokens=keeps)

    def document(self, replies: Sequence[pb.DetokenizeResponse], memory: Reservation) -> Any:  # noqa: ARG002
        """The texts."""
        return list(replies[0].texts)


def rerank_body(members: dict[str, Any]) -> type[TextBody]:
    """The form of a request to /rerank: TEI's, or infinity's."""
    return RankRequest if "texts" in members else InfinityRerankRequest


def _is_tokens(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(token) is int for token in item)


def _token_sequences(field: str, items: Any) -> pb.TokenSequences:
    """Lists of token ids.

    Raises:
        InvalidRequestError: They are none, or an id is too large.
    """
    if not items or not all(_is_tokens(item) for item in items):
        raise InvalidRequestError(field, "must contain texts only, or non-empty lists of token ids only")
    try:
        return pb.TokenSequences(lengths=map(len, items), ids=chain.from_iterable(items))
    except ValueError:
        raise InvalidRequestError(field, "contains a token id of more than 64 bits") from None


def _highest_first(scores: NDArray[np.float32]) -> list[int]:
    """The indices of finite scores (n,); of equal ones, the lowest first."""
    return sorted(range(len(scores)), key=lambda at: -scores[at])


def _rows(reply: pb.AttendResponse, memory: Reservation, field: str, problem: str = "") -> NDArray[Any]:
    """The embeddings or scores of a reply, (B, d), for which the JSON takes memory; bits are (B, d / 8).

    Raises:
        InvalidRequestError: There is a problem with a number: it is NaN or infinite. The field has its index.
    """
    vectors = reply.context_vectors
    width = -(-vectors.width // 8) if vectors.data_type == pb.DATA_TYPE_BITS else vectors.width
    rows = np.frombuffer(vectors.data, DTYPES.get(vectors.data_type, "<f4")).reshape(-1, width)
    memory.add(rows.size * (schemas.OBJECT_BYTES if problem == NO_SCORE else JSON_BYTES_PER_NUMBER))
    if problem:
        schemas.check_finite(field, rows, problem)
    return rows


def _with_usage(document: dict[str, Any], reply: pb.AttendResponse, token_count: int = 0) -> dict[str, Any]:
    """The JSON of a reply with the number of tokens, of texts if it is 0, and which texts were cut."""
    count = token_count or sum(reply.token_counts)
    document["usage"] = {"prompt_tokens": count, "total_tokens": count}
    if reply.truncated:
        document["truncated"] = list(reply.truncated)
    return document


def _of_cohere(reply: pb.AttendResponse, token_count: int = 0) -> dict[str, Any]:
    """What replies in Cohere's form have in common."""
    units = {"input_tokens": token_count or sum(reply.token_counts)}
    return {"id": str(uuid4()), "meta": {"billed_units": units, "tokens": units}}
