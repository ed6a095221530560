"""Sparse embeddings, token vectors and embeddings from one pass, at a live server, against the library."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from attention_serving.artifact.manifest import GraphKind
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1 import attention_pb2_grpc
from attention_serving.server.api.attention.requests import encoder_outputs
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import Request
from attention_serving.server.engine.requests.validation import text_limits, tokenize_texts, validate
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.types import SPARSE_INDICES, SPARSE_VALUES, DecodedRequest
from attention_serving.server.observe.metrics import AuditResult
from attention_serving.server.process.audit import Sample, audit, comparison_graph
from tests.encoders.heads import COLBERT, M3, MULTI_VECTOR, SPARSE, SPECIAL, SPLADE, save_folder
from tests.encoders.repository import FURTHER_HEAD_MODELS, HEAD_MODELS, HEADS
from tests.encoders.test_tei import call
from tests.encoders.texts import ATOL, RTOL
from tests.encoders.texts import TEXTS as ALL_TEXTS
from tests.server.http.clients import ask
from tests.server.http.scripted import front
from tests.server.samples import load_repository
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.support.artifacts import cached_repositories

# Queries without special tokens need words.
TEXTS = [text for text in ALL_TEXTS if text]
LONG = "life is short. " * 60
KINDS, LIMITS = ("", "query", "document"), Limits()
UNKNOWN = SPECIAL.index("<unk>")
Vectors = NDArray[np.float32]


class Running:
    """A server of encoders with several heads."""

    def __init__(self, served: Served, port: int) -> None:
        self.served, self.port, self.channel = served, port, served.channel
        self.stub = attention_pb2_grpc.AttentionServiceStub(served.channel)

    def attend(self, model: str, texts: Sequence[str] = (), kind: str = "", **fields: Any) -> Any:
        return self.stub.Attend(request_of(model, texts, kind, **fields), timeout=PATIENCE_SECONDS)

    def model(self, name: str) -> pb.Model:
        return self.stub.GetModel(pb.GetModelRequest(name=name)).model

    def runs(self, name: str) -> int:
        """How many runs of a model there were."""
        self.served.engine.events.flush()
        (model,) = [each for each in self.served.engine.repository.loaded_models if each.name == name]
        return sum(durations.count for durations in model.statistics.runs.values())


def test_kinds_that_only_choose_a_prompt_have_the_limit_of_texts_of_no_kind(running: Running) -> None:
    (model,) = [each for each in running.served.engine.repository.loaded_models if each.name == COLBERT]
    assert model.encoder is not None
    encoder = model.encoder.model_copy(update={"token_limits": {"": 9, "query": 8}})
    limited = replace(model, manifest=model.manifest.model_copy(update={"encoder": encoder}))
    most = model.manifest.max_lengths[model.axes[0]]
    expected = {"": 9, "query": 8, "document": most, "classification": 9, "clustering": 9}
    assert {kind: text_limits(limited, LIMITS, kind).text_tokens for kind in expected} == expected


def request_of(model: str, texts: Sequence[str], kind: str = "", **fields: Any) -> pb.AttendRequest:
    """A request with texts, which are cut if they are too long."""
    input_kind: Any = f"INPUT_KIND_{kind.upper() or 'UNSPECIFIED'}"
    truncate = fields.pop("truncate", None)
    text = pb.TextSequences(texts=texts, input_kind=input_kind, truncate=truncate) if texts else None
    return pb.AttendRequest(model_name=model, text=text, **fields)


@pytest.fixture(scope="module")
def running(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server, with further models if thorough tests are among those that run."""
    thorough = any("[thorough" in item.nodeid for item in request.session.items)
    folders = cached_repositories(HEAD_MODELS, *([FURTHER_HEAD_MODELS] if thorough else []))
    loaded = (model for folder in folders for model in load_repository(folder, Device(threads=1)))
    path = tmp_path_factory.mktemp("heads") / "grpc"
    models = [model for model in loaded if isinstance(model, LoadedModel)]
    with Served(*models, unix_socket=path) as served, front(f"unix:{path}") as http:
        yield Running(served, http.port)


@cache
def folder_of(name: str) -> str:
    """A folder of the reference library, which is made once."""
    return str(save_folder(name, Path(mkdtemp())))


