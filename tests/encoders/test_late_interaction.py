"""MaxSim in the server: pairs and stored documents of multi-vector encoders, against the library."""

import re
import runpy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import grpc
import numpy as np
import pytest
import torch
from attention_client import AsyncAttentionClient, AttentionClient, errors
from attention_client._calls import sequences
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from sentence_transformers.util import maxsim, mean_maxsim

from attention_serving.artifact.encoder import CONTEXT_VECTORS, SCORES, LateInteractionFacts
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.engine.contexts import ContextStore
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests import late_interaction
from attention_serving.server.engine.requests.late_interaction import Comparison
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import (
    CONTEXT_BYTES,
    DOCUMENT_LENGTHS,
    DOCUMENT_VECTORS,
    Context,
    Result,
)
from attention_serving.server.security.guard import Guard
from scripts.local_server import ROOT
from tests.encoders.heads import COLBERT, M3, MULTI_VECTOR, SPLADE
from tests.encoders.repository import FURTHER_HEAD_MODELS, HEAD_MODELS, HEADS
from tests.encoders.test_heads import library
from tests.encoders.test_tei import call
from tests.encoders.texts import ATOL, RTOL
from tests.server.api.served import bearer
from tests.server.api.test_contexts import refusal
from tests.server.http.clients import ask
from tests.server.http.scripted import front
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, SAME_FOR_ALL, Served, costing, wait_until
from tests.server.security.samples import (
    FixedKeys,
    entry,
    issuer_tokens,
    public_jwk,
    watched,
    write_tokens,
)
from tests.support.artifacts import cached_repositories

QUERIES = ["what to eat?", "a", "Where does the river flow?"]
# Of unequal lengths; with punctuation, which has no vectors, and one twice.
DOCUMENTS = ["Life is short, eat dessert first!", "a", "...", "the river " * 9, "a"]
LONG = "life is short. " * 60
# Five documents and three queries, with some that are empty.
LENGTHS, ROWS = [3, 0, 200, 1, 7], [4, 0, 40]
ARGUMENT = "INVALID_ARGUMENT"
Rows = NDArray[np.float32]
Similarity = Literal["maxsim", "meanmaxsim"]


class Running:
    """A server of multi-vector encoders over both transports."""

    def __init__(self, served: Served, port: int, target: str) -> None:
        self.served, self.port, self.target = served, port, target
        self.channel, self.stub = served.channel, AttentionServiceStub(served.channel)

    def scores(self, model: str, texts: Sequence[str], pairs: Sequence[str] = (), **fields: Any) -> Any:
        """The scores (queries, documents) or (pairs,), and the response."""
        text = pb.TextSequences(texts=texts, pairs=pairs)
        request = pb.AttendRequest(model_name=model, text=text, **fields)
        reply = self.stub.Attend(request, timeout=PATIENCE_SECONDS)
        assert reply.context_vectors.width == 1
        rows = np.frombuffer(reply.context_vectors.data, "<f4")
        return (rows if pairs else rows.reshape(len(texts), -1)), reply

    def put(self, model: str, texts: Sequence[str], **fields: Any) -> pb.Context:
        text = pb.TextSequences(texts=texts, **fields.pop("text", {}))
        return self.stub.PutContext(pb.PutContextRequest(model_name=model, text=text, **fields)).context


@pytest.fixture(scope="module")
def models(request: Any) -> dict[str, LoadedModel]:
    """Encoders with several heads; all of them if thorough tests are among those that run."""
    thorough = any("[thorough" in item.nodeid for item in request.session.items)
    folders = cached_repositories(HEAD_MODELS, *([FURTHER_HEAD_MODELS] if thorough else []))
    loaded = (model for folder in folders for model in load_repository(folder, Device(threads=1)))
    return {model.name: model for model in loaded if isinstance(model, LoadedModel)}


@pytest.fixture(scope="module")
def running(models: dict[str, LoadedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = tmp_path_factory.mktemp("late") / "grpc"
    of_texts = [model for model in models.values() if model.late_interaction or model.name == SPLADE]
    with Served(*of_texts, unix_socket=path, model_id=COLBERT) as served, front(f"unix:{path}") as http:
        yield Running(served, http.port, f"unix:{path}")


def random_rows(lengths: Sequence[int], seed: int) -> list[Rows]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, 8), np.float32) - 0.5 for length in lengths]


