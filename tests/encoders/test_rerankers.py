"""Causal rerankers through live servers, against sentence-transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, errors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from numpy.testing import assert_allclose

from attention_serving.artifact.encoder import PREFIX
from attention_serving.artifact.manifest import GraphKind
from attention_serving.export.encoder import classifier_spec
from attention_serving.export.errors import ExportError
from attention_serving.model.checkpoints import CheckpointError
from attention_serving.model.text_folders import load
from attention_serving.model.text_reranker import CausalReranker
from attention_serving.protos.tei.v1 import tei_pb2 as tei
from attention_serving.server.engine.costs import RunCost
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.process.audit import Audit, Sample
from tests.encoders.rerankers import (
    FLAT,
    ONE_RERANKER,
    OTHER_RERANKERS,
    QWEN,
    RERANKERS,
    Reranker,
    expected,
    save_reranker,
)
from tests.encoders.texts import ATOL, RTOL
from tests.server.api.served import ATTEND
from tests.server.http.clients import ask
from tests.server.http.scripted import front
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, Gate, Served, costing, tapped, wait_until
from tests.support.artifacts import cached_repositories

QUERY = "what to eat? {{ no }}"
# Of unequal lengths; one is empty, one has special tokens, and one is that of another by its first tokens.
DOCUMENTS = ["Life is short, eat dessert first", "a", "", " </s>\n<s>yes ", "人生短暂\n\n", "Life is short"]
LONG = "a dessert " * 60
# Of a pair.
MOST_TOKENS = 160
PAIRS = [(QUERY, document) for document in DOCUMENTS]
# A row costs much, and a run nothing, so that a prefix is always shared; or the other way round.
SHARED, WHOLE = RunCost(fixed=0, row=1e-4, pair=0), RunCost(fixed=1e-4, row=0, pair=0)
OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in RERANKERS if name != QWEN]


def load_reranker(name: str) -> LoadedModel:
    (folder,) = cached_repositories(ONE_RERANKER if name == QWEN else OTHER_RERANKERS)
    return load_repository(folder, Device(threads=1)).ready(name)


@contextmanager
def served(
    model: LoadedModel, cost: RunCost, limits: Limits | None = None
) -> Iterator[tuple[Served, list[bool]]]:
    """A server of a model, and for each run whether it continues a prefix."""
    runs = list[bool]()
    model = tapped(costing(model, cost), lambda inputs: runs.append(PREFIX[0] in inputs))
    with Served(model, limits=limits) as running:
        yield running, runs


def assert_scores(scores: Any, judged: Any) -> None:
    assert_allclose(np.asarray(scores, np.float32), judged, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("cost", [SHARED, WHOLE], ids=["shared", "whole"])
@pytest.mark.parametrize("name", [QWEN, *OTHERS])
def test_scores_equal_the_library(name: str, cost: RunCost, tmp_path: Path) -> None:
    model = load_reranker(name)
    with Served(costing(model, cost), unix_socket=tmp_path / "grpc") as running:
        client = AttentionClient(f"unix:{tmp_path / 'grpc'}")
        with client, front(f"unix:{tmp_path / 'grpc'}") as http:
            for prompt in (None, "", *RERANKERS[name].prompts):
                scores = expected(name, *PAIRS, prompt=prompt)
                order = np.argsort(-scores[:, 0], kind="stable").tolist()
                ranked = client.rerank(name, QUERY, DOCUMENTS, prompt=prompt)
                assert [each.index for each in ranked] == order
                assert_scores([each.score for each in ranked], scores[order, 0])
                body = {"model": name, "query": QUERY, "documents": DOCUMENTS, "prompt": prompt}
                results = ask(http.port, "/v1/rerank", body).json["results"]
                assert_scores([each["relevance_score"] for each in results], scores[order, 0])
            raw = client.classify(name, [QUERY] * len(DOCUMENTS), DOCUMENTS, raw_scores=True)
            assert_scores(raw, expected(name, *PAIRS, raw=True))
            rerank: Any = running.channel.unary_unary(
                "/tei.v1.Rerank/Rerank",
                request_serializer=tei.RerankRequest.SerializeToString,
                response_deserializer=tei.RerankResponse.FromString,
            )
            ranks = rerank(tei.RerankRequest(query=QUERY, texts=DOCUMENTS), timeout=PATIENCE_SECONDS).ranks
            assert_scores(
                [each.score for each in sorted(ranks, key=lambda rank: rank.index)],
                expected(name, *PAIRS)[:, 0],
            )


@pytest.mark.parametrize("name", [QWEN, *OTHERS])
def test_a_long_pair_is_cut_as_the_library_cuts_it(name: str) -> None:
    pairs = [(QUERY, LONG), (LONG, "a"), (LONG, LONG), ("a", "b")]
    with served(load_reranker(name), SHARED) as (running, _), AttentionClient(running.target) as client:
        first, second = zip(*pairs, strict=True)
        assert_scores(client.classify(name, first, second, truncate=True), expected(name, *pairs))
        with pytest.raises(errors.LimitExceededError, match=r"text 0 has .* the limit is 160"):
            client.rerank(name, QUERY, [LONG, "a"])


def test_the_prefix_runs_once_and_the_results_are_those_of_whole_pairs() -> None:
    model = load_reranker(QWEN)
    results = []
    for cost, runs_expected in ((SHARED, {False: 1}), (WHOLE, {})):
        with served(model, cost) as (running, runs), AttentionClient(running.target) as client:
            results.append(client.classify(QWEN, [QUERY] * 6, DOCUMENTS))
            client.classify(QWEN, QUERY, DOCUMENTS[0])  # one pair shares nothing
            (*of_pairs, last) = runs
            assert last is False
            assert of_pairs.count(False) == runs_expected.get(False, len(of_pairs))
    assert_scores(*results)


def test_a_prefix_is_not_computed_if_it_saves_no_time() -> None:
    # A run costs more than the rows that it saves.
    cost = RunCost(fixed=0.1, row=1e-5, pair=0)
    with served(load_reranker(QWEN), cost) as (running, runs), AttentionClient(running.target) as client:
        client.rerank(QWEN, QUERY, DOCUMENTS)
    assert not any(runs)


@pytest.mark.parametrize("kind", [GraphKind.PLAIN, GraphKind.SUFFIX])
def test_a_prefix_is_not_computed_if_what_follows_takes_too_much_memory(kind: GraphKind) -> None:
    """After a prefix, pairs take more memory than without one."""
    model = load_reranker(QWEN)
    limits = Limits(max_run_bytes=model.run_bytes(kind, 1, (MOST_TOKENS,)))
    with served(model, SHARED, limits) as (running, runs), AttentionClient(running.target) as client:
        client.classify(QWEN, [QUERY] * 2, [LONG] * 2, truncate=True)
    assert any(runs) is (kind is GraphKind.SUFFIX)


def test_the_audit_compares_what_follows_a_prefix_and_counts_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = list[Sample]()
    model = load_reranker(QWEN)
    cost = RunCost(fixed=2e-3, row=1e-4, pair=0)
    with served(model, cost) as (running, _), AttentionClient(running.target) as client:
        metrics = Metrics()
        metrics.loaded(running.engine.repository)
        audit = Audit(running.engine, lambda *_: False, metrics, 1.0)
        client.rerank(QWEN, QUERY, ["a", "b"])  # one run after the prefix
        client.rerank(QWEN, QUERY, ["a", LONG[:24]])  # and one for each pair
        wait_until(lambda: not running.engine.load().runs)
        while audit._samples:
            samples.append(audit._samples[0])
            audit.audit_next()
    assert "sequence not audited" not in caplog.text
    assert {sample.graph for sample in samples} == {GraphKind.SUFFIX}
    for sample in samples:
        assert sample.model.context is not None
        assert sample.nbytes > sample.model.context.nbytes > 0


@pytest.mark.parametrize("held", [GraphKind.PREFIX, GraphKind.SUFFIX])
def test_a_request_that_ends_during_either_run_releases_its_memory(held: GraphKind) -> None:
    gate = Gate()
    model = costing(load_reranker(QWEN), SHARED)
    holding = tapped(model, gate)
    model = replace(model, sessions={**model.sessions, held: holding.sessions[held]})
    text = pb.TextSequences(texts=[QUERY] * len(DOCUMENTS), pairs=DOCUMENTS)
    message = pb.AttendRequest(model_name=QWEN, text=text).SerializeToString()
    with Served(model) as running:
        method: Any = running.channel.unary_unary(ATTEND)
        late = method.future(message, timeout=0.5)
        assert running.engine.has_queued(1 if held is GraphKind.PREFIX else 2)
        assert gate.entered.wait(PATIENCE_SECONDS)
        assert late.exception(PATIENCE_SECONDS).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        cancelled = method.future(message, timeout=PATIENCE_SECONDS)
        assert running.engine.has_queued(1)
        cancelled.cancel()
        gate.open()
        assert method(message, timeout=PATIENCE_SECONDS)
        wait_until(lambda: not running.engine.budget.held_bytes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "pairs: is missing; model 'yesno-qwen3' scores pairs of texts only"),
        ({"pairs": ["a"], "prompt": "rivers"}, "prompt: is 'rivers'; must be one of facts, web"),
        ({"pairs": ["a", "b"]}, "pairs: has 2 second texts"),
    ],
)
def test_wrong_requests_are_refused(fields: dict[str, Any], words: str) -> None:
    message = pb.AttendRequest(text=pb.TextSequences(texts=["a"], return_labels=True, **fields))
    with served(load_reranker(QWEN), SHARED) as (running, _):
        method: Any = running.channel.unary_unary(ATTEND)
        with pytest.raises(grpc.RpcError, match=words):
            method(message.SerializeToString(), timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (FLAT.replace('content("document")', 'content("document") | escape'), "changes the texts of a pair"),
        (FLAT.replace('content("query")', 'content("document")'), "must write the query once"),
        (
            FLAT.replace('content("query")', '(content("query") or "nothing")'),
            "changes the texts .* query ''",
        ),
        ("{{ raise_exception('no roles') }}", "no roles"),
    ],
)
def test_templates_that_do_more_than_to_join_texts_are_refused(
    tmp_path: Path, template: str, words: str
) -> None:
    folder = save_reranker(replace(RERANKERS["yesno-gemma"], template=template), tmp_path)
    reranker = load(folder)
    assert isinstance(reranker, CausalReranker)
    with pytest.raises(ExportError, match=words):
        classifier_spec(reranker)


def test_a_model_with_a_window_or_other_tokens_is_told_apart(tmp_path: Path) -> None:
    windowed = Reranker("Mistral", "", options={"sliding_window": 5})
    reranker = load(save_reranker(windowed, tmp_path / "mistral"))
    assert isinstance(reranker, CausalReranker)
    graphs = [signature.kind for signature in classifier_spec(reranker).signatures]
    assert graphs == [GraphKind.PLAIN, GraphKind.LENGTHS]
    same = replace(RERANKERS[QWEN], tokens=("yes", "yes"))
    with pytest.raises(CheckpointError, match=r"have one id, \d+, so that every score would be 0"):
        load(save_reranker(same, tmp_path / "same"))
    encoder = load(save_reranker(RERANKERS["yesno-gemma"], tmp_path / "gemma"), pooling="last")
    assert not isinstance(encoder, CausalReranker)