@cache
def library(name: str) -> Any:
    """The reference library's model of a folder."""
    kind = SparseEncoder if name in SPARSE else MultiVectorEncoder if name in MULTI_VECTOR else None
    return (kind or SentenceTransformer)(folder_of(name), device="cpu")


def skipped_ids() -> list[int]:
    """The ids that the library skips in documents of COLBERT."""
    return [*map(int, library(COLBERT)[2]._skiplist_ids)]


def encode(name: str, texts: Sequence[str], kind: str, **options: Any) -> list[Vectors]:
    """What the library computes for texts of a kind."""
    model = library(name)
    method = getattr(model, f"encode_{kind}" if kind else "encode")
    if name in SPARSE:
        return [*method([*texts], convert_to_sparse_tensor=False, **options).numpy()]
    return [np.asarray(rows) for rows in method([*texts], convert_to_numpy=True)]


def rows_of(vectors: pb.VectorSequences) -> list[Vectors]:
    rows = np.frombuffer(vectors.data, "<f4").reshape(-1, vectors.width)
    return np.split(rows, np.cumsum(vectors.lengths)[:-1])


def dense(vectors: pb.SparseVectors, width: int) -> list[Vectors]:
    """The weights of all token ids of each text; checks that ids ascend and none has weight 0."""
    rows, start = [], 0
    for length in vectors.lengths:
        ids = np.array(vectors.indices[start : start + length], np.int64)
        values = np.array(vectors.values[start : start + length], np.float32)
        assert (np.diff(ids) > 0).all()
        assert values.all()
        row = np.zeros(width, np.float32)
        row[ids] = values
        rows.append(row)
        start += length
    assert start == len(vectors.indices) == len(vectors.values)
    return rows


