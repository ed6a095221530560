"""Results of whole jobs, in this process and on a server."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from attention_client.enrich import EnrichError, Summary

from attention_serving.enrich import enrich
from tests.clients.enrich.conftest import POOLED, POOLED_WIDTH, mean_of_linear
from tests.clients.enrich.tables import assert_enriched, eager_answers, read, table, vectors_of, write
from tests.server.samples import CROSS, SELF, TEXT
from tests.support import eager

ROWS = 2500
QUERY: dict[str, Any] = {"model": SELF, "column": "query"}
Options = dict[str, Any]


def run(source: Path, output: Path, **options: Any) -> Summary:
    return enrich(str(source), str(output), **{**QUERY, **options})


def test_a_file_gains_a_column_and_keeps_the_others(tmp_path: Path, backend_options: Options) -> None:
    source = write(tmp_path, ROWS)
    summary = run(source, tmp_path / "out.parquet", **backend_options)
    result = read(tmp_path / "out.parquet")
    assert_enriched(result, read(source), SELF, ["query"])
    assert (summary.rows, summary.refused, summary.nulls, summary.rejects) == (ROWS, 0, 0, None)
    assert summary.tokens == sum(map(len, read(source).column("query").to_pylist()))
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    assert (summary.model, summary.version, summary.already_complete) == (SELF, "1", False)
    assert summary.parity_error is not None
    assert summary.parity_error < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "table.parquet"]
    made_by = result.schema.field("context_vectors").metadata
    assert (made_by[b"model"], made_by[b"version"]) == (SELF.encode(), b"1")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("table.arrow", "out.arrows"),
        ("table.arrows", "out.parquet"),
        ("table.parquet", "out.arrow"),
        ("table.arrows", "out"),
    ],
)
def test_every_format_is_read_and_written(
    tmp_path: Path, in_process: Options, name: str, output: str
) -> None:
    source = write(tmp_path, 300, name, group_rows=70)
    run(source, tmp_path / output, **in_process)
    written = tmp_path / output / name if output == "out" else tmp_path / output
    assert_enriched(read(written), read(source), SELF, ["query"])


def test_a_folder_keeps_its_files_and_subfolders(tmp_path: Path, in_process: Options) -> None:
    names = ["year=2025/a.parquet", "year=2026/b.parquet", "year=2026/c.parquet"]
    sources = [write(tmp_path / "in", 100 * seed, name, seed=seed) for seed, name in enumerate(names)]
    (tmp_path / "in" / "_SUCCESS").touch()
    summary = run(tmp_path / "in", tmp_path / "out", **in_process)
    assert summary.rows == 300
    for source, name in zip(sources, names, strict=True):
        assert_enriched(read(tmp_path / "out" / name), read(source), SELF, ["query"])
    assert len(list((tmp_path / "out").rglob("*.*"))) == len(names)


def test_cross_attention_reads_key_and_value_from_their_own_columns(
    tmp_path: Path, backend_options: Options
) -> None:
    source = write(tmp_path, 200)
    columns = {"model": CROSS, "key_column": "key", "value_column": "value"}
    run(source, tmp_path / "out.parquet", **columns, weights=True, **backend_options)
    result = read(tmp_path / "out.parquet")
    assert_enriched(result, read(source), CROSS, ["query", "key", "value"])
    inputs = list(
        zip(*(read(source).column(name).to_pylist() for name in ("query", "key", "value")), strict=True)
    )
    served = [np.array(weights) for weights in result.column("attention_weights").to_pylist()]
    eager.assert_parity(served, [weights for _, weights in eager_answers(CROSS, inputs)])


def test_texts_are_tokenized_by_the_model(tmp_path: Path, backend_options: Options) -> None:
    source = write(tmp_path, 100)
    run(source, tmp_path / "out.parquet", model=TEXT, column="text", **backend_options)
    served = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    texts = read(source).column("text").to_pylist()
    assert [len(vectors) for vectors in served] == [len(text.split()) for text in texts]


@pytest.mark.parametrize(
    ("pool", "reduce"),
    [
        ("mean", lambda rows: rows.mean(axis=0)),
        ("cls", lambda rows: rows[0]),
        ("max", lambda rows: rows.max(axis=0)),
    ],
    ids=["mean", "cls", "max"],
)
def test_pooling_stores_one_vector_per_row(
    tmp_path: Path, in_process: Options, pool: str, reduce: Any
) -> None:
    source = write(tmp_path, 200)
    run(source, tmp_path / "out.parquet", pool=pool, output_column="pooled", **in_process)
    result = read(tmp_path / "out.parquet")
    assert result.schema.field("pooled").type == pa.list_(pa.float32(), 4)
    inputs = [(cell,) for cell in read(source).column("query").to_pylist()]
    expected = [reduce(vectors) for vectors, _ in eager_answers(SELF, inputs)]
    eager.assert_parity(np.array(result.column("pooled").to_pylist()), np.array(expected))


def test_a_model_that_pools_gives_one_vector_per_row(tmp_path: Path, backend_options: Options) -> None:
    source = write(tmp_path, 100, query=vectors_of(*read(write(tmp_path, 98))["query"].to_pylist(), None, []))
    options = {"model": POOLED, **backend_options}
    summary = run(source, tmp_path / "out.parquet", **options)
    result = read(tmp_path / "out.parquet")
    assert result.schema.field("context_vectors").type == pa.list_(pa.float32(), POOLED_WIDTH)
    *served, null, empty = result.column("context_vectors").to_pylist()
    cells = read(source).column("query").to_pylist()[:98]
    with torch.inference_mode():
        expected = [mean_of_linear()(torch.tensor([cell]))[0].numpy() for cell in cells]
    eager.assert_parity(np.array(served), np.array(expected))
    assert (null, empty, summary.nulls, summary.tokens) == (None, None, 2, sum(map(len, cells)))
    with pytest.raises(EnrichError, match="already returns one vector per sequence: leave out pool=mean"):
        run(source, tmp_path / "mean.parquet", **options, pool="mean")


def test_a_null_gives_null_and_an_empty_query_gives_no_vectors(
    tmp_path: Path, backend_options: Options
) -> None:
    source = write(tmp_path, 3, query=vectors_of(None, [], [[1.0, 2.0, 3.0, 4.0]]))
    summary = run(source, tmp_path / "out.parquet", **backend_options)
    first, second, third = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    assert (first, second, len(third)) == (None, [], 1)
    assert (summary.nulls, summary.refused) == (1, 0)
    summary = run(source, tmp_path / "pooled.parquet", pool="mean", **backend_options)
    first, second, third = read(tmp_path / "pooled.parquet").column("context_vectors").to_pylist()
    assert (first, second, len(third)) == (None, None, 4)
    assert (summary.nulls, summary.refused) == (2, 0)


def test_pandas_polars_and_duckdb_read_the_result(tmp_path: Path, in_process: Options) -> None:
    path = tmp_path / "out.parquet"
    run(write(tmp_path, 100), path, **in_process)
    expected = read(path).column("context_vectors").to_pylist()
    by_pandas = [np.stack(cell).tolist() for cell in pd.read_parquet(path)["context_vectors"]]
    by_polars = pl.read_parquet(path)["context_vectors"].to_list()
    rows = duckdb.execute("SELECT context_vectors FROM read_parquet(?) ORDER BY id", [str(path)]).fetchall()
    for found in (by_pandas, by_polars, [row[0] for row in rows]):
        assert np.array_equal(np.concatenate(found), np.concatenate(expected))


def test_urls_of_fsspec_are_read_and_written(in_process: Options) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    made = table(50)
    with memory.open("/in/table.parquet", "wb") as file:
        pq.write_table(made, file)
    enrich("memory://in", "memory://out", **QUERY, **in_process)
    with memory.open("/out/table.parquet", "rb") as file:
        assert_enriched(pq.read_table(file), made, SELF, ["query"])


def test_only_columns_of_numbers_are_written_without_a_dictionary(
    tmp_path: Path, in_process: Options
) -> None:
    source = write(tmp_path, 2, tags=pa.array([["a", "b"], ["a"]]), at=pa.array([{"x": 1.5, "y": "z"}] * 2))
    run(source, tmp_path / "out.parquet", **in_process)
    group = pq.read_metadata(tmp_path / "out.parquet").row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    encoded = {column.path_in_schema: "RLE_DICTIONARY" in column.encodings for column in columns}
    assert encoded["tags.list.element"]
    assert encoded["at.y"]
    assert not encoded["at.x"]
    assert not encoded["query.list.element.list.element"]
    assert not encoded["context_vectors.list.element.list.element"]


def test_progress_is_reported_only_if_asked(in_process: Options, capsys: pytest.CaptureFixture[str]) -> None:
    summary = enrich(table(0), **QUERY, **in_process, progress=True)
    assert summary.rows == 0
    assert "0 of 0 rows" in capsys.readouterr().err
    enrich(table(3), **QUERY, **in_process)
    assert capsys.readouterr().err == ""
