"""Rerankers and text classifiers through a live server, against the transformers library."""

import asyncio
import re
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AsyncAttentionClient, AttentionClient, Ranking, TextTruncatedWarning, errors
from attention_client._calls import sequences
from attention_client._calls.attention import EncodedCall
from attention_client._commands.app import app
from attention_client._generated.attention.v1 import attention_pb2 as pb
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from typer.testing import CliRunner

from attention_serving.server.engine.run.provider import Device
from scripts.local_server import ROOT, ServerProcess
from tests.encoders.classifiers import (
    CLASSIFIER,
    CLASSIFIERS,
    LABELS,
    RERANKER,
    TOKENS,
    expected,
    tokenizer_of,
)
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL
from tests.server.api.served import ATTEND
from tests.server.http.clients import Answer, ask
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.support import triton
from tests.support.artifacts import cached_repositories
from tests.support.processes import serving_models
from tests.support.triton import TritonError

QUERY = "what to eat?"
# Of unequal lengths, so that their batch is padded.
DOCUMENTS = ["Life is short, eat dessert first", "a", "", "人生短暂", "dessert " * 5]
PAIRS = [(QUERY, document) for document in DOCUMENTS]
LONG = "dessert " * 200
SCORES = expected(RERANKER, *PAIRS)[:, 0]
ORDER = np.argsort(-SCORES).tolist()
COUNTS = [len(tokenizer_of(RERANKER).encode(*pair)) for pair in PAIRS]