def close(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    assert [np.shape(rows) for rows in found] == [np.shape(rows) for rows in wanted]
    for rows, expected in zip(found, wanted, strict=True):
        assert_allclose(rows, expected, rtol=RTOL, atol=ATOL)


thorough = pytest.mark.thorough
EVERY = [
    name if name in HEADS else pytest.param(name, marks=thorough, id=f"thorough-{name}")
    for name in (*SPARSE, *MULTI_VECTOR)
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EVERY)
def test_the_head_of_a_mixed_batch_equals_the_library(running: Running, name: str, kind: str) -> None:
    texts = [*TEXTS, LONG]
    expected = encode(name, texts, kind)
    if name in MULTI_VECTOR:
        first = running.attend(name, texts, kind)
        close(rows_of(first.context_vectors), expected)
        reply = running.attend(name, texts, kind, return_token_vectors=True)
        assert not reply.HasField("context_vectors")
        close(rows_of(reply.token_vectors), expected)
        half = running.attend(name, texts, kind, return_token_vectors=True, output_data_type="DATA_TYPE_FP16")
        found = np.frombuffer(half.token_vectors.data, "<f2")
        assert_array_equal(found, np.frombuffer(reply.token_vectors.data, "<f4").astype("<f2"))
        return
    reply = running.attend(name, texts, kind, sparse=pb.SparseOptions())
    assert not reply.HasField("context_vectors")
    close(dense(reply.sparse_embeddings, len(expected[0])), expected)
    for most in (1, 30):
        reply = running.attend(name, texts, kind, sparse=pb.SparseOptions(top_k=most))
        largest = dense(reply.sparse_embeddings, len(expected[0]))
        close(largest, encode(name, texts, kind, max_active_dims=most))
        assert max(reply.sparse_embeddings.lengths) <= most


def test_a_stream_and_other_protocols_have_the_same_values(running: Running) -> None:
    expected, width = encode(SPLADE, TEXTS, "query"), library(SPLADE).get_embedding_dimension()
    options, (ids, body) = pb.SparseOptions(), ([5, 6, 7], {"inputs": TEXTS, "model": SPLADE})
    requests = [request_of(SPLADE, [text], "query", sparse=options) for text in TEXTS]
    requests.append(
        pb.AttendRequest(model_name=SPLADE, token_ids=pb.TokenSequences(lengths=[3], ids=ids), sparse=options)
    )
    stream = running.stub.AttendStream(
        iter([pb.AttendStreamRequest(id="a", request=request) for request in requests]),
        timeout=PATIENCE_SECONDS,
    )
    *replies, of_ids = [each.response.sparse_embeddings for each in stream]
    close([dense(reply, width)[0] for reply in replies], expected)
    assert of_ids.lengths[0] > 0
    listed = ask(running.port, "/embed_sparse", body | {"input_type": "query"}).json
    of_tei = call(running.channel, "EmbedSparseStream", *({"inputs": text} for text in TEXTS), model=SPLADE)
    for pairs in (
        listed,
        [[{"index": w.index, "value": w.value} for w in reply.sparse_embeddings] for reply in of_tei],
    ):
        rows = np.zeros((len(TEXTS), width), np.float32)
        for row, weights in zip(rows, pairs, strict=True):
            row[[weight["index"] for weight in weights]] = [weight["value"] for weight in weights]
        close([*rows], expected)
    short = ask(running.port, "/embed_sparse", body | {"top_k": 2}).json
    assert [len(weights) for weights in short] == [2] * len(TEXTS)
    vectors = encode(COLBERT, TEXTS, "")
    found = ask(running.port, "/embed_all", body | {"model": COLBERT}).json
    close([np.array(rows, np.float32) for rows in found], vectors)
    of_tei = call(running.channel, "EmbedAll", {"inputs": TEXTS[0]}, model=COLBERT)
    close([[token.embeddings for token in of_tei[0].token_embeddings]], vectors[:1])


def test_one_pass_equals_separate_passes_and_the_formulas(running: Running) -> None:
    requests: dict[str, Any] = {
        "embedding": pb.EmbeddingOptions(),
        "sparse": pb.SparseOptions(),
        "return_token_vectors": True,
    }
    runs = running.runs(M3)
    one = running.attend(M3, TEXTS[:1], **requests)
    assert running.runs(M3) == runs + 1
    one = running.attend(M3, TEXTS, **requests)
    embeddings, sparse, tokens = (
        running.attend(M3, TEXTS, **{name: value}) for name, value in requests.items()
    )
    width = running.model(M3).text_encoder.sparse_width
    close(rows_of(one.context_vectors), rows_of(embeddings.context_vectors))
    close(rows_of(one.token_vectors), rows_of(tokens.token_vectors))
    close(dense(one.sparse_embeddings, width), dense(sparse.sparse_embeddings, width))
    # FlagEmbedding's formulas, of the hidden states of the library.
    model = library(M3)
    heads = {name: torch.load(Path(folder_of(M3)) / f"{name}_linear.pt") for name in ("sparse", "colbert")}
    weights, vectors = [], []
    for text in TEXTS:
        hidden = model.encode(text, output_value="token_embeddings", convert_to_numpy=False).cpu()
        rows = torch.nn.functional.linear(hidden[1:], *heads["colbert"].values())
        vectors.append(torch.nn.functional.normalize(rows, dim=-1).numpy())
        each = torch.relu(torch.nn.functional.linear(hidden, *heads["sparse"].values()))[:, 0]
        row = np.zeros(width, np.float32)
        for token, weight in zip(model.tokenizer(text)["input_ids"], each.tolist(), strict=True):
            row[token] = max(row[token], weight if token > UNKNOWN else 0)
        weights.append(row)
    close(rows_of(one.token_vectors), vectors)
    close(dense(one.sparse_embeddings, width), weights)
    close(rows_of(one.context_vectors), [row[np.newaxis] for row in model.encode(TEXTS)])
    assert any(row.any() for row in weights)


def test_queries_and_documents_have_their_tokens(running: Running) -> None:
    model = running.model(COLBERT)
    assert (model.text_encoder.similarity, model.text_encoder.has_token_vectors) == ("maxsim", True)
    assert (model.text_encoder.embedding_width, model.text_encoder.sparse_width) == (0, 0)
    text = pb.TextSequences(texts=["a, b", LONG], input_kind=pb.INPUT_KIND_QUERY, truncate=True)
    reply = running.stub.Tokenize(pb.TokenizeRequest(model_name=COLBERT, text=text))
    offsets = np.stack([reply.token_offsets.starts, reply.token_offsets.ends], axis=1)
    first = library(COLBERT).preprocess(["a, b"], prompt="[Q] ", task="query")
    count = int(first["attention_mask"].sum())
    assert [*reply.token_ids.lengths] == [32, 32]
    assert [*reply.token_ids.ids[:count]] == first["input_ids"][0, :count].tolist()
    bound = model.inputs[0].exclusive_upper_bounds[0]
    assert {*reply.token_ids.ids[count:32]} == {bound - 1}
    assert not offsets[count:32].any()
    assert all(reply.special[count:32])
    found = running.attend(COLBERT, [LONG], "document", return_offsets=True, truncate=True)
    assert ([*found.token_counts], [*found.truncated]) == ([100], [0])
    assert found.context_vectors.lengths[0] < 100
    ids = pb.TokenSequences(lengths=[32], ids=reply.token_ids.ids[:32])
    by_ids = running.attend(COLBERT, token_ids=ids)
    kept = [token not in skipped_ids() for token in reply.token_ids.ids[:32]]
    query = running.attend(COLBERT, ["a, b"], "query")
    close(rows_of(by_ids.context_vectors), [rows_of(query.context_vectors)[0][kept]])


Fields = dict[str, Any]
SPARSE_OPTIONS: Fields = {"sparse": pb.SparseOptions()}
EMBEDDING_OPTIONS: Fields = {"embedding": pb.EmbeddingOptions()}
TOKEN_VECTORS: Fields = {"return_token_vectors": True}
REFUSALS: dict[str, tuple[str, Fields]] = {
    "embedding: model 'splade' has no dense embeddings; it has sparse embeddings": (
        SPLADE,
        EMBEDDING_OPTIONS,
    ),
    "embedding: model 'colbert' has no dense embeddings": (
        COLBERT,
        {"embedding": pb.EmbeddingOptions(dimensions=8)},
    ),
    "sparse: model 'colbert' has no sparse embeddings; it has token vectors": (
        COLBERT,
        SPARSE_OPTIONS | TOKEN_VECTORS,
    ),
    "return_token_vectors: model 'splade' has no token vectors": (SPLADE, SPARSE_OPTIONS | TOKEN_VECTORS),
    "return_token_vectors: model 'splade' has no token vectors; it has": (SPLADE, {}),
    "return_weights: cannot be combined with sparse": (M3, SPARSE_OPTIONS | {"return_weights": True}),
    "return_weights: cannot be combined with return_token_vectors; send embedding": (
        M3,
        {"return_weights": True},
    ),
    "output_data_type: INT8 is for embeddings": (
        M3,
        SPARSE_OPTIONS | TOKEN_VECTORS | {"output_data_type": "DATA_TYPE_INT8"},
    ),
    "spans: model 'm3' has token vectors of which": (
        M3,
        {"embedding": pb.EmbeddingOptions(spans=pb.Spans(lengths=[1], starts=[0], ends=[2]))},
    ),
    "normalised: model 'm3' has token vectors of which": (
        M3,
        {"embedding": pb.EmbeddingOptions(normalised=False)},
    ),
    "text: text 0 has .* the limit is 100": (COLBERT, {"kind": "document", "text": LONG, "truncate": False}),
    "text: text 0 has .* the limit is 32": (COLBERT, {"kind": "query", "text": LONG, "truncate": False}),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_a_model_lacks_is_refused(running: Running, words: str) -> None:
    model, fields = REFUSALS[words]
    fields = dict(fields)
    with pytest.raises(grpc.RpcError) as caught:
        running.attend(model, [fields.pop("text", "eat")], fields.pop("kind", ""), **fields)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.match(words, error.details()), error.details()


def test_a_request_without_a_model_reaches_the_one_with_the_head(running: Running) -> None:
    for name, fields in ((M3, EMBEDDING_OPTIONS), (M3, SPARSE_OPTIONS | TOKEN_VECTORS)):
        assert running.attend("", TEXTS[:1], **fields).model_name == name
    with pytest.raises(grpc.RpcError, match="text encoders are ready"):
        running.attend("", TEXTS[:1], **SPARSE_OPTIONS)
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/embed", {"inputs": "a"})):
        answer = ask(running.port, path, body | {"model": SPLADE})
        assert answer.status == 400
        assert "has no " in str(answer.json)


def infer(running: Running, model: str, *outputs: str, **parameters: Any) -> tuple[int, Any]:
    """The status of a request by the names of outputs, and these by name or its error."""
    body = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}],
        "outputs": [{"name": name} for name in outputs],
        "parameters": parameters,
    }
    answer = ask(running.port, f"/v2/models/{model}/infer", body)
    if answer.status != 200:
        return answer.status, answer.json["error"]
    return 200, {
        each["name"]: np.array(each["data"], np.float32).reshape(each["shape"])
        for each in answer.json["outputs"]
    }


