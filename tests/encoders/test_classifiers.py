"""Rerankers and text classifiers through a live server, against the transformers library."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from attention_client import (
    AsyncAttentionClient,
    AttentionClient,
    EmbeddingInputs,
    HeadSelection,
    InvalidArgumentError,
    LimitExceededError,
    Ranking,
    TextTruncatedWarning,
)
from attention_client._calls import embeddings
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from scripts.local_server import ServerProcess
from tests.encoders.classifiers import CLASSIFIER, LABELS, RERANKER, TOKENS, expected, tokenizer_of
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL
from tests.server.http.clients import Answer, ask, http_port
from tests.support import triton
from tests.support.triton import TritonError

QUERY = "what to eat?"
# Of unequal lengths, so that their batch is padded.
DOCUMENTS = ["Life is short, eat dessert first", "a", "", "人生短暂", "dessert " * 5]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
LONG = "dessert " * 200
SCORES = expected(RERANKER, *PAIRS)[:, 0]
ORDER = np.argsort(-SCORES).tolist()


def assert_scores(found: Any, scores: NDArray[np.float32]) -> None:
    assert_allclose(np.asarray(found, np.float32), scores, rtol=RTOL, atol=ATOL)


def test_rankings_of_a_mixed_batch_equal_the_library(classifier_client: AttentionClient) -> None:
    found = classifier_client.rerank(RERANKER, QUERY, DOCUMENTS)
    assert isinstance(found[0], Ranking)
    assert [each.index for each in found] == ORDER
    assert_scores([each.score for each in found], SCORES[ORDER])
    best = classifier_client.rerank(RERANKER, QUERY, DOCUMENTS, top_n=2)
    assert [each.index for each in best] == ORDER[:2]


def test_scores_of_every_label_equal_the_library(
    classifier_server: ServerProcess, classifier_client: AttentionClient
) -> None:
    texts = [QUERY, *DOCUMENTS]
    found = classifier_client.classify(CLASSIFIER, texts, texts[::-1])
    assert_scores(found, expected(CLASSIFIER, *zip(texts, texts[::-1], strict=True)))
    assert_scores(classifier_client.classify(CLASSIFIER, texts), expected(CLASSIFIER, *texts))
    assert_scores(classifier_client.classify(RERANKER, "eat"), expected(RERANKER, "eat")[0])

    async def both() -> tuple[list[Ranking], NDArray[np.float32]]:
        async with AsyncAttentionClient(classifier_server.target) as client:
            ranked = await client.rerank(RERANKER, QUERY, DOCUMENTS, top_n=1)
            return ranked, await client.classify(CLASSIFIER, "eat", "drink")

    ranked, scores = asyncio.run(both())
    assert ranked[0].index == ORDER[0]
    assert_scores(scores, expected(CLASSIFIER, ("eat", "drink"))[0])


def test_many_texts_travel_in_several_requests(
    classifier_client: AttentionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_SEQUENCES", 2)
    found = classifier_client.rerank(RERANKER, QUERY, DOCUMENTS)
    assert [each.index for each in found] == ORDER


def test_a_long_pair_is_refused_or_cut_as_the_library_cuts_it(classifier_client: AttentionClient) -> None:
    says = f"text 1 has .* tokens; the limit is {TOKENS} for both texts of a pair"
    with pytest.raises(LimitExceededError, match=says):
        classifier_client.rerank(RERANKER, QUERY, ["a", LONG])
    pairs = [(QUERY, LONG), (LONG, QUERY), (LONG, LONG)]
    found = classifier_client.classify(RERANKER, *map(list, zip(*pairs, strict=True)), truncate=True)
    assert_scores(found, expected(RERANKER, *pairs))
    with pytest.warns(TextTruncatedWarning, match="cut 2 texts"):
        found = classifier_client.classify(CLASSIFIER, ["eat", LONG, LONG])
    assert_scores(found, expected(CLASSIFIER, "eat", LONG, LONG))
    streamed = classifier_client.attend_text(RERANKER, ["eat", "a"])
    assert [rows.shape for rows in streamed.context_vectors] == [(1, 1), (1, 1)]
    assert streamed.token_counts == (5, 3)


def test_the_model_describes_its_labels(classifier_client: AttentionClient) -> None:
    model = classifier_client.model(CLASSIFIER)
    found = model.text_classifier
    assert found is not None
    assert (found.family, found.labels, found.activation, found.truncates) == (
        "bert",
        LABELS[CLASSIFIER],
        "softmax",
        True,
    )
    assert (model.text_encoder, model.attention_patterns) == (None, ())
    optional = {tensor.name: tensor.optional for tensor in classifier_client.model(RERANKER).inputs}
    assert optional == {"token_ids": False, "token_types": True}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.rerank(SENTENCE, QUERY, DOCUMENTS), "pairs: model 'sentence' is not a text classifier"),
        (lambda c: c.rerank(CLASSIFIER, QUERY, ["a"]), "expected a reranker, which has one label; found"),
        (lambda c: c.classify(RERANKER, ["a", "b"], ["c"]), "pairs: expected as many texts as texts, 2"),
        (lambda c: c.embed(RERANKER, "a"), "embedding: model 'reranker' is not a text encoder"),
        (
            lambda c: c.embed(RERANKER, "a", spans=[(0, 1)]),
            "embedding: model 'reranker' is not a text encoder",
        ),
        (lambda c: c.attend_text(RERANKER, "a", return_weights=True), "does not have attention weights"),
        (
            lambda c: c.attend_text(RERANKER, "a", return_weights=HeadSelection(heads=[0])),
            "does not have attention weights",
        ),
        (
            lambda c: list(c.attend_stream(RERANKER, [EmbeddingInputs("a", prompt="query")])),
            "embedding: model 'reranker' is not a text encoder",
        ),
    ],
)
def test_what_a_model_does_not_do_is_refused(
    classifier_client: AttentionClient, call: Any, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        call(classifier_client)


def test_pairs_over_the_open_inference_protocol(classifier_server: ServerProcess) -> None:
    texts, pairs = (
        np.array([each.encode() for each in column], object) for column in zip(*PAIRS, strict=True)
    )
    result = triton.infer(classifier_server.target, RERANKER, {"text": texts, "text_pair": pairs})
    assert_scores(result["scores"][:, 0], SCORES)
    counts = [len(tokenizer_of(RERANKER).encode(*pair)) for pair in PAIRS]
    assert (set(result), result["lengths"].tolist()) == ({"scores", "lengths"}, counts)
    ids = np.array([tokenizer_of(RERANKER).encode("eat").ids])
    for inputs in ({"token_ids": ids}, {"token_ids": ids, "token_types": np.zeros_like(ids)}):
        found = triton.infer(classifier_server.target, RERANKER, inputs)
        assert_scores(found["scores"], expected(RERANKER, "eat"))
    for model, inputs, words in (
        (RERANKER, {"text": texts, "text_pair": pairs[:2]}, "has 2 second texts; the request has 5 texts"),
        (RERANKER, {"token_ids": ids, "text_pair": pairs}, "pairs: needs text; the request has none"),
        (SENTENCE, {"text": texts, "text_pair": pairs}, "pairs: model 'sentence' is not a text classifier"),
        (RERANKER, {"token_ids": ids, "token_types": ids}, "token_types: contains id"),
    ):
        with pytest.raises(TritonError, match=words):
            triton.infer(classifier_server.target, model, inputs)


@pytest.fixture(scope="module")
def port(classifier_server: ServerProcess) -> int:
    return http_port(classifier_server.log)


def post(port: int, path: str, **body: Any) -> Answer:
    return ask(port, path, body)


def test_rerank_over_http(port: int) -> None:
    documents = [DOCUMENTS[0], *({"text": document} for document in DOCUMENTS[1:])]
    members = {"model": RERANKER, "query": QUERY, "max_tokens_per_doc": 4096}
    found = post(port, "/v1/rerank", **members, documents=documents).json
    assert [each["index"] for each in found["results"]] == ORDER
    assert_scores([each["relevance_score"] for each in found["results"]], SCORES[ORDER])
    count = sum(len(tokenizer_of(RERANKER).encode(*pair)) for pair in PAIRS)
    assert (found["model"], found["usage"]["total_tokens"]) == (RERANKER, count)
    found = post(port, "/v1/rerank", **members, texts=DOCUMENTS, return_text=True, top_n=1).json
    assert [each["document"] for each in found["results"]] == [{"text": DOCUMENTS[ORDER[0]]}]
    found = post(port, "/v1/rerank", **members, documents=["a", LONG], truncate=True).json
    assert found["truncated"] == [1]


def test_predictions_over_http(port: int) -> None:
    def one(*texts: str) -> list[dict[str, Any]]:
        scores = expected(CLASSIFIER, texts if len(texts) > 1 else texts[0])[0]
        order = np.argsort(-scores)
        return [
            {"label": LABELS[CLASSIFIER][at], "score": pytest.approx(scores[at], abs=1e-4)} for at in order
        ]

    for path in ("/predict", "/classify"):
        assert post(port, path, model=CLASSIFIER, inputs="eat").json == one("eat")
    assert post(port, "/predict", model=CLASSIFIER, inputs=["eat", "a"]).json == one("eat", "a")
    found = post(port, "/predict", model=CLASSIFIER, inputs=[["eat"], ["a"]]).json
    assert found == [one("eat"), one("a")]
    found = post(port, "/predict", model=CLASSIFIER, inputs=[["eat", "a"], ["a", QUERY]]).json
    assert found == [one("eat", "a"), one("a", QUERY)]


HTTP_ERRORS = {
    "'topics' has 3 labels": (400, "model", "/v1/rerank", {"model": CLASSIFIER}),
    "'sentence' is not a text classifier": (400, "model", "/v1/rerank", {"model": SENTENCE}),
    "raw_scores: must be False": (400, "raw_scores", "/v1/rerank", {"raw_scores": True}),
    "documents[1]: must be a valid string": (400, "documents[1]", "/v1/rerank", {"documents": ["a", 1]}),
    "documents: List should have at least 1": (400, "documents", "/v1/rerank", {"documents": []}),
    "text: text 1 has": (400, "documents", "/v1/rerank", {"documents": ["a", LONG]}),
    "query: has 70400000 bytes": (400, "query", "/v1/rerank", {"query": LONG, "documents": ["a"] * 44_000}),
    "top_n: must be greater": (400, "top_n", "/v1/rerank", {"top_n": 0}),
    "2 text classifiers are ready": (400, "model", "/predict", {"model": None, "inputs": "a"}),
    "'absent' is not a text classifier": (404, "model", "/predict", {"model": "absent", "inputs": "a"}),
    **{
        f"inputs: must be a text, a pair{' ' * at}": (400, "inputs", "/predict", {"inputs": inputs})
        for at, inputs in enumerate(
            [5, [], [[]], ["a"] * 3, [["a"], "b"], [["a"], ["b", "c"]], [[1]], [{"a": 1}]]
        )
    },
    "embedding: model 'reranker' is not": (400, "model", "/v1/embeddings", {"input": "a"}),
    "check_embedding_ctx_length=False": (400, "input", "/v1/embeddings", {"model": SENTENCE, "input": [[5]]}),
}


@pytest.mark.parametrize("words", HTTP_ERRORS)
def test_errors_over_http_name_the_member(port: int, words: str) -> None:
    status, param, path, members = HTTP_ERRORS[words]
    answer = post(port, path, **{"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, **members})
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (status, param), error
    assert words.rstrip() in error["message"]


def test_models_and_health(port: int) -> None:
    found = ask(port, "/v1/models").json["data"]
    assert [model["id"] for model in found] == [RERANKER, SENTENCE, CLASSIFIER]
    assert ask(port, f"/v1/models/{CLASSIFIER}").json["id"] == CLASSIFIER
    health = ask(port, "/health")
    assert (health.status, health.json) == (200, {})


def test_members_that_other_servers_take_are_ignored(port: int) -> None:
    members = {"input_type": "query", "user": "me", "dimensions": None, "encoding_format": None, "extra": {}}
    answer = post(port, "/v1/embeddings", model=SENTENCE, input="eat", **members)
    assert answer.status == 200, json.dumps(answer.json)
