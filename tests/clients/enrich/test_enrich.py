"""Whole jobs: what comes out, in this process and through a server."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from attention_client.enrich import EnrichError, Summary

from clients.enrich import enrich
from scripts.local_server import ServerProcess
from tests.clients.enrich.tables import assert_enriched, eager_answers, read, table, write
from tests.server.samples import CROSS, SELF, TEXT, WORDS
from tests.support import eager

ROWS = 2500
QUERY: dict[str, Any] = {"model": SELF, "column": "query"}


@pytest.fixture(params=["here", "on a server"])
def where(request: pytest.FixtureRequest, artifacts: Path) -> dict[str, Any]:
    if request.param == "here":
        return {"model_repository": artifacts}
    server: ServerProcess = request.getfixturevalue("sample_server")
    return {"servers": [server.target]}


def run(source: Path, output: Path, **options: Any) -> Summary:
    return enrich(str(source), str(output), **{**QUERY, **options}, quiet=True)


def test_a_file_gets_a_column_and_keeps_all_others(tmp_path: Path, where: dict[str, Any]) -> None:
    source = write(tmp_path, ROWS)
    summary = run(source, tmp_path / "out.parquet", **where)
    result = read(tmp_path / "out.parquet")
    assert_enriched(result, read(source), SELF, ["query"])
    assert (summary.rows, summary.refused, summary.nulls, summary.rejects) == (ROWS, 0, 0, None)
    assert summary.tokens == sum(map(len, read(source).column("query").to_pylist()))
    assert (summary.model, summary.version) == (SELF, "1")
    assert summary.parity_error is not None
    assert summary.parity_error < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.parquet", "table.parquet"]
    made_by = result.schema.field("context_vectors").metadata
    assert (made_by[b"model"], made_by[b"version"]) == (SELF.encode(), b"1")


@pytest.mark.parametrize("name", ["table.arrow", "table.parquet"])
@pytest.mark.parametrize("output", ["out.arrow", "out.parquet", "out"])
def test_every_format_becomes_every_format(tmp_path: Path, artifacts: Path, name: str, output: str) -> None:
    source = write(tmp_path, 300, name, group_rows=70)
    run(source, tmp_path / output, model_repository=artifacts)
    written = tmp_path / output / name if output == "out" else tmp_path / output
    assert_enriched(read(written), read(source), SELF, ["query"])


def test_a_folder_keeps_its_files_and_their_folders(tmp_path: Path, artifacts: Path) -> None:
    names = ["year=2025/a.parquet", "year=2026/b.parquet", "year=2026/c.parquet"]
    sources = [write(tmp_path / "in", 100 * at, name, seed=at) for at, name in enumerate(names)]
    (tmp_path / "in" / "_SUCCESS").touch()
    summary = run(tmp_path / "in", tmp_path / "out", model_repository=artifacts)
    assert summary.rows == 300
    for source, name in zip(sources, names, strict=True):
        assert_enriched(read(tmp_path / "out" / name), read(source), SELF, ["query"])
    assert len(list((tmp_path / "out").rglob("*.*"))) == len(names)


def test_cross_attention_takes_key_and_value_from_columns_of_their_own(
    tmp_path: Path, where: dict[str, Any]
) -> None:
    source = write(tmp_path, 200)
    columns = {"model": CROSS, "key_column": "key", "value_column": "value"}
    run(source, tmp_path / "out.parquet", **columns, weights=True, **where)
    result = read(tmp_path / "out.parquet")
    assert_enriched(result, read(source), CROSS, ["query", "key", "value"])
    inputs = list(
        zip(*(read(source).column(name).to_pylist() for name in ("query", "key", "value")), strict=True)
    )
    served = [np.array(weights) for weights in result.column("attention_weights").to_pylist()]
    eager.assert_parity(served, [weights for _, weights in eager_answers(CROSS, inputs)])


def test_texts_are_tokenized_by_the_model(tmp_path: Path, where: dict[str, Any]) -> None:
    source = write(tmp_path, 100)
    run(source, tmp_path / "out.parquet", model=TEXT, column="text", **where)
    served = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    texts = read(source).column("text").to_pylist()
    assert [len(vectors) for vectors in served] == [len(text.split()) for text in texts]
    by_text: dict[str, Any] = {}
    for text, vectors in zip(texts, served, strict=True):
        np.testing.assert_allclose(vectors, by_text.setdefault(text, vectors), atol=1e-5)


@pytest.mark.parametrize(
    ("pool", "reduce"),
    [
        ("mean", lambda rows: rows.mean(axis=0)),
        ("cls", lambda rows: rows[0]),
        ("max", lambda rows: rows.max(axis=0)),
    ],
    ids=["mean", "cls", "max"],
)
def test_pools_make_one_vector_of_a_row(tmp_path: Path, artifacts: Path, pool: str, reduce: Any) -> None:
    source = write(tmp_path, 200)
    run(source, tmp_path / "out.parquet", pool=pool, output_column="pooled", model_repository=artifacts)
    result = read(tmp_path / "out.parquet")
    assert result.schema.field("pooled").type == pa.list_(pa.float32(), 4)
    inputs = [(cell,) for cell in read(source).column("query").to_pylist()]
    expected = [reduce(vectors) for vectors, _ in eager_answers(SELF, inputs)]
    eager.assert_parity(np.array(result.column("pooled").to_pylist()), np.array(expected))


def test_null_gives_null_and_no_vectors_give_none(tmp_path: Path, where: dict[str, Any]) -> None:
    cells = [None, [], [[1.0, 2.0, 3.0, 4.0]]]
    source = write(tmp_path, 3, query=pa.array(cells, pa.list_(pa.list_(pa.float32()))))
    summary = run(source, tmp_path / "out.parquet", **where)
    first, second, third = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    assert (first, second, len(third)) == (None, [], 1)
    assert (summary.nulls, summary.refused) == (1, 0)
    summary = run(source, tmp_path / "pooled.parquet", pool="mean", **where)
    first, second, third = read(tmp_path / "pooled.parquet").column("context_vectors").to_pylist()
    assert (first, second, len(third)) == (None, None, 4)
    assert (summary.nulls, summary.refused) == (2, 0)


def test_a_refused_row_ends_the_job_or_is_listed(tmp_path: Path, where: dict[str, Any]) -> None:
    texts = ["Life is short", "unheard words", None, "eat dessert"]
    source = write(tmp_path, 4, text=pa.array(texts))
    wanted = {"model": TEXT, "column": "text", **where}
    with pytest.raises(EnrichError, match=r"row 1 is refused: .*unheard.*--on-error skip"):
        run(source, tmp_path / "out.parquet", **wanted)
    assert not (tmp_path / "out.parquet").exists()
    summary = run(source, tmp_path / "out.parquet", **wanted, on_error="skip", resume=True)
    vectors = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    assert [None if cell is None else len(cell) for cell in vectors] == [3, None, None, 2]
    assert (summary.refused, summary.nulls) == (1, 1)
    assert summary.rejects is not None
    (line,) = Path(summary.rejects).read_text().splitlines()
    assert pd.read_json(summary.rejects, lines=True).to_dict("records")[0]["row"] == 1
    assert "unheard" in line
    assert [refusal.row for refusal in summary.refusals] == [1]


def test_a_damaged_cell_is_refused_by_itself(tmp_path: Path, artifacts: Path) -> None:
    cells: list[Any] = [[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0]], [[1.0, None, 3.0, 4.0]], [[4.0, 3.0, 2.0, 1.0]]]
    source = write(tmp_path, 4, query=pa.array(cells, pa.list_(pa.list_(pa.float32()))))
    summary = run(source, tmp_path / "out.parquet", on_error="skip", model_repository=artifacts)
    vectors = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    assert [cell is None for cell in vectors] == [False, True, True, False]
    assert summary.refused == 2


def asked(path: Path, query: str) -> list[Any]:
    with duckdb.connect() as connection:
        rows: list[Any] = connection.execute(query, [str(path)]).fetchall()
    return rows


def test_pandas_polars_and_duckdb_read_the_result(tmp_path: Path, artifacts: Path) -> None:
    source = write(tmp_path, 100)
    path = tmp_path / "out.parquet"
    run(source, path, model_repository=artifacts)
    run(source, tmp_path / "pooled.parquet", pool="mean", model_repository=artifacts)
    expected = read(path).column("context_vectors").to_pylist()
    by_pandas = [np.stack(cell).tolist() for cell in pd.read_parquet(path)["context_vectors"]]
    by_polars = pl.read_parquet(path)["context_vectors"].to_list()
    by_duckdb = [row[0] for row in asked(path, "SELECT context_vectors FROM read_parquet(?) ORDER BY id")]
    for found in (by_pandas, by_polars, by_duckdb):
        assert np.array_equal(np.concatenate(found), np.concatenate(expected))
    pooled = tmp_path / "pooled.parquet"
    squares = "list_sum(list_transform(context_vectors, lambda x: x * x))"
    norms = asked(pooled, f"SELECT sqrt({squares}) FROM read_parquet(?)")  # noqa: S608 - a constant
    by_numpy = np.linalg.norm(np.stack(pl.read_parquet(pooled)["context_vectors"].to_list()), axis=1)
    np.testing.assert_allclose([row[0] for row in norms], by_numpy, rtol=1e-5)


def test_addresses_of_fsspec_are_read_and_written(artifacts: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    made = table(50)
    with memory.open("/in/table.parquet", "wb") as file:
        pq.write_table(made, file)
    enrich("memory://in", "memory://out", model=SELF, column="query", model_repository=artifacts, quiet=True)
    with memory.open("/out/table.parquet", "rb") as file:
        assert_enriched(pq.read_table(file), made, SELF, ["query"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"column": "nobody"}, "there is no column 'nobody' for the query; there are: id, name, text, query"),
        ({"column": "name"}, r"column 'name' is dictionary<.*vectors are lists"),
        ({"output_column": "id"}, "the table has a column 'id'; name another with --output-column"),
        ({"model": "nobody"}, "nobody"),
        ({"version": "7"}, "7"),
        ({"pool": "median"}, "pool is one of none, mean, cls, max, not 'median'"),
        ({"on_error": "ignore"}, "on_error is fail or skip"),
        ({"model": CROSS}, "takes query, key, value"),
        ({"key_column": "key"}, "takes query"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_done_is_said_before_anything_is_computed(
    tmp_path: Path, where: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    source = write(tmp_path, 10)
    with pytest.raises(EnrichError, match=words):
        run(source, tmp_path / "out.parquet", **{**where, **options})
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("name", ["nothing.parquet", "text.txt", "empty", "damaged.parquet"])
def test_an_input_that_is_no_table_is_an_error(tmp_path: Path, artifacts: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("no table")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(EnrichError, match=name.partition(".")[0]):
        run(tmp_path / name, tmp_path / "out.parquet", model_repository=artifacts)


def test_words_are_the_models_vocabulary() -> None:
    """What the tests of texts rely on."""
    assert "unheard" not in WORDS


def table_of(source: Path, kind: str) -> Any:
    match kind:
        case "arrow":
            return read(source)
        case "pandas":
            return read(source).to_pandas()
        case "polars":
            return pl.read_parquet(source)
        case "duckdb":
            return duckdb.connect().sql(f"from '{source}'")
    return ds.dataset(source)


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "duckdb", "dataset"])
def test_a_table_in_memory_becomes_one_in_memory(tmp_path: Path, artifacts: Path, kind: str) -> None:
    source = write(tmp_path, 300, group_rows=100)
    table = table_of(source, kind)
    summary = enrich(table, **QUERY, model_repository=artifacts, quiet=True)
    assert (summary.output, summary.rows) == (None, 300)
    assert summary.table is not None
    enrich(str(source), str(tmp_path / "out.arrow"), **QUERY, model_repository=artifacts, quiet=True)
    expected = read(tmp_path / "out.arrow").column("context_vectors")
    assert summary.table.column("context_vectors").to_pylist() == expected.to_pylist()
    assert summary.table.column_names == [*read(source).column_names, "context_vectors"]


def test_a_filtered_data_set_becomes_a_file(tmp_path: Path, artifacts: Path) -> None:
    for at, name in enumerate(["year=2025/a.parquet", "year=2026/b.parquet"]):
        write(tmp_path / "in", 100, name, seed=at)
    years = ds.dataset(tmp_path / "in", partitioning="hive").filter(ds.field("year") == 2026)
    enrich(years, str(tmp_path / "out.parquet"), **QUERY, model_repository=artifacts, quiet=True)
    result = read(tmp_path / "out.parquet")
    assert result.column("year").unique().to_pylist() == [2026]
    expected = read(tmp_path / "in" / "year=2026" / "b.parquet")
    assert_enriched(result.drop_columns("year"), expected, SELF, ["query"])


def test_refused_rows_of_a_table_in_memory_are_listed(artifacts: Path) -> None:
    cells = pa.array([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0]]], pa.list_(pa.list_(pa.float32())))
    summary = enrich(
        pa.table({"query": cells}), **QUERY, model_repository=artifacts, on_error="skip", quiet=True
    )
    assert summary.rejects is None
    assert [(refusal.row, refusal.reason) for refusal in summary.refusals] == [(1, "INVALID_CELL")]


def test_what_is_no_table_and_what_has_no_output_is_refused(tmp_path: Path, artifacts: Path) -> None:
    wanted: dict[str, Any] = {**QUERY, "model_repository": artifacts, "quiet": True}
    with pytest.raises(EnrichError, match="list is no table"):
        enrich([1, 2], **wanted)
    with pytest.raises(EnrichError, match="name an output"):
        enrich(write(tmp_path, 3), **wanted)
    with pytest.raises(EnrichError, match="neither resumed nor spread"):
        enrich(read(write(tmp_path, 3)), str(tmp_path / "out.parquet"), **wanted, resume=True)


def test_strings_in_lists_get_a_dictionary_and_numbers_none(tmp_path: Path, artifacts: Path) -> None:
    source = write(tmp_path, 2, tags=pa.array([["a", "b"], ["a"]]), at=pa.array([{"x": 1.5, "y": "z"}] * 2))
    run(source, tmp_path / "out.parquet", model_repository=artifacts)
    group = pq.read_metadata(tmp_path / "out.parquet").row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    encoded = {column.path_in_schema: "RLE_DICTIONARY" in column.encodings for column in columns}
    assert encoded["tags.list.element"]
    assert encoded["at.y"]
    assert not encoded["at.x"]
    assert not encoded["query.list.element.list.element"]
    assert not encoded["context_vectors.list.element.list.element"]


@pytest.mark.parametrize(
    ("source", "output", "reason"),
    [
        ("in/a.parquet", "", "the output has no name"),
        ("in/a.parquet", "in/a.parquet", "does not lie apart from the input"),
        ("in/a.parquet", "in", "does not lie apart from the input"),
        ("in", "in/out", "does not lie apart from the input"),
        ("in/a.parquet", "kept", "holds notes.txt, which is no table: it is not replaced"),
        ("in/a.parquet", "out.csv", "neither .parquet nor .arrow; the name of a folder ends in /"),
    ],
)
def test_an_output_that_would_cost_something_else_is_refused(
    tmp_path: Path, artifacts: Path, source: str, output: str, reason: str
) -> None:
    write(tmp_path / "in", 3, "a.parquet")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(EnrichError, match=reason):
        enrich(
            tmp_path / source, output and str(tmp_path / output), **QUERY, model_repository=artifacts,
            overwrite=True,
        )  # fmt: skip
    assert sorted(tmp_path.rglob("*")) == before


def test_the_files_of_a_data_set_are_not_overwritten(tmp_path: Path, artifacts: Path) -> None:
    write(tmp_path / "in", 3, "a.parquet")
    with pytest.raises(EnrichError, match="does not lie apart from the input"):
        enrich(
            ds.dataset(tmp_path / "in"), tmp_path / "in", **QUERY, model_repository=artifacts, overwrite=True
        )


def test_a_folder_may_have_any_name_that_ends_in_a_slash(tmp_path: Path, artifacts: Path) -> None:
    source = write(tmp_path, 3)
    for _ in range(2):
        enrich(source, f"{tmp_path}/out.v2/", **QUERY, model_repository=artifacts, overwrite=True)
    assert [path.name for path in (tmp_path / "out.v2").iterdir()] == ["table.parquet"]


def test_a_job_that_did_nothing_leaves_nothing(tmp_path: Path, artifacts: Path) -> None:
    source, output = write(tmp_path, 3), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {"model_repository": artifacts, "quiet": True}
    with pytest.raises(EnrichError, match="column 'name' is dictionary"):
        enrich(source, output, model=SELF, column="name", **wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]
    enrich(source, output, **QUERY, **wanted)
    assert read(output).num_rows == 3


def test_progress_of_no_rows(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = enrich(table(0), **QUERY, model_repository=artifacts)
    assert summary.rows == 0
    assert "0 of 0 rows" in capsys.readouterr().err


def test_arrays_in_cells_of_pandas_are_sequences(artifacts: Path) -> None:
    frame = pd.DataFrame({"query": [np.ones((2, 4)), None], "name": ["a", "b"]})
    summary = enrich(frame, **QUERY, model_repository=artifacts, quiet=True)
    assert summary.table is not None
    first, second = summary.table.column("context_vectors").to_pylist()
    assert (len(first), second) == (2, None)
    assert isinstance(frame["query"][0], np.ndarray)


def test_categories_are_texts_and_nothing_is_null(artifacts: Path) -> None:
    wanted: dict[str, Any] = {"model": TEXT, "column": "text", "model_repository": artifacts, "quiet": True}
    words = pa.array(["Life is", "short", "short"]).dictionary_encode()
    summary = enrich(pa.table({"text": words}), **wanted)
    assert summary.table is not None
    assert list(map(len, summary.table.column("context_vectors").to_pylist())) == [2, 1, 1]
    assert enrich(pa.table({"text": pa.nulls(2)}), **wanted).nulls == 2