@pytest.mark.parametrize("numbers", [8, 1 << 19])
@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_scores_equal_the_library_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, similarity: Similarity, numbers: int
) -> None:
    """Of documents and queries without vectors, too."""
    monkeypatch.setattr(late_interaction, "BLOCK_NUMBERS", numbers)
    monkeypatch.setattr(late_interaction, "STEP_BLOCKS", 3)
    queries, documents = random_rows(ROWS, 1), random_rows(LENGTHS, 2)
    judge = {"maxsim": maxsim, "meanmaxsim": mean_maxsim}[similarity]
    expected = judge([*map(torch.tensor, queries)], [*map(torch.tensor, documents)]).numpy()
    tensors = {DOCUMENT_VECTORS: np.concatenate(documents), DOCUMENT_LENGTHS: np.array(LENGTHS)}
    options: Any = {"facts": LateInteractionFacts(similarity=similarity)}
    stored = Comparison(
        places=[(0,), (1,), (2,), (0,)],
        context=Context(id="", nbytes=0, length=sum(LENGTHS), tensors=tensors),
        **options,
    )
    pairs = [(query, len(ROWS) + document) for document in range(5) for query in range(3)]
    for comparison, rows, wanted in (
        (stored, queries, expected[[0, 1, 2, 0], :, np.newaxis]),
        (Comparison(places=pairs, **options), [*queries, *documents], expected.T.reshape(-1, 1, 1)),
    ):
        result = Result({CONTEXT_VECTORS: rows})
        for step in comparison.steps(result):
            step()
        assert_allclose(np.array(result.outputs[SCORES]), wanted, rtol=1e-5, atol=1e-4)


EVERY = [
    name if name in HEADS else pytest.param(name, marks=pytest.mark.thorough, id=f"thorough-{name}")
    for name in MULTI_VECTOR
]


@pytest.mark.parametrize("name", EVERY)
def test_pairs_and_stored_documents_equal_the_library(running: Running, name: str) -> None:
    model, documents = library(name), [*DOCUMENTS, LONG]
    expected = model.similarity(model.encode_query(QUERIES), model.encode_document(documents)).numpy()
    pairs = [(query, document) for query in QUERIES for document in documents]
    found, reply = running.scores(name, *zip(*pairs, strict=True))
    assert_allclose(found, expected.ravel(), rtol=RTOL, atol=ATOL)
    assert list(reply.context_vectors.lengths) == [1] * len(pairs)
    is_long = [document is LONG for _, document in pairs]
    assert {*reply.truncated} >= {*np.flatnonzero(is_long).tolist()}  # of some models, queries are cut too
    context = running.put(name, documents)
    counts = [len(rows) for rows in model.encode_document(documents)]
    assert (context.documents, context.rows) == (len(documents), sum(counts))
    stored, reply = running.scores(name, QUERIES, context_id=context.id)
    assert_allclose(stored, expected, rtol=RTOL, atol=ATOL)
    assert list(reply.context_vectors.lengths) == [len(documents)] * len(QUERIES)
    assert len(reply.token_counts) == len(QUERIES)


def test_documents_that_are_appended_or_put_again(running: Running) -> None:
    """Appended ones count as if they had been put at once, also of a model with several heads."""
    for name in (COLBERT, M3):
        whole, _ = running.scores(name, QUERIES * 5, [text for text in DOCUMENTS for _ in QUERIES])
        first = running.put(name, DOCUMENTS[:2], ttl_seconds=60)
        more = pb.AppendContextRequest(model_name=name, id=first.id)
        more.text.texts.extend(DOCUMENTS[2:])
        context = running.stub.AppendContext(more).context
        found, _ = running.scores(name, QUERIES, context_id=context.id)
        assert_allclose(found, whole.reshape(5, 3).T, rtol=RTOL, atol=ATOL)
        again = running.put(name, DOCUMENTS[:2], ttl_seconds=600)
        assert again.id == first.id
        assert again.expires_at == pytest.approx(first.expires_at + 540, abs=5)
        assert (first.documents, context.documents, len({context.id, first.id})) == (2, 5, 2)
        width = running.served.engine.repository.ready(name, "", lambda _: None).outputs[CONTEXT_VECTORS]
        assert context.bytes == CONTEXT_BYTES + 4 * context.rows * int(width.axes[-1]) + 8 * 5
        running.stub.DropContext(pb.DropContextRequest(model_name=name, id=first.id))
        listed = running.stub.ListContexts(pb.ListContextsRequest(model_name=name)).contexts
        assert {context.id, first.id} & {each.id for each in listed} == {context.id}