def test_outputs_by_name_are_those_of_the_graphs(running: Running) -> None:
    status, outputs = infer(running, SPLADE)
    assert (status, [*outputs]) == (200, ["sparse_embedding", "lengths"])
    close([*outputs["sparse_embedding"]], encode(SPLADE, TEXTS, ""))
    status, outputs = infer(running, M3, "token_weights", "context_vectors", "embedding")
    assert status == 200
    assert outputs["token_weights"].shape == outputs["context_vectors"].shape[:2]  # of all tokens
    status, error = infer(running, M3, "token_weights", "attention_weights")
    assert (status, error[:46]) == (400, "outputs: has token_weights, which this request")


def request_for(
    running: Running, name: str, kind: str = "", most: int = 0, limits: Limits = LIMITS
) -> Request:
    """A validated request for sparse embeddings of the texts."""
    (model,) = [each for each in running.served.engine.repository.loaded_models if each.name == name]
    outputs = encoder_outputs(request_of(name, TEXTS, kind, sparse=pb.SparseOptions(top_k=most)), model)
    assert outputs is not None
    decoded = DecodedRequest(
        texts=tuple(TEXTS), input_kind=kind, encoder_outputs=outputs, output_names=outputs.names
    )
    return validate(tokenize_texts(decoded, model, LIMITS), model, limits)