@pytest.fixture(scope="module")
def server(sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the reranker, the classifier and a text encoder, which refuses token ids over HTTP."""
    (classifiers,), folder = cached_repositories(CLASSIFIERS), tmp_path_factory.mktemp("classifiers")
    models = [*classifiers.iterdir(), *sentence_repository.iterdir()]
    with serving_models(folder, models, "--http-port=0", "--refuse-token-ids") as process:
        yield process


def assert_scores(found: Any, scores: NDArray[np.float32]) -> None:
    assert_allclose(np.asarray(found, np.float32), scores, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("portion", [1024, 2])
def test_rankings_equal_the_library(
    client: AttentionClient, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(sequences, "MAX_SEQUENCES", portion)
    found = client.rerank(RERANKER, QUERY, DOCUMENTS)
    assert [each.index for each in found] == ORDER
    assert_scores([each.score for each in found], SCORES[ORDER])
    assert client.rerank(RERANKER, QUERY, DOCUMENTS, top_n=2) == found[:2]


def test_scores_of_every_label_equal_the_library(server: ServerProcess, client: AttentionClient) -> None:
    texts = [QUERY, *DOCUMENTS]
    found = client.classify(CLASSIFIER, texts, texts[::-1])
    assert_scores(found, expected(CLASSIFIER, *zip(texts, texts[::-1], strict=True)))
    assert_scores(client.classify(CLASSIFIER, texts), expected(CLASSIFIER, *texts))
    assert_scores(client.classify(RERANKER, "eat"), expected(RERANKER, "eat")[0])

    async def both() -> tuple[list[Ranking], NDArray[np.float32]]:
        async with AsyncAttentionClient(server.target) as own:
            return await own.rerank(RERANKER, QUERY, texts), await own.classify(CLASSIFIER, "eat", "a")

    ranked, scores = asyncio.run(both())
    assert ranked == client.rerank(RERANKER, QUERY, texts)
    assert_scores(scores, expected(CLASSIFIER, ("eat", "a"))[0])


def test_raw_scores_are_the_logits(server: ServerProcess, client: AttentionClient) -> None:
    logits = expected(RERANKER, *PAIRS, raw=True)
    found = client.rerank(RERANKER, QUERY, DOCUMENTS, raw_scores=True)
    assert [each.index for each in found] == ORDER
    assert_scores([each.score for each in found], logits[ORDER, 0])
    raw = client.classify(CLASSIFIER, ["eat", "a"], raw_scores=True)
    assert_scores(raw, expected(CLASSIFIER, "eat", "a", raw=True))
    text, pair = (np.array([own.encode() for own in column], object) for column in zip(*PAIRS, strict=True))
    named = triton.infer(
        server.target, RERANKER, {"text": text, "text_pair": pair}, outputs=["logits", "scores"]
    )
    assert_scores(named["logits"], logits)
    assert_scores(named["scores"][:, 0], SCORES)


def test_models_without_raw_scores_refuse_them() -> None:
    (folder,) = cached_repositories(CLASSIFIERS)
    model = load_repository(folder, Device(threads=1)).ready(CLASSIFIER)
    graphs = {
        kind: graph.model_copy(update={"outputs": graph.outputs[:1]})
        for kind, graph in model.manifest.graphs.items()
    }
    assert model.classifier is not None
    for activation, output in (("softmax", ""), ("identity", "scores")):
        classifier = model.classifier.model_copy(update={"activation": activation})
        changes = {"graphs": graphs, "classifier": classifier}
        earlier = replace(model, manifest=model.manifest.model_copy(update=changes))
        assert earlier.raw_scores_output == output
        if not output:
            text = pb.TextSequences(texts=["eat"], return_labels=True, raw_scores=True)
            message = pb.AttendRequest(text=text).SerializeToString()
            with Served(earlier) as served:
                method: Any = served.channel.unary_unary(ATTEND)
                with pytest.raises(grpc.RpcError, match=r"raw_scores: .* export it again"):
                    method(message, timeout=PATIENCE_SECONDS)


def test_a_long_pair_is_refused_or_cut_as_the_library_cuts_it(client: AttentionClient) -> None:
    with pytest.raises(
        errors.LimitExceededError, match=f"text 1 has .*; the limit is {TOKENS} for both texts of a"
    ):
        client.rerank(RERANKER, QUERY, ["a", LONG])
    pairs = [(QUERY, LONG), (LONG, QUERY), (LONG, LONG)]
    found = client.classify(RERANKER, *map(list, zip(*pairs, strict=True)), truncate=True)
    assert_scores(found, expected(RERANKER, *pairs))
    with pytest.warns(TextTruncatedWarning, match="cut 1 texts"):
        found = client.classify(CLASSIFIER, ["eat", LONG])
    assert_scores(found, expected(CLASSIFIER, "eat", LONG))


def test_the_model_describes_its_labels_and_counts_tokens(client: AttentionClient) -> None:
    model, reranker = client.model(CLASSIFIER), client.model(RERANKER)
    assert model.text_classifier is not None
    classifier = model.text_classifier
    assert (classifier.labels, classifier.truncates, classifier.truncation_side) == (
        LABELS[CLASSIFIER],
        True,
        "left",
    )
    assert (classifier.returns_raw_scores, len(model.outputs)) == (True, 2)
    assert (model.text_encoder, model.attention_patterns) == (None, ())
    assert [tensor.optional for tensor in reranker.inputs] == [False, True]
    assert client.attend_text(RERANKER, ["eat", "a"]).token_counts == (5, 3)


def sent(**text: Any) -> Any:
    """A call that the client does not make."""
    options = {name: text.pop(name) for name in ("return_offsets",) if name in text}
    request = pb.AttendRequest(model_name=RERANKER, text=pb.TextSequences(**text), **options)
    return lambda client: client._answer(EncodedCall((request,), list), None)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.rerank(SENTENCE, QUERY, DOCUMENTS), "pairs: model 'sentence' is not a text classifier"),
        (lambda c: c.rerank(CLASSIFIER, QUERY, ["a"]), "expected a reranker, which has one label; found"),
        (lambda c: c.classify(RERANKER, ["a", "b"], ["c"]), "pairs: expected as many texts as texts, 2"),
        (lambda c: c.embed(RERANKER, "a", spans=[(0, 1)]), "embedding: model 'reranker' is not a text enc"),
        (lambda c: c.attend_text(RERANKER, "a", return_weights=True), "does not have attention weights"),
        (lambda c: c.attend_text(RERANKER, "a", mask=np.ones(3, bool)), "'reranker' does not take a mask"),
        (sent(texts=["a", "b"], pairs=["c"]), "pairs: has 1 second texts; the request has 2 texts"),
        (sent(pairs=["c"]), "text: has no sequences"),
        (
            lambda c: c.classify(SENTENCE, "a", raw_scores=True),
            "raw_scores: model 'sentence' is not a text cl",
        ),
        (sent(texts=["a"], prompt="query"), "prompt: is 'query'; model 'reranker' has no prompts"),
        (sent(texts=["a"], pairs=["b"], return_offsets=True), "return_offsets: needs single texts"),
    ],
)
def test_what_a_model_does_not_do_is_refused(client: AttentionClient, call: Any, words: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        call(client)


def test_pairs_over_the_open_inference_protocol(server: ServerProcess) -> None:
    text, pair = (np.array([own.encode() for own in column], object) for column in zip(*PAIRS, strict=True))
    result = triton.infer(server.target, RERANKER, {"text": text, "text_pair": pair})
    assert_scores(result["scores"][:, 0], SCORES)
    assert (set(result), result["lengths"].tolist()) == ({"scores", "lengths"}, COUNTS)
    ids = np.array([tokenizer_of(RERANKER).encode("eat").ids])
    for types in ({}, {"token_types": np.zeros_like(ids)}):
        found = triton.infer(server.target, RERANKER, {"token_ids": ids, **types})
        assert_scores(found["scores"], expected(RERANKER, "eat"))
    for inputs, words in (
        ({"token_ids": ids, "text_pair": pair}, "pairs: needs text; the request has none"),
        ({"token_ids": ids, "token_types": ids}, "token_types: contains id"),
    ):
        with pytest.raises(TritonError, match=words):
            triton.infer(server.target, RERANKER, inputs)


def post(port: int, path: str, **body: Any) -> Answer:
    return ask(port, path, body)


def test_rerank_over_http(port: int) -> None:
    documents = [DOCUMENTS[0], *({"text": document} for document in DOCUMENTS[1:])]
    members = {"model": RERANKER, "query": QUERY}
    found = post(port, "/v1/rerank", **members, documents=documents).json
    assert [each["index"] for each in found["results"]] == ORDER
    assert_scores([each["relevance_score"] for each in found["results"]], SCORES[ORDER])
    assert (found["model"], found["usage"]["total_tokens"]) == (RERANKER, sum(COUNTS))
    found = post(port, "/v1/rerank", **members, texts=DOCUMENTS, return_text=True, top_n=1).json
    assert [each["document"] for each in found["results"]] == [{"text": DOCUMENTS[ORDER[0]]}]
    assert post(port, "/v1/rerank", **members, texts=["a", LONG], truncate=True).json["truncated"] == [1]


def test_predictions_over_http(port: int) -> None:
    def one(*texts: str) -> list[dict[str, Any]]:
        (scores,) = expected(CLASSIFIER, texts if len(texts) > 1 else texts[0])
        ranked = sorted(zip(LABELS[CLASSIFIER], scores.tolist(), strict=True), key=lambda pair: -pair[1])
        return [{"label": label, "score": pytest.approx(score, abs=ATOL)} for label, score in ranked]

    for inputs, answer in (
        ("eat", one("eat")),
        (["eat", "a"], one("eat", "a")),
        ([["eat"], ["a"]], [one("eat"), one("a")]),
        ([["eat", "a"], ["a", QUERY]], [one("eat", "a"), one("a", QUERY)]),
    ):
        for path in ("/predict", "/classify"):
            assert post(port, path, model=CLASSIFIER, inputs=inputs).json == answer


def test_the_only_classifier_needs_no_name_and_returns_its_labels() -> None:
    (folder,) = cached_repositories(CLASSIFIERS)
    model = load_repository(folder, Device(threads=1)).ready(CLASSIFIER)
    request = pb.AttendRequest(text=pb.TextSequences(texts=["eat"], return_labels=True))
    with Served(model) as served:
        method: Any = served.channel.unary_unary(ATTEND)
        reply = pb.AttendResponse.FromString(method(request.SerializeToString(), timeout=PATIENCE_SECONDS))
    assert (reply.model_name, [*reply.labels]) == (CLASSIFIER, [*LABELS[CLASSIFIER]])


WRONG_INPUTS = [5, [[]], ["a"] * 3, [["a"], "b"], [["a"], ["b", "c"]], [[1]], [{"a": 1}]]
RERANK, PREDICT, EMBED = "/v1/rerank", "/predict", "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "param", "members", "words"),
    [
        (RERANK, "model", {"model": CLASSIFIER}, "'topics' has 3 labels"),
        (RERANK, "documents[1]", {"documents": ["a", 1]}, "documents[1]: must be a valid string"),
        (RERANK, "documents", {"documents": ["a", LONG]}, "documents: text 1 has"),
        (RERANK, "query", {"query": LONG, "documents": ["a"] * 44_000}, "query: has 70400000 bytes"),
        (PREDICT, "model", {"model": None, "inputs": "a"}, "is required: 2 text classifiers"),
        (PREDICT, "model", {"model": SENTENCE, "inputs": "a"}, "'sentence' is not a text classifier"),
        *((PREDICT, "inputs", {"inputs": wrong}, "inputs: must be a text, a pair") for wrong in WRONG_INPUTS),
        (EMBED, "input", {"model": SENTENCE, "input": [[5]]}, "check_embedding_ctx_length=False"),
    ],
)
def test_errors_over_http_name_the_member(
    port: int, path: str, param: str, members: dict[str, Any], words: str
) -> None:
    answer = post(port, path, **{"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, **members})
    error = answer.json["error"]
    status = 404 if words.startswith("'s") and path == PREDICT else 400
    if path == PREDICT:  # as TEI has errors
        assert answer.json["error_type"] == "Validation"
        error = {"message": error, "param": param}
    assert (answer.status, error["param"]) == (status, param)
    assert words in error["message"]


def test_the_command_line_and_the_block_of_the_page(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["rerank", "--server", server.target, "--model", RERANKER, QUERY, *DOCUMENTS[:2], "--top=1"]
    best = max(0, 1, key=lambda at: SCORES[at])
    assert CliRunner().invoke(app, arguments).stdout == f"{SCORES[best]:.4f}  {DOCUMENTS[best]}\n"
    block, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/rerankers.md").read_text(), re.DOTALL)
    (tmp_path / "block.py").write_text(block.replace("127.0.0.1:8001", server.target))
    runpy.run_path(str(tmp_path / "block.py"))
    assert capsys.readouterr().out.endswith("\n(1, 1)\n")
