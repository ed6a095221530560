"""Results of whole jobs, in this process and on a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import (
    QUERY,
    Options,
    assert_enriched,
    eager_answers,
    eager_vectors,
    read,
    run,
    table,
    vectors_of,
    write,
)
from tests.server.samples import CROSS, SELF, TEXT, WIDTHS
from tests.support import eager

INT32 = pa.int32()


def cells_of(result: pa.Table | None, name: str = "context_vectors") -> list[Any]:
    assert result is not None
    return list(result.column(name).to_pylist())


def test_a_file_gains_a_column_and_keeps_the_others(tmp_path: Path, backend_options: Options) -> None:
    source = write(tmp_path, 2500)
    summary = run(source, tmp_path / "out.parquet", **backend_options)
    result = read(tmp_path / "out.parquet")
    assert_enriched(result, read(source))
    assert (summary.rows, summary.refused, summary.nulls, summary.rejects) == (2500, 0, 0, None)
    assert summary.tokens == sum(map(len, cells_of(read(source), "query")))
    assert summary.tokens_per_second == pytest.approx(summary.tokens / summary.seconds)
    assert (summary.model, summary.version, summary.already_complete) == (SELF, "1", False)
    assert (summary.parity_error or 1) < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "table.parquet"]
    made_by = result.schema.field("context_vectors").metadata
    assert (made_by[b"model"], made_by[b"version"]) == (SELF.encode(), b"1")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("table.arrow", "out.arrows"),
        ("table.arrows", "out.parquet"),
        ("table.parquet", "out.v2/"),
        pytest.param("stream.arrow", "out.arrow", id="of Hugging Face datasets"),
    ],
)
def test_every_format_is_read_and_written_and_a_name_that_ends_in_a_slash_is_a_folder(
    tmp_path: Path, in_process: Options, name: str, output: str
) -> None:
    source = write(tmp_path, 300, name.replace("stream.arrow", "stream.arrows"), group_rows=70)
    source = source.rename(tmp_path / name)
    for _ in range(2):
        enrich(source, f"{tmp_path}/{output}", **QUERY, **in_process, overwrite=True)
    written = tmp_path / output / name if output.endswith("/") else tmp_path / output
    expected = pa.ipc.open_stream(source).read_all() if name == "stream.arrow" else read(source)
    assert_enriched(read(written), expected)


def dictionary(*categories: str, index: pa.DataType = INT32) -> pa.DictionaryArray:
    """One row for each category."""
    return pa.DictionaryArray.from_arrays(pa.array(range(len(categories)), index), list(categories))


@pytest.mark.parametrize(
    "nest",
    [
        lambda column: column,
        lambda column: pa.StructArray.from_arrays([column], ["inner"]),
        lambda column: pa.ListArray.from_arrays([0, 1, 2], column),
    ],
    ids=["flat", "in a struct", "in a list"],
)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".arrows"])
def test_categories_may_differ_between_the_batches_of_a_table(
    tmp_path: Path, in_process: Options, suffix: str, nest: Callable[[pa.Array], pa.Array]
) -> None:
    queries = table(2).column("query").combine_chunks()
    batches = [
        pa.record_batch([nest(dictionary(*names)), queries], ["name", "query"]) for names in ("ab", "cb")
    ]
    source = tmp_path / "source.arrows"
    with pa.ipc.new_stream(source, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    output = tmp_path / f"out{suffix}"
    run(source, output, **in_process)
    for result in (read(output), enrich(pa.Table.from_batches(batches), **QUERY, **in_process).table):
        assert cells_of(result, "name") == cells_of(pa.Table.from_batches(batches), "name")
        assert result is not None
        assert result.schema.field("name").equals(batches[0].schema.field("name"))
    if suffix == ".arrow":  # its dictionaries need no extension of the format
        assert pl.read_ipc(output)["name"].len() == 4


def test_categories_of_polars_are_texts_and_stay(tmp_path: Path, in_process: Options) -> None:
    words = ["Life", "is", "short", None]
    for kind in (pl.Categorical, pl.Enum(["Life", "is", "short"])):
        frame = pl.DataFrame({"text": words, "kind": words}, schema={"text": kind, "kind": kind})
        for carried in (frame, pa.table(frame).select(["text"])):  # as Arrow and as Polars convert it
            summary = enrich(carried, model=TEXT, column="text", **in_process)
            assert cells_of(summary.table, "text") == words
            assert (summary.nulls, summary.refused) == (1, 0)
        enrich(frame, tmp_path / "out.parquet", model=TEXT, column="text", overwrite=True, **in_process)
        assert cells_of(read(tmp_path / "out.parquet"), "kind") == words


def test_a_folder_keeps_its_files_and_subfolders(tmp_path: Path, in_process: Options) -> None:
    names = ["year=2025/a.parquet", "year=2026/b.parquet", "year=2026/c.parquet"]
    sources = [write(tmp_path / "in", 100 * seed, name, seed=seed) for seed, name in enumerate(names)]
    (tmp_path / "in" / "_SUCCESS").touch()
    summary = run(tmp_path / "in", tmp_path / "out", **in_process)
    assert summary.rows == 300
    for source, name in zip(sources, names, strict=True):
        assert_enriched(read(tmp_path / "out" / name), read(source))
    assert len(list((tmp_path / "out").rglob("*.*"))) == len(names)
    years = ds.dataset(tmp_path / "in", partitioning="hive").filter(ds.field("year") == 2025)
    filtered = enrich(years, **QUERY, **in_process).table
    assert filtered is not None
    assert filtered.num_rows == 0


@pytest.mark.parametrize("has_context", [False, True], ids=["of the row", "of a table"])
def test_cross_attention_reads_key_and_value_of_the_row_or_of_a_table(
    tmp_path: Path, backend_options: Options, *, has_context: bool
) -> None:
    source, context = write(tmp_path, 200), write(tmp_path, 5, "memory.parquet")
    columns: Options = {"model": CROSS, "key_column": "key", "value_column": "value"}
    columns |= {"context": context} if has_context else {}
    run(source, tmp_path / "out.parquet", **columns, weights=True, **backend_options)
    result = read(tmp_path / "out.parquet")
    rows = list(zip(*(cells_of(read(source), name) for name in WIDTHS), strict=True))
    if has_context:
        memory = [np.concatenate([*map(np.array, cells_of(read(context), name))]) for name in WIDTHS]
        rows = [(query, *memory[1:]) for query, *_ in rows]
    vectors, weights = zip(*eager_answers(CROSS, rows), strict=True)
    eager.assert_parity(cells_of(result), vectors)
    eager.assert_parity([np.array(each) for each in cells_of(result, "attention_weights")], weights)


def test_every_row_attends_to_the_memory_of_an_array(tmp_path: Path, backend_options: Options) -> None:
    rows = np.random.default_rng(3).standard_normal((9, 4), np.float32)
    np.save(tmp_path / "memory.npy", rows)
    counts = (1, 5, 9, 2)
    source = pa.table({"query": vectors_of(*(rows[-count:].tolist() for count in counts))})
    result = enrich(source, **QUERY, context=tmp_path / "memory.npy", **backend_options).table
    ((expected, _),) = eager_answers(SELF, [(rows,)])
    eager.assert_parity(cells_of(result), [expected[-count:] for count in counts])


def test_pooling_stores_one_vector_per_row(in_process: Options) -> None:
    source = table(200)
    answers = eager_vectors(source)
    for pool, expected in (
        ("mean", [vectors.mean(axis=0) for vectors in answers]),
        ("cls", [vectors[0] for vectors in answers]),
        ("max", [vectors.max(axis=0) for vectors in answers]),
    ):
        result = enrich(source, **QUERY, pool=pool, output_column="pooled", **in_process).table
        assert result is not None
        assert result.schema.field("pooled").type == pa.list_(pa.float32(), 4)
        eager.assert_parity(np.array(cells_of(result, "pooled")), np.array(expected))


def test_a_null_gives_null_and_an_empty_query_gives_no_vectors(backend_options: Options) -> None:
    source = pa.table({"query": vectors_of(None, [], [[1.0, 2.0, 3.0, 4.0]])})
    for pool, sizes, nulls in (("none", [None, 0, 1], 1), ("mean", [None, None, 4], 2)):
        summary = enrich(source, **QUERY, pool=pool, **backend_options)
        assert [cell if cell is None else len(cell) for cell in cells_of(summary.table)] == sizes
        assert (summary.nulls, summary.refused) == (nulls, 0)


def test_urls_of_fsspec_are_read_and_written(in_process: Options) -> None:
    memory, made = fsspec.filesystem("memory"), table(50)
    with memory.open("/in/table.parquet", "wb") as file:
        pq.write_table(made, file)
    enrich("memory://in", "memory://out", **QUERY, **in_process)
    with memory.open("/out/table.parquet", "rb") as file:
        assert_enriched(pq.read_table(file), made)


def test_a_table_in_memory_is_returned_in_memory(tmp_path: Path, in_process: Options) -> None:
    source = write(tmp_path, 300, group_rows=100)
    answers = eager_vectors(read(source))
    for given in (
        read(source),
        read(source).to_pandas(),
        pl.read_parquet(source),
        duckdb.connect().sql(f"from '{source}'"),
        ds.dataset(source),
    ):
        summary = enrich(given, **QUERY, **in_process)
        assert (summary.output, summary.rows) == (None, 300), type(given)
        assert summary.table is not None
        assert summary.table.column_names == [*read(source).column_names, "context_vectors"]
        eager.assert_parity(cells_of(summary.table), answers)
    frame = pd.DataFrame({"query": [np.ones((2, 4)), None], "name": ["a", "b"]})
    first, second = cells_of(enrich(frame, **QUERY, **in_process).table)
    assert (len(first), second) == (2, None)
    assert isinstance(frame["query"][0], np.ndarray)  # the frame of the caller is unchanged