@pytest.mark.parametrize(("name", "kind"), [(SPLADE, ""), (M3, "query")])
def test_a_result_holds_no_more_than_was_reserved(running: Running, name: str, kind: str) -> None:
    """And neither the dense rows over the vocabulary, nor outputs that were not asked for."""
    for most in (0, 3):
        request = request_for(running, name, kind, most)
        graph = GraphKind.TOKENS if name == M3 else GraphKind.LENGTHS
        outputs, _ = run_batch(request.model, graph, request.sequences)
        arrays = [array for each in outputs for array in each.values()]
        assert all(array.base is None for array in arrays)
        assert {name for each in outputs for name in each} == {SPARSE_INDICES, SPARSE_VALUES}
        held = sum(array.nbytes for array in arrays)
        assert 0 < 2 * held <= request.plan.required_bytes
        if most:
            assert held <= 8 * most * len(TEXTS)
    with pytest.raises(LimitExceededError, match=r"sparse: .* limit is 100; send fewer texts, or a top_k"):
        request_for(running, name, kind, limits=Limits(max_result_bytes=100))


def test_the_audit_compares_the_weights_of_all_token_ids(running: Running) -> None:
    request, bounded = (request_for(running, SPLADE, most=most) for most in (0, 3))
    model, sequence = request.model, request.sequences[0]
    (outputs, _), _ = run_batch(model, GraphKind.LENGTHS, request.sequences[:2])
    outputs = {name: array[np.newaxis] for name, array in outputs.items()}
    alone = comparison_graph(model, GraphKind.LENGTHS, sequence, 2)
    assert alone is not None
    # The batch has a weight that is 0 alone.
    indices, values = outputs[SPARSE_INDICES], outputs[SPARSE_VALUES]
    absent = np.setdiff1d(np.arange(indices.max()), indices)[:1]
    for weight, result in ((1e-9, AuditResult.PASSED), (1.0, AuditResult.FAILED)):
        changed = {
            SPARSE_INDICES: np.append(indices, absent[np.newaxis], axis=1),
            SPARSE_VALUES: np.append(values, np.full((1, 1), weight, np.float32), axis=1),
        }
        assert audit(Sample(model, alone, "a run", sequence, changed, 0, 0.0))[0] is result
    assert comparison_graph(model, GraphKind.LENGTHS, bounded.sequences[0], 2) is None
