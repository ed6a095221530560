"""Inputs that are not files, and outputs that must not be lost."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from attention_client.enrich import EnrichError

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import assert_enriched, eager_answers, read, write
from tests.server.samples import SELF, TEXT
from tests.support import eager

QUERY: dict[str, Any] = {"model": SELF, "column": "query"}
Options = dict[str, Any]


def open_as(source: Path, library: str) -> Any:
    match library:
        case "arrow":
            return read(source)
        case "pandas":
            return read(source).to_pandas()
        case "polars":
            return pl.read_parquet(source)
        case "duckdb":
            return duckdb.connect().sql(f"from '{source}'")
    return ds.dataset(source)


@pytest.mark.parametrize("library", ["arrow", "pandas", "polars", "duckdb", "dataset"])
def test_a_table_in_memory_is_returned_in_memory(tmp_path: Path, in_process: Options, library: str) -> None:
    source = write(tmp_path, 300, group_rows=100)
    summary = enrich(open_as(source, library), **QUERY, **in_process)
    assert (summary.output, summary.rows) == (None, 300)
    assert summary.table is not None
    assert summary.table.column_names == [*read(source).column_names, "context_vectors"]
    inputs = [(cell,) for cell in read(source).column("query").to_pylist()]
    expected = [vectors for vectors, _ in eager_answers(SELF, inputs)]
    eager.assert_parity(summary.table.column("context_vectors").to_pylist(), expected)


def test_a_filtered_dataset_is_written_to_a_file(tmp_path: Path, in_process: Options) -> None:
    for seed, name in enumerate(["year=2025/a.parquet", "year=2026/b.parquet"]):
        write(tmp_path / "in", 100, name, seed=seed)
    years = ds.dataset(tmp_path / "in", partitioning="hive").filter(ds.field("year") == 2026)
    enrich(years, str(tmp_path / "out.parquet"), **QUERY, **in_process)
    result = read(tmp_path / "out.parquet")
    assert result.column("year").unique().to_pylist() == [2026]
    expected = read(tmp_path / "in" / "year=2026" / "b.parquet")
    assert_enriched(result.drop_columns("year"), expected, SELF, ["query"])


def test_a_source_that_is_not_a_table_or_lacks_an_output_is_refused(
    tmp_path: Path, in_process: Options
) -> None:
    wanted: Options = {**QUERY, **in_process}
    with pytest.raises(EnrichError, match=r"a LazyFrame .* pass frame\.collect\(\)"):
        enrich(pl.LazyFrame({"query": [1]}), **wanted)
    with pytest.raises(EnrichError, match="list is not a table"):
        enrich([1, 2], **wanted)
    with pytest.raises(EnrichError, match="name an output"):
        enrich(write(tmp_path, 3), **wanted)
    with pytest.raises(EnrichError, match="can neither be resumed nor computed on a cluster"):
        enrich(read(write(tmp_path, 3)), str(tmp_path / "out.parquet"), **wanted, resume=True)


@pytest.mark.parametrize(
    "name", ["nothing.parquet", "text.txt", "empty", "damaged.parquet", "damaged.arrows"]
)
def test_an_input_that_is_not_a_table_is_an_error(tmp_path: Path, in_process: Options, name: str) -> None:
    (tmp_path / "text.txt").write_text("not a table")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 not a table PAR1")
    (tmp_path / "damaged.arrows").write_bytes(b"not a table at all")
    with pytest.raises(EnrichError, match=name.partition(".")[0]):
        enrich(tmp_path / name, tmp_path / "out.parquet", **QUERY, **in_process)


@pytest.mark.parametrize(
    ("source", "output", "reason"),
    [
        ("in/a.parquet", "", "the output has no name"),
        ("in/a.parquet", "in/a.parquet", "overlaps the input"),
        ("in/a.parquet", "in", "overlaps the input"),
        ("in", "in/out", "overlaps the input"),
        ("dataset", "in", "overlaps the input"),
        ("in", "out.parquet", "the input is a folder and the output .* is a file"),
        ("in/a.parquet", "kept", "contains notes.txt, which is not a table: it is not replaced"),
        ("in/a.parquet", "out.csv", r"ends in none of \.parquet, .*; the name of a folder ends in /"),
    ],
)
def test_an_output_that_would_destroy_something_is_refused(
    tmp_path: Path, in_process: Options, source: str, output: str, reason: str
) -> None:
    write(tmp_path / "in", 3, "a.parquet")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    given = ds.dataset(tmp_path / "in") if source == "dataset" else tmp_path / source
    with pytest.raises(EnrichError, match=reason):
        enrich(given, output and str(tmp_path / output), **QUERY, **in_process, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_that_ends_in_a_slash_is_a_folder(tmp_path: Path, in_process: Options) -> None:
    source = write(tmp_path, 3)
    for _ in range(2):
        enrich(source, f"{tmp_path}/out.v2/", **QUERY, **in_process, overwrite=True)
    assert [path.name for path in (tmp_path / "out.v2").iterdir()] == ["table.parquet"]


def test_arrays_in_cells_of_pandas_are_sequences(in_process: Options) -> None:
    frame = pd.DataFrame({"query": [np.ones((2, 4)), None], "name": ["a", "b"]})
    summary = enrich(frame, **QUERY, **in_process)
    assert summary.table is not None
    first, second = summary.table.column("context_vectors").to_pylist()
    assert (len(first), second) == (2, None)
    assert isinstance(frame["query"][0], np.ndarray)


def test_categories_are_texts_and_a_column_of_nulls_gives_nulls(in_process: Options) -> None:
    wanted: Options = {"model": TEXT, "column": "text", **in_process}
    words = pa.array(["Life is", "short", "short"]).dictionary_encode()
    summary = enrich(pa.table({"text": words}), **wanted)
    assert summary.table is not None
    assert list(map(len, summary.table.column("context_vectors").to_pylist())) == [2, 1, 1]
    assert enrich(pa.table({"text": pa.nulls(2)}), **wanted).nulls == 2
