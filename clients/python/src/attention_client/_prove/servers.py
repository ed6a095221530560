"""The protocols of servers of embeddings and scores: each class sends one request and reads its answer.

Notation: B texts, d elements of an embedding, or one for each label of a score.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

from attention_client import AttentionClient, AttentionClientError, EmbeddingInputs, InvalidArgumentError
from attention_client._values import Array

ATTEMPTS, MOST_WAIT = 5, 60.0
BUSY, NOT_ALLOWED = (429, 503), (401, 403, 404, 405)
# Cohere's names of what a text is, by the prompts that sentence-transformers' folders have for it.
INPUT_TYPES = {
    "query": "search_query",
    "document": "search_document",
    "passage": "search_document",
    "classification": "classification",
    "clustering": "clustering",
}
# Rows (B, d), and the number of tokens of all texts if the server states it.
Answer = tuple[Any, int | None]


class NotJudgedError(Exception):
    """The server cannot be judged: it cannot be reached, or refuses the caller."""


class RefusedError(Exception):
    """The server refuses one request."""


@dataclass(frozen=True)
class Form:
    """What requests ask for, so that answers mean the same as those of the library.

    Attributes:
        normalised: Whether embeddings have length 1.
        raw: Whether scores are those before an activation.
        labels: Labels of a text classifier; empty for an encoder or a reranker.
    """

    normalised: bool
    raw: bool
    labels: Sequence[str]


class Server:
    """A server of one model. Every method is one request."""

    def embed(self, texts: list[str], prompt: str | None) -> Answer:
        """The embeddings of texts, with a prompt by its name, or with that of the model."""
        raise NotImplementedError

    def score(self, query: str, texts: list[str]) -> Answer:
        """The scores of a query with each text."""
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int] | None:  # noqa: ARG002
        """The token ids of a text; None if the protocol does not have them."""
        return None

    def prompts(self, names: Iterable[str]) -> list[str]:  # noqa: ARG002
        """Those of the names of prompts that requests can state."""
        return []

    def describe(self) -> Mapping[str, Any]:
        """What the server states about itself."""
        return {}


class OpenAI(Server):
    """OpenAI's API over HTTP, and Jina's for scores. The URL is that of its clients, which ends with /v1."""

    def __init__(self, url: str, *, model: str, key: str, timeout: float, form: Form) -> None:
        self.url, self.model, self.timeout, self.form = url.rstrip("/"), model, timeout, form
        self.headers = {"Content-Type": "application/json", "User-Agent": "attention-client"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def call(self, path: str, body: Any = None) -> Any:
        """The JSON that the server answers to one request; waits and repeats it while the server is busy."""
        url, data = self.url + path, None if body is None else json.dumps(body).encode()
        for attempt in range(ATTEMPTS):
            try:
                with urlopen(Request(url, data, self.headers), timeout=self.timeout) as response:  # noqa: S310
                    return json.load(response)
            except HTTPError as error:
                message = f"{url} answered {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code not in BUSY:
                    kind = NotJudgedError if error.code in NOT_ALLOWED else RefusedError
                    raise kind(message) from error
                after = error.headers.get("Retry-After", "")
            except (OSError, HTTPException, ValueError) as error:
                raise NotJudgedError(f"{url}: {error}") from error
            if attempt + 1 < ATTEMPTS:
                time.sleep(min(float(after) if after.isdigit() else 2.0**attempt, MOST_WAIT))
        raise NotJudgedError(f"{message}, {ATTEMPTS} times")

    def embed(self, texts: list[str], prompt: str | None) -> Answer:
        """The embeddings, in the order that the answer states; the protocol has no prompts."""
        del prompt
        body = {"model": self.model, "input": texts, "encoding_format": "float"}
        answer = self.call("/embeddings", body)
        return _sort(answer["data"], "embedding"), answer.get("usage", {}).get("prompt_tokens")

    def score(self, query: str, texts: list[str]) -> Answer:
        """The scores."""
        return self._rank("/rerank", query, texts)

    def describe(self) -> Mapping[str, Any]:
        """The model; without --model, the first of the list."""
        self.model = self.model or self.call("/models")["data"][0]["id"]
        return {"model": self.model}

    def _rank(self, path: str, query: str, texts: list[str]) -> Answer:
        answer = self.call(path, {"model": self.model, "query": query, "documents": texts})
        tokens = answer.get("usage", {}).get("prompt_tokens")
        return _sort(answer["results"], "relevance_score"), tokens


class Cohere(OpenAI):
    """Version 2 of Cohere's API. The URL has no version."""

    def embed(self, texts: list[str], prompt: str | None) -> Answer:
        """The embeddings; a prompt becomes a type of inputs."""
        body = {"model": self.model, "texts": texts, "embedding_types": ["float"]}
        if prompt is not None:
            body["input_type"] = INPUT_TYPES[prompt]
        return self.call("/v2/embed", body)["embeddings"]["float"], None

    def score(self, query: str, texts: list[str]) -> Answer:
        """The scores."""
        return self._rank("/v2/rerank", query, texts)

    def prompts(self, names: Iterable[str]) -> list[str]:
        """Those that a type of inputs stands for."""
        return [name for name in names if name in INPUT_TYPES]

    def describe(self) -> Mapping[str, Any]:
        """The model of the requests."""
        return {"model": self.model}


