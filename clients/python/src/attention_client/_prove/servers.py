"""The protocols of servers of embeddings and scores: one request, and the rows of its answer.

Notation: B texts, d elements of an embedding, or one for each label of a score.
"""

import json
import time
from collections.abc import Iterable, Sequence
from http.client import HTTPException
from typing import Any, Final, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attention_client import AttentionClient, AttentionClientError, EmbeddingInputs, InvalidArgumentError
from attention_client._prove.library import Library
from attention_client._values import Array

ATTEMPTS, MOST_WAIT = 5, 60.0
BUSY, NOT_ALLOWED = (429, 503), (401, 403, 404, 405)
# Cohere's names of what a text is, by the prompts that folders have for it.
INPUT_TYPES: Final = {
    "query": "search_query",
    "document": "search_document",
    "passage": "search_document",
    "classification": "classification",
    "clustering": "clustering",
}


class GrpcServer:
    """A server of attention.v1, by this package's client.

    Attributes:
        model: Name of the model.
        tokens: The number of tokens of the last request; None if the server does not state it.
    """

    tokens: int | None = None

    def __init__(self, client: AttentionClient, model: str, library: Library) -> None:
        self.client, self.model, self.library = client, model, library
        # The kinds of texts that a request can state, if the library's outputs differ between them.
        self.kinds = ("query", "document") if library.width else ("",)

    def choose_model(self) -> None:
        """Without a name, takes the only model for texts."""
        infos = [] if self.model else self.client.models()
        names = [info.name for info in infos if info.text_encoder or info.text_classifier]
        if infos and len(names) != 1:
            raise AttentionClientError(f"name one of the models with --model: {', '.join(names)}")
        self.model = self.model or names[0]

    def embed(self, texts: list[str], prompt: str | None, kind: str) -> Any:
        """The outputs of texts of a kind, with a prompt by its name, or that of the kind or the model."""
        output: Any = self.library.output
        options: Any = {"truncate": True, "input_kind": kind or None, "outputs": [output]}
        (result,) = self.client.attend_stream(self.model, [EmbeddingInputs(texts, prompt, **options)])
        self.tokens = sum(result.token_counts)
        rows = getattr(result.context_vectors, output)
        return [row.to_dict() for row in rows] if output == "sparse" else rows

    def score(self, query: str, texts: list[str]) -> Any:
        """The scores (B, d) of a query with each text."""
        return self.client.classify(self.model, [query] * len(texts), texts, truncate=True)

    def tokenize(self, text: str) -> list[int] | None:  # noqa: ARG002
        """The token ids of a text; None if the protocol does not have them."""
        return None

    def prompts(self, names: Iterable[str]) -> list[str]:
        """Those of the names of prompts that a request can state."""
        return [*names]