@pytest.mark.parametrize(
    ("path", "member"),
    [
        ("/rerank", "texts"),
        ("/rerank", "documents"),
        ("/v1/rerank", "documents"),
        ("/v2/rerank", "documents"),
    ],
)
def test_reranking_over_http_and_its_default_model(running: Running, path: str, member: str) -> None:
    expected, _ = running.scores(COLBERT, QUERIES[:1] * 5, DOCUMENTS)
    for model in (COLBERT, ""):
        body = {"query": QUERIES[0], member: DOCUMENTS, "raw_scores": True, "model": model}
        answer = ask(running.port, path, {name: value for name, value in body.items() if value}).json
        ranks = answer if member == "texts" else answer["results"]
        score = "score" if member == "texts" else "relevance_score"
        assert_array_equal([rank["index"] for rank in ranks], np.argsort(-expected, kind="stable"))
        assert_allclose([rank[score] for rank in ranks], np.sort(expected)[::-1], rtol=RTOL)


def test_reranking_over_tei_and_streams(running: Running) -> None:
    expected, _ = running.scores(COLBERT, QUERIES[:1] * 5, DOCUMENTS)
    (reply,) = call(running.channel, "Rerank", {"query": QUERIES[0], "texts": DOCUMENTS})
    assert_allclose([rank.score for rank in reply.ranks], np.sort(expected)[::-1], rtol=RTOL)
    context = running.put(COLBERT, DOCUMENTS)
    text = pb.TextSequences(texts=QUERIES[:1])
    request = pb.AttendRequest(text=text, model_name=COLBERT, context_id=context.id)
    wrong = pb.AttendRequest(text=text, model_name=COLBERT, context_id="none")
    items = [pb.AttendStreamRequest(id=str(at), request=each) for at, each in enumerate((request, wrong) * 2)]
    first, error, *others = running.stub.AttendStream(iter(items), timeout=PATIENCE_SECONDS)
    rows = np.frombuffer(first.response.context_vectors.data, "<f4")
    assert_allclose(rows, expected, rtol=RTOL, atol=ATOL)
    assert error.error.reason == "CONTEXT_NOT_FOUND"
    assert [each.id for each in others] == ["2", "3"]


TEXT = pb.TextSequences(texts=QUERIES)
PAIRS = pb.TextSequences(texts=QUERIES, pairs=QUERIES)
VECTORS = pb.VectorSequences(lengths=[1], width=1, data=bytes(4), data_type=pb.DATA_TYPE_FP32)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"text": pb.TextSequences(texts=QUERIES, pairs=QUERIES[:1])}, "pairs"),
    ({"text": pb.TextSequences(texts=QUERIES, pairs=QUERIES, prompt="query")}, "prompt"),
    ({"text": pb.TextSequences(texts=QUERIES, pairs=QUERIES, input_kind=pb.INPUT_KIND_QUERY)}, "input_kind"),
    ({"text": pb.TextSequences(texts=QUERIES, pairs=QUERIES, return_labels=True)}, "return_labels"),
    ({"text": PAIRS, "embedding": pb.EmbeddingOptions()}, "embedding"),
    ({"text": PAIRS, "sparse": pb.SparseOptions()}, "sparse"),
    ({"text": PAIRS, "return_token_vectors": True}, "return_token_vectors"),
    ({"text": PAIRS, "return_weights": True}, "return_weights"),
    ({"text": PAIRS, "output_data_type": pb.DATA_TYPE_INT8}, "output_data_type"),
    ({"text": PAIRS, "context_id": "stored"}, "pairs"),
    ({"token_ids": pb.TokenSequences(lengths=[1], ids=[5]), "context_id": "stored"}, "context_id"),
    ({"text": PAIRS, "model_name": SPLADE, "sparse": pb.SparseOptions()}, "pairs"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG)
