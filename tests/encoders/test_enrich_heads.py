"""Dense and sparse embeddings and token vectors: `client.embed`, its command, and columns of tables."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attention_client import AsyncAttentionClient, AttentionClient, TextTruncatedWarning
from attention_client._commands.app import app
from attention_client.enrich import EnrichError
from numpy.testing import assert_allclose, assert_array_equal
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from typer.testing import CliRunner

from attention_serving.enrich import enrich
from scripts.local_server import ServerProcess, serving
from tests.encoders.heads import COLBERT, M3, SPLADE
from tests.encoders.repository import HEAD_MODELS
from tests.encoders.test_prove import prove
from tests.encoders.test_prove_heads import folder_of
from tests.encoders.texts import ATOL, RTOL, TEXTS, Options, rows_of
from tests.support.artifacts import cached_repositories

thorough = pytest.mark.thorough
ALL: Any = ("dense", "sparse", "token_vectors")
LONG = "life is short. " * 60
WEIGHTS = pa.list_(pa.struct({"id": pa.uint32(), "weight": pa.float32()}))


@pytest.fixture(scope="module")
def repository() -> Path:
    (folder,) = cached_repositories(HEAD_MODELS)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(repository, tmp_path_factory.mktemp("heads") / "log", "--http-port=0") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[AttentionClient]:
    with AttentionClient(server.target) as connected:
        yield connected


def test_one_request_has_all_outputs_and_each_equals_the_library(
    client: AttentionClient, server: ServerProcess
) -> None:
    together, alone = client.embed(M3, list(TEXTS), outputs=ALL), client.embed(M3, TEXTS[0], outputs=ALL)
    assert_allclose(together.dense, client.embed(M3, list(TEXTS)), rtol=RTOL, atol=ATOL)
    for row, text in zip(together.sparse, TEXTS, strict=True):
        single = client.embed(M3, text, sparse=True)
        assert_array_equal(row.indices, single.indices)
        assert_allclose(row.values, single.values, rtol=RTOL, atol=ATOL)
    assert_allclose(alone.token_vectors, together.token_vectors[0], rtol=RTOL, atol=ATOL)
    assert (alone.dense.ndim, alone.sparse.to_dict().keys()) == (1, together.sparse[0].to_dict().keys())

    library = SparseEncoder(str(folder_of(SPLADE)), device="cpu")
    for top_k in (None, 5):
        expected = library.encode(list(TEXTS), max_active_dims=top_k, convert_to_sparse_tensor=False).numpy()
        rows = np.zeros_like(expected)
        for row, vector in zip(
            rows, client.embed(SPLADE, list(TEXTS), sparse=True, top_k=top_k), strict=True
        ):
            row[vector.indices] = vector.values
        assert_allclose(rows, expected, rtol=RTOL, atol=ATOL)

    colbert = MultiVectorEncoder(str(folder_of(COLBERT)), device="cpu")
    options: Any = {"outputs": ["token_vectors"], "input_kind": "query"}

    async def embed() -> Any:
        async with AsyncAttentionClient(server.target) as connected:
            return await connected.embed(COLBERT, list(TEXTS), **options)

    for row, vectors in zip(
        asyncio.run(embed()).token_vectors, colbert.encode_query(list(TEXTS)), strict=True
    ):
        assert_allclose(row, vectors, rtol=RTOL, atol=ATOL)


@thorough
def test_texts_that_are_cut_warn_and_a_model_describes_its_heads(client: AttentionClient) -> None:
    with pytest.warns(TextTruncatedWarning, match="cut 1 texts"):
        client.embed(SPLADE, ["a", LONG], sparse=True)
    facts: dict[str, Any] = {name: client.model(name).text_encoder for name in (SPLADE, COLBERT, M3)}
    assert (facts[SPLADE].embedding_width, facts[SPLADE].has_token_vectors) == (0, False)
    assert (facts[COLBERT].sparse_width, facts[COLBERT].similarity) == (0, "maxsim")
    assert facts[M3].sparse_width > 0 < facts[M3].embedding_width
    assert facts[M3].has_token_vectors


def test_columns_of_all_heads_come_from_one_pass(
    client: AttentionClient, server: ServerProcess, repository: Path, tmp_path: Path
) -> None:
    texts = [None if row % 11 == 5 else TEXTS[row % 8] + " x" * (row % 7) for row in range(60)]
    present = [text for text in texts if text is not None]
    table, expected = pa.table({"text": texts}), client.embed(M3, present, outputs=ALL, top_k=3)
    pq.write_table(table, tmp_path / "in.parquet")
    options: Options = {"model": M3, "text_column": "text", "outputs": ["token_vectors", *ALL], "top_k": 3}
    for backend in ({"servers": [server.target]}, {"model_repository": repository}):
        enrich(tmp_path / "in.parquet", tmp_path / "out.parquet", overwrite=True, **options, **backend)
        result = pq.read_table(tmp_path / "out.parquet")
        assert result.column_names == ["text", "embedding", "embedding_sparse", "embedding_token_vectors"]
        assert result.schema.field("embedding_sparse").type == WEIGHTS
        width = expected.token_vectors[0].shape[1]
        assert result.schema.field("embedding_token_vectors").type == pa.list_(pa.list_(pa.float32(), width))
        assert all(column.is_null().equals(result["text"].is_null()) for column in result.columns)
        dense, sparse, vectors = (column.drop_null() for column in result.columns[1:])
        assert_allclose(rows_of(dense), expected.dense, rtol=RTOL, atol=ATOL)
        for row, vector in zip(sparse.to_pylist(), expected.sparse, strict=True):
            assert [entry["id"] for entry in row] == vector.indices.tolist()
            assert_allclose([entry["weight"] for entry in row], vector.values, rtol=RTOL, atol=ATOL)
        for cell, rows in zip(vectors.to_pylist(), expected.token_vectors, strict=True):
            assert_allclose(np.reshape(cell, rows.shape), rows, rtol=RTOL, atol=ATOL)
        changed: Options = {**options, "outputs": "sparse"}
        with pytest.raises(EnrichError, match="is not the result of this job"):
            enrich(tmp_path / "in.parquet", tmp_path / "out.parquet", resume=True, **changed, **backend)


@thorough
@pytest.mark.parametrize("where", ["here", "server"])
def test_columns_of_queries_and_of_passages(
    client: AttentionClient, server: ServerProcess, repository: Path, where: str
) -> None:
    backend: Options = {"model_repository": repository} if where == "here" else {"servers": [server.target]}
    table, texts = pa.table({"text": [LONG, *TEXTS]}), [LONG, *TEXTS]
    options: Options = {"text_column": "text", "outputs": "token_vectors", "input_kind": "query"}
    result = enrich(table, model=COLBERT, **options, **backend).table
    assert result is not None
    expected = client.embed(COLBERT, texts, outputs=["token_vectors"], input_kind="query", truncate=True)
    for cell, rows in zip(result[1].to_pylist(), expected.token_vectors, strict=True):
        assert_allclose(np.reshape(cell, rows.shape), rows, rtol=RTOL, atol=ATOL)
    if where == "server":
        backend["tokenizer"] = repository / SPLADE / "1"
    cut: Options = {"passage_tokens": 40, "passages": "lists", "input_kind": "document", "outputs": "sparse"}
    lists = enrich(table, model=SPLADE, text_column="text", **cut, **backend).table
    assert lists is not None
    assert lists.schema.field("embedding_sparse").type == pa.list_(WEIGHTS)
    passages, cells = lists["passage"].to_pylist()[0], lists["embedding_sparse"].to_pylist()[0]
    assert len(passages) > 1
    for cell, vector in zip(cells, client.embed(SPLADE, passages, sparse=True), strict=True):
        assert [entry["id"] for entry in cell] == vector.indices.tolist()


@thorough
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": SPLADE}, "model 'splade' has no dense output; choose from sparse with --outputs"),
        ({"outputs": "weights"}, "outputs is 'weights'; it must have one or more of dense, sparse, token_v"),
        ({"outputs": []}, r"outputs is \[\]; it must have one or more"),
        ({"outputs": "sparse", "dimensions": 8}, "dimensions needs dense among outputs"),
        ({"top_k": 8}, "top_k needs sparse among outputs"),
        ({"outputs": "sparse", "top_k": 0}, "top_k is 0; it must be 1 or more"),
        ({"input_kind": "query", "prompt": ""}, "input_kind chooses a prompt: leave out prompt"),
        (
            {"outputs": "sparse", "output_column": "a"},
            "the table already has a column 'a_sparse'; choose ano",
        ),
    ],
    ids=str,
)
def test_outputs_that_do_not_fit_are_refused_first(repository: Path, options: Options, words: str) -> None:
    table = pa.table({"text": ["a"], "a_sparse": [1]})
    with pytest.raises(EnrichError, match=words):
        enrich(table, **{"model": M3, "text_column": "text", "model_repository": repository, **options})


@thorough
def test_the_command_prints_or_writes_all_outputs(
    client: AttentionClient, server: ServerProcess, tmp_path: Path
) -> None:
    expected, arguments = (
        client.embed(M3, ["eat", "first"], outputs=ALL),
        ["embed", "eat", "first", "--model", M3],
    )
    arguments += ["--server", server.target, "--outputs", ",".join(ALL)]
    shown = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert_allclose(shown["dense"], expected.dense, rtol=RTOL, atol=ATOL)
    assert shown["sparse_indices"] == [row.indices.tolist() for row in expected.sparse]
    CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "all.npz")])
    arrays = np.load(tmp_path / "all.npz")
    assert_allclose(arrays["token_vectors[1]"], expected.token_vectors[1], rtol=RTOL, atol=ATOL)
    assert_allclose(arrays["sparse_values[0]"], expected.sparse[0].values, rtol=RTOL, atol=ATOL)


@thorough
@pytest.mark.parametrize("name", [SPLADE, COLBERT])
def test_this_service_is_judged_equal(server: ServerProcess, name: str) -> None:
    for protocol, url in (("grpc", server.target), ("tei", f"http://127.0.0.1:{server.http_port}")):
        status, report = prove(folder_of(name), f"--{protocol}", url, "--model", name)
        assert (status, report["causes"], report["refused"]) == (0, [], {}), report