class HttpServer:
    """A server of the protocol `openai`, `tei` or `cohere`, with all that `GrpcServer` has."""

    tokens: int | None = None
    kinds = ("",)

    def __init__(
        self, protocol: str, url: str, model: str, token: str, timeout: float, library: Library
    ) -> None:
        self.protocol, self.url, self.model = protocol, url.rstrip("/"), model
        self.timeout, self.library = timeout, library
        self.headers = {"Content-Type": "application/json", "User-Agent": "attention-client"}
        self.headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self.headers |= {"model-id": model} if model and protocol == "tei" else {}
        if library.width and protocol != "tei":
            raise AttentionClientError(f"{library.output} is not an output of this protocol: use tei or grpc")

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON of one answer; waits and repeats the request while the server is busy."""
        url, data = self.url + path, None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            try:
                with urlopen(Request(url, data, self.headers), timeout=self.timeout) as response:  # noqa: S310
                    answer = json.load(response)
            except HTTPError as error:
                message = f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code not in (*BUSY, *NOT_ALLOWED):
                    raise InvalidArgumentError(message) from error
                if error.code in NOT_ALLOWED or attempt + 1 == ATTEMPTS:
                    raise AttentionClientError(message) from error
                after = error.headers.get("Retry-After", "")
                time.sleep(min(float(after) if after.isdigit() else 2.0**attempt, MOST_WAIT))
            except (OSError, HTTPException, ValueError) as error:
                raise AttentionClientError(f"{url}: {error}") from error
            else:
                usage = answer.get("usage") if isinstance(answer, dict) else None
                self.tokens = (usage or {}).get("prompt_tokens")
                return answer
        return None

    def choose_model(self) -> None:
        """Without a name, takes the first of OpenAI's list, or the one of TEI."""
        if self.protocol == "openai" and not self.model:
            self.model = self.call("/models")["data"][0]["id"]
        if self.protocol == "tei":
            self.model = self.call("/info")["model_id"]

    def embed(self, texts: list[str], prompt: str | None, kind: str) -> Any:  # noqa: ARG002
        """The outputs; embeddings of TEI are normalised if the library's are."""
        if self.protocol == "openai":
            body: dict[str, Any] = {"model": self.model, "input": texts, "encoding_format": "float"}
            return _sort(self.call("/embeddings", body)["data"], "embedding")
        if self.protocol == "cohere":
            body = {"model": self.model, "texts": texts, "embedding_types": ["float"]}
            body |= {"input_type": INPUT_TYPES[prompt]} if prompt else {}
            return self.call("/v2/embed", body)["embeddings"]["float"]
        body = {"inputs": texts, "truncate": True, **({"prompt_name": prompt} if prompt else {})}
        if self.library.output == "token_vectors":
            return self.call("/embed_all", body)
        if self.library.output == "sparse":
            answer = self.call("/embed_sparse", body)
            return [{int(entry["index"]): entry["value"] for entry in row} for row in answer]
        return self.call("/embed", body | {"normalize": self.library.normalised})

    def score(self, query: str, texts: list[str]) -> Any:
        """The scores; those of a classifier in the order of its labels."""
        if self.protocol != "tei":
            path = "/rerank" if self.protocol == "openai" else "/v2/rerank"
            answer = self.call(path, {"model": self.model, "query": query, "documents": texts})
            return _sort(answer["results"], "relevance_score")
        body = {"truncate": True, "raw_scores": self.library.activation == "Identity"}
        if not self.library.labels:
            return _sort(self.call("/rerank", body | {"query": query, "texts": texts}), "score")
        answer = self.call("/predict", body | {"inputs": [[query, text] for text in texts]})
        rows = [{entry["label"]: entry["score"] for entry in row} for row in answer]
        return [[row[label] for label in self.library.labels] for row in rows]

    def tokenize(self, text: str) -> list[int] | None:
        """TEI's ids, with special tokens."""
        if self.protocol != "tei":
            return None
        return [token["id"] for token in self.call("/tokenize", {"inputs": text})[0]]

    def prompts(self, names: Iterable[str]) -> list[str]:
        """All for TEI, and for Cohere those that a type of inputs stands for."""
        allowed = {"openai": (), "cohere": INPUT_TYPES, "tei": (names := [*names])}[self.protocol]
        return [name for name in names if name in allowed]


Server: TypeAlias = GrpcServer | HttpServer


def ask(server: Server, query: str, texts: list[str], prompt: str | None = None) -> Array:
    """The rows of one answer, float64 (B, d), of texts after a query or a kind.

    Raises:
        InvalidArgumentError: The server refuses the request, or answers with another number of rows.
        AttentionClientError: The server cannot be reached, or its answer cannot be read.
    """
    try:
        library = server.library
        rows = server.score(query, texts) if library.scores else server.embed(texts, prompt, query)
        array = library.stack(rows)
    except AttentionClientError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise AttentionClientError(f"an answer has another form than the protocol's: {error!r}") from error
    if len(array) != len(texts):
        raise InvalidArgumentError(f"the answer has {len(array)} rows for {len(texts)} texts")
    return array


def _sort(entries: Sequence[Any], name: str) -> list[Any]:
    return [entry[name] for entry in sorted(entries, key=lambda entry: int(entry["index"]))]