class Tei(OpenAI):
    """The API of text-embeddings-inference over HTTP. It has no names of models."""

    def embed(self, texts: list[str], prompt: str | None) -> Answer:
        """The embeddings, normalised if those of the library are."""
        body = {"inputs": texts, "truncate": True, "normalize": self.form.normalised}
        return self.call("/embed", body if prompt is None else {**body, "prompt_name": prompt}), None

    def score(self, query: str, texts: list[str]) -> Answer:
        """The scores; those of a classifier in the order of its labels."""
        body = {"truncate": True, "raw_scores": self.form.raw}
        if not self.form.labels:
            return _sort(self.call("/rerank", {**body, "query": query, "texts": texts}), "score"), None
        answer = self.call("/predict", {**body, "inputs": [[query, text] for text in texts]})
        rows = [{entry["label"]: entry["score"] for entry in row} for row in answer]
        return [[row[label] for label in self.form.labels] for row in rows], None

    def tokenize(self, text: str) -> list[int] | None:
        """The ids, with special tokens."""
        return [token["id"] for token in self.call("/tokenize", {"inputs": text})[0]]

    def prompts(self, names: Iterable[str]) -> list[str]:
        """All of them."""
        return [*names]

    def describe(self) -> Mapping[str, Any]:
        """What /info says of model and type."""
        info = self.call("/info")
        return {name: info[name] for name in ("model_id", "model_dtype", "version") if name in info}


class Grpc(Server):
    """attention.v1, by this package's client."""

    def __init__(self, client: AttentionClient, model: str) -> None:
        self.client, self.model = client, model

    def embed(self, texts: list[str], prompt: str | None) -> Answer:
        """The embeddings."""
        try:
            inputs = EmbeddingInputs(texts, prompt, None, truncate=True)
            (result,) = self.client.attend_stream(self.model, [inputs])
        except AttentionClientError as error:
            raise _convert(error) from error
        return result.context_vectors, sum(result.token_counts)

    def score(self, query: str, texts: list[str]) -> Answer:
        """The scores."""
        try:
            return self.client.classify(self.model, [query] * len(texts), texts, truncate=True), None
        except AttentionClientError as error:
            raise _convert(error) from error

    def prompts(self, names: Iterable[str]) -> list[str]:
        """All of them."""
        return [*names]

    def describe(self) -> Mapping[str, Any]:
        """The model; without --model, the only one that takes texts and is ready."""
        if not self.model:
            models = [model for model in self.client.models() if model.state == "ready"]
            names = [model.name for model in models if model.text_encoder or model.text_classifier]
            if len(names) != 1:
                raise NotJudgedError(f"name one of the server's models with --model: {', '.join(names)}")
            self.model = names[0]
        return {"model": self.model}


def ask(
    server: Server, query: str, texts: list[str], prompt: str | None, *, scores: bool
) -> tuple[Array, int | None]:
    """The answer of a server to one request: float64 (B, d), and the number of tokens of all texts.

    Raises:
        RefusedError: The server refuses the request, or answers with another number of rows.
        NotJudgedError: The server cannot be reached, or its answer cannot be read.
    """
    try:
        rows, tokens = server.score(query, texts) if scores else server.embed(texts, prompt)
        array = np.asarray(rows, np.float64)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise NotJudgedError(f"an answer has another form than the protocol's: {error!r}") from error
    if len(array) != len(texts):
        raise RefusedError(f"the answer has {len(array)} rows for {len(texts)} texts")
    return array.reshape(len(texts), -1), tokens


def _sort(entries: list[Any], name: str) -> list[Any]:
    return [entry[name] for entry in sorted(entries, key=lambda entry: int(entry["index"]))]


def _convert(error: AttentionClientError) -> Exception:
    kind = RefusedError if isinstance(error, InvalidArgumentError) else NotJudgedError
    return kind(str(error))