def test_what_cannot_be_compared_is_refused(running: Running, fields: dict[str, Any], field: str) -> None:
    fields = {"model_name": COLBERT, **fields}
    if "context_id" in fields:
        fields["context_id"] = running.put(COLBERT, DOCUMENTS).id
    refused = refusal(lambda: running.stub.Attend(pb.AttendRequest(**fields)))
    assert refused == (ARGUMENT, "INVALID_FIELD", field)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (ARGUMENT, "INVALID_FIELD", "text")),
        ({"text": pb.TextSequences()}, (ARGUMENT, "INVALID_FIELD", "text")),
        ({"text": PAIRS}, (ARGUMENT, "INVALID_FIELD", "pairs")),
        ({"text": TEXT, "key": VECTORS}, (ARGUMENT, "INVALID_FIELD", "key")),
        ({"text": pb.TextSequences(texts=QUERIES, prompt="document")}, (ARGUMENT, "INVALID_FIELD", "prompt")),
        ({"text": pb.TextSequences(texts=[LONG], truncate=False)}, (ARGUMENT, "LIMIT_EXCEEDED", "text")),
        ({"text": TEXT, "model_name": SPLADE}, ("UNIMPLEMENTED", "UNSUPPORTED", "")),
    ],
)
def test_what_cannot_be_stored_is_refused(
    running: Running, fields: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    request = pb.PutContextRequest(**{"model_name": COLBERT, **fields})
    assert refusal(lambda: running.stub.PutContext(request)) == expected
    wait_until(lambda: running.served.engine.budget.held_bytes == 0)


def test_errors_name_the_text_of_several_equal_ones(running: Running) -> None:
    text = pb.TextSequences(texts=QUERIES[:1] * 4, pairs=["a", "a", "a", LONG], truncate=False)
    with pytest.raises(grpc.RpcError) as error:
        running.stub.Attend(pb.AttendRequest(model_name=COLBERT, text=text))
    assert "text 3 has" in str(error.value.details())


def test_distinct_texts_run_once_and_limits_hold(models: dict[str, LoadedModel]) -> None:
    colbert = costing(models[COLBERT], SAME_FOR_ALL)
    limits = Limits(max_result_bytes=100, max_context_bytes=CONTEXT_BYTES + 10)
    with Served(colbert, limits=limits) as served:
        stub = AttentionServiceStub(served.channel)
        text = pb.TextSequences(texts=QUERIES[:1] * 20, pairs=["a", "b"] * 10)
        stub.Attend(pb.AttendRequest(model_name=COLBERT, text=text))
        served.engine.events.flush()
        runs = colbert.statistics.runs.values()
        assert sum(durations.count for durations in runs) == 1
        text.texts.extend(QUERIES[:1] * 6)
        text.pairs.extend("abcdef")  # 26 scores have 104 bytes
        large = ("INVALID_ARGUMENT", "LIMIT_EXCEEDED", "text")
        assert refusal(lambda: stub.Attend(pb.AttendRequest(model_name=COLBERT, text=text))) == large
        stored = pb.PutContextRequest(model_name=COLBERT, text=pb.TextSequences(texts="a"))
        assert refusal(lambda: stub.PutContext(stored)) == large
        wait_until(lambda: served.engine.budget.held_bytes == served.engine.contexts.held_bytes == 0)


def test_as_many_pairs_as_a_request_may_have(models: dict[str, LoadedModel]) -> None:
    """Though they are more sequences, with the query."""
    with Served(models[COLBERT], limits=Limits(max_sequences=4)) as served:
        stub = AttentionServiceStub(served.channel)
        for count, expected in ((4, None), (5, (ARGUMENT, "LIMIT_EXCEEDED", "text"))):
            text = pb.TextSequences(texts=["a"] * count, pairs="bcdef"[:count])
            request = partial(stub.Attend, pb.AttendRequest(model_name=COLBERT, text=text))
            if expected is None:
                assert list(request().context_vectors.lengths) == [1] * count
            else:
                assert refusal(request) == expected


def test_stored_documents_of_another_identity_are_invisible(
    models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    rights = [entry(name, name, f"infer:{COLBERT}") for name in ("one", "other")]
    table = watched(write_tokens(tmp_path / "tokens.json", *rights))
    guard = Guard(table, issuer_tokens(FixedKeys(public_jwk("RS256"))))
    with Served(models[COLBERT], guard=guard) as served:
        stub = AttentionServiceStub(served.channel)

        def put(caller: str, *, shared: bool) -> pb.Context:
            request = pb.PutContextRequest(model_name=COLBERT, text=TEXT, shared=shared)
            return stub.PutContext(request, metadata=bearer(caller)).context

        def compare(caller: str) -> Callable[[], pb.AttendResponse]:
            request = pb.AttendRequest(model_name=COLBERT, text=TEXT, context_id=context.id)
            return lambda: stub.Attend(request, metadata=bearer(caller))

        context = put("one", shared=False)
        assert refusal(compare("other")) == ("NOT_FOUND", "CONTEXT_NOT_FOUND", "context_id")
        assert list(compare("one")().context_vectors.lengths) == [3] * 3
        assert put("one", shared=True).id == context.id
        assert compare("other")().context_vectors == compare("one")().context_vectors
    table.close()


def test_the_folder_brings_documents_back(running: Running, tmp_path: Path) -> None:
    stored = running.put(COLBERT, DOCUMENTS)
    model = running.served.engine.repository.ready(COLBERT, "", lambda _: None)
    context = running.served.engine.contexts.find(model, stored.id, "").context
    first = ContextStore(1 << 20, tmp_path)
    first.put(model, replace(context, tensors={}), lambda: context.tensors)
    found = ContextStore(1 << 20, tmp_path).find(model, stored.id, "").context
    assert (found.documents, found.rows) == (stored.documents, stored.rows)
    for name in (DOCUMENT_VECTORS, DOCUMENT_LENGTHS):
        assert_array_equal(found.tensors[name], context.tensors[name])


@pytest.mark.parametrize("page", ["rerankers", "contexts"])
def test_the_blocks_of_the_pages_run(running: Running, tmp_path: Path, page: str) -> None:
    *_, block = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    (tmp_path / "block.py").write_text(block.replace("127.0.0.1:8001", running.target))
    runpy.run_path(str(tmp_path / "block.py"))


async def test_clients_store_and_rank_documents(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "MAX_SEQUENCES", 2)
    expected, _ = running.scores(COLBERT, QUERIES[:1] * 5, DOCUMENTS)
    order = np.argsort(-expected, kind="stable").tolist()
    with AttentionClient(running.target) as client:
        ranked = client.rerank(COLBERT, QUERIES[0], DOCUMENTS)
        assert [each.index for each in ranked] == order
        memory = client.context(COLBERT, texts=DOCUMENTS[:3], truncate=True, ttl=60)
        memory.append(texts=DOCUMENTS[3:])
        assert (memory.documents, memory.rows) == (
            5,
            sum(map(len, library(COLBERT).encode_document(DOCUMENTS))),
        )
        assert memory.id in {each.id for each in client.contexts(COLBERT) if each.documents == 5}
        for each in client.contexts(COLBERT):
            each.drop()
        for at in range(2):  # the first call puts them again
            context = memory.id if at else memory
            found = client.rerank(COLBERT, QUERIES[0], context=context, top_n=3)
            assert [each.index for each in found] == order[:3]
            assert_allclose([each.score for each in found], expected[order[:3]], rtol=RTOL)
        wrong: list[tuple[str, Callable[[], object]]] = [
            ("texts", lambda: client.rerank(COLBERT, "a")),
            ("texts", lambda: client.rerank(COLBERT, "a", DOCUMENTS, context=memory)),
            ("context", lambda: client.rerank(M3, "a", context=memory)),
            ("texts", lambda: client.context(COLBERT)),
            ("texts", lambda: client.context(COLBERT, [[1.0]], texts=DOCUMENTS)),
            ("key", lambda: client.context(COLBERT, [[1.0]], truncate=True)),
            ("texts", lambda: client.context(COLBERT, texts=[])),
            ("texts", lambda: client.context(COLBERT, texts=["\ud800"])),
        ]
        for field, work in wrong:
            with pytest.raises(errors.InvalidArgumentError) as error:
                work()
            assert error.value.field == field
    async with AsyncAttentionClient(running.target) as asynchronous:
        stored = await asynchronous.context(COLBERT, texts=DOCUMENTS)
        ranked = await asynchronous.rerank(COLBERT, QUERIES[0], context=stored)
        assert [each.index for each in ranked] == order
