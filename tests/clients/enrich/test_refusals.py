"""Jobs that cannot be done, rows that are refused, and outputs that must not be lost."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from attention_client.enrich import EnrichError, plan

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import QUERY, Options, read, run, table, vectors_of, write
from tests.server.samples import CROSS, TEXT

TABLE = "table.parquet"
GOOD, NARROW = [[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"column": "missing"}, "no column 'missing' for the query; the columns are id, name, text, query"),
        ({"column": "name"}, r"column 'name' is dictionary<.*vectors are lists"),
        ({"model": "missing"}, "missing"),
        ({"model": CROSS}, "takes query, key, value; columns are given for query"),
        ({"column": None}, "exactly one of column, text_column and template is required; given: none"),
        ({"text_column": "text"}, "is required; given: column and text_column"),
        ({"column": None, "text_column": "text"}, "column 'text' is .*string.*; vectors are lists of"),
        ({"passage_tokens": 9, "tokenizer": "x"}, "tokenizer needs servers"),
        ({"token": "secret"}, "credentials and token need servers"),
        ({"prompt": "query"}, "prompt needs a text encoder, which model 'tiny-self' is not"),
        ({"context": "absent.npy"}, "absent.npy cannot be used: .*No such file"),
        ({"context": "narrow.npy"}, r"its shape is \(3, 2\); the model takes \(rows, 4\)"),
        ({"context": "empty.npy"}, "empty.npy has no rows"),
        ({"context": "narrow.npy", "model": TEXT}, "takes no vectors, and has no context"),
        ({"context": TABLE}, "name one of its columns id, name, text, query, .* with --key-column"),
        ({"context": TABLE, "key_column": "null"}, "column 'null', row 0: it is null"),
        ({"context": TABLE, "key_column": "key"}, "column 'key', row 0: its vectors have 6 numbers"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_job_that_cannot_be_done_is_refused_before_anything_is_computed(
    tmp_path: Path, in_process: Options, options: Options, words: str
) -> None:
    source = write(tmp_path, 3, TABLE, null=vectors_of(None, GOOD, GOOD))
    np.save(tmp_path / "narrow.npy", np.ones((3, 2)))
    np.save(tmp_path / "empty.npy", np.ones((0, 4)))
    context = {"context": tmp_path / options["context"]} if "context" in options else {}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(EnrichError, match=words):
        run(source, tmp_path / "out.parquet", **{**in_process, **options, **context})
    assert sorted(tmp_path.iterdir()) == before


def test_a_finished_job_with_another_memory_is_another_job(tmp_path: Path, in_process: Options) -> None:
    source, context = write(tmp_path, 3), tmp_path / "memory.npy"
    given: Options = {**in_process, "context": context, "resume": True}
    np.save(context, np.ones((20, 4)))
    for complete in (False, True):
        assert run(source, tmp_path / "out.parquet", **given).already_complete is complete
    np.save(context, np.zeros((20, 4)))
    with pytest.raises(EnrichError, match="is not the result of this job"):
        run(source, tmp_path / "out.parquet", **given)


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


@pytest.mark.parametrize("name", ["nothing.parquet", "text.txt", "empty", "damaged.parquet", "names.parquet"])
def test_an_input_that_is_not_a_table_is_an_error(tmp_path: Path, in_process: Options, name: str) -> None:
    for each in ("text.txt", "damaged.parquet"):
        (tmp_path / each).write_bytes(b"PAR1 not a table PAR1")
    (tmp_path / "empty").mkdir()
    names = write(tmp_path, 1, "names.parquet", column_x=[1])
    names.write_bytes(names.read_bytes().replace(b"column_x", b"column_\xff"))
    with pytest.raises(EnrichError, match=name.partition(".")[0]):
        enrich(tmp_path / name, tmp_path / "out.parquet", **QUERY, **in_process)


@pytest.mark.parametrize(
    ("log", "package"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake table, .* deltalake"),
        ("metadata/00000-7d1.gz.metadata.json", "Apache Iceberg table, .* pyiceberg"),
        (".hoodie/hoodie.properties", "Apache Hudi table, .* hudi"),
    ],
)
def test_a_table_whose_log_states_its_rows_is_refused(
    tmp_path: Path, in_process: Options, log: str, package: str
) -> None:
    plain, part = write(tmp_path / "plain", 3), write(tmp_path / "lake/orders/day=1", 3)
    orders = tmp_path / "lake/orders"
    (orders / log).parent.mkdir()
    (orders / log).touch()
    for source in (orders.parent, orders, part.parent, part):
        with pytest.raises(EnrichError, match=f"log of a {package}"):
            enrich(source, tmp_path / "out/", **QUERY, **in_process)
    for output in ("orders", "orders/day=2", "orders/day=1/out.parquet"):
        with pytest.raises(EnrichError, match=r"log of a .*: choose another output"):
            enrich(plain, orders.parent / output, **QUERY, **in_process, overwrite=True)
    with pytest.raises(EnrichError, match=r"the context .* cannot be used: .* log of a"):
        enrich(plain, tmp_path / "out.parquet", **QUERY, **in_process, context=part, key_column="query")
    assert enrich(plain, orders.parent / "plain.parquet", **QUERY, **in_process).rows == 3


@pytest.mark.parametrize(
    ("source", "output", "reason"),
    [
        ("in/a.parquet", "", "the output has no name"),
        ("in/a.parquet", "in/a.parquet", "overlaps the input"),
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


@pytest.mark.parametrize(
    ("suffix", "place"),
    [
        (".parquet", "row group 1, column 'id' cannot be read from row 1,000 on"),
        (".arrow", "column 'id' cannot be read from row 1,000 on"),
        (".arrows", "column 'id' cannot be read from row 1,000 on"),
    ],
)
def test_damaged_bytes_end_the_job_with_the_place_and_the_column(
    tmp_path: Path, in_process: Options, suffix: str, place: str
) -> None:
    source, content = tmp_path / f"table{suffix}", table(2000).select(["id", "query"])
    if suffix == ".parquet":
        pq.write_table(content, source, row_group_size=1000, compression="zstd", use_dictionary=False)
    else:
        create = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
        with create(source, content.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(content, max_chunksize=1000)
    # Of the frames of compressed bytes, which begin so, the first of the second thousand rows.
    data = bytearray(source.read_bytes())
    frames = [match.start() for match in re.finditer(re.escape(b"\x28\xb5\x2f\xfd"), data)]
    data[frames[len(frames) // 2]] = 0
    source.write_bytes(data)
    with pytest.raises(EnrichError, match=re.escape(f"{source}, {place}: ")):
        run(source, tmp_path / "out.parquet", **in_process)


def test_names_of_files_that_are_not_utf8_are_refused(tmp_path: Path, in_process: Options) -> None:
    source = write(tmp_path / "in", 3)
    name = os.fsdecode(b"\xff.parquet")
    for given, output in ((tmp_path / "in" / name, "out.parquet"), (source, name), (tmp_path / "in", "out")):
        if output == "out":
            (tmp_path / "in" / name).touch()
        with pytest.raises(EnrichError, match=r"xff.parquet' is not UTF-8, which .* must be: rename it"):
            run(given, tmp_path / output, **in_process)


@pytest.mark.parametrize(
    ("column", "output", "words"),
    [
        (
            pa.RunEndEncodedArray.from_arrays([3], ["a"]),
            "out.parquet",
            "column 'x' is run_end_encoded.*, which the output out.parquet cannot hold",
        ),
        (
            pa.DictionaryArray.from_arrays([0, 0, 0], pa.array(["a"]).dictionary_encode()),
            "out.arrow",
            "column 'x' is dictionary.*, which the output out.arrow cannot hold",
        ),
        (
            pa.chunked_array(
                pa.DictionaryArray.from_arrays(
                    pa.array([0], pa.int8()), [f"{first}{row}" for row in range(99)]
                )
                for first in "abc"
            ),
            "out.arrow",
            "column 'x' has dictionaries that one Arrow IPC file cannot hold: .* a larger index type",
        ),
    ],
    ids=["a type", "a type that Arrow cannot read again", "too many categories"],
)
def test_a_column_that_the_output_cannot_hold_is_refused_before_anything_is_computed(
    tmp_path: Path, in_process: Options, column: Any, output: str, words: str
) -> None:
    with pytest.raises(EnrichError, match=words):
        enrich(table(3, x=column), tmp_path / output, **QUERY, **in_process)
    assert not list(tmp_path.iterdir())


def test_a_refused_row_ends_the_job_or_is_listed(tmp_path: Path, backend_options: Options) -> None:
    source = write(tmp_path, 4, text=["Life is short", "unheard", None, "of"])
    output = tmp_path / "out.parquet"
    wanted = {"model": TEXT, "column": "text", **backend_options}
    with pytest.raises(EnrichError, match=r"row 1 is refused: .*unheard.*--on-error skip"):
        run(source, output, **wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]
    summary = run(source, output, **wanted, on_error="skip", resume=True)
    vectors = read(output).column("context_vectors")
    assert vectors.is_null().to_pylist() == [False, True, True, True]
    assert (summary.refused, summary.nulls) == (2, 1)
    lines = [json.loads(line) for line in Path(summary.rejects or "").read_text().splitlines()]
    assert [(line["file"], line["row"]) for line in lines] == [(str(source), 1), (str(source), 3)]
    assert "unheard" in lines[0]["message"]
    assert [refusal.row for refusal in summary.refusals] == [1, 3]


def test_too_many_refused_rows_end_the_job_and_lose_nothing(
    tmp_path: Path, in_process: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", 2)
    source = write(tmp_path, 6, query=vectors_of(GOOD, NARROW, GOOD, NARROW, GOOD, GOOD))
    output, wanted = tmp_path / "out.parquet", {"on_error": "skip", **in_process}
    for resume in (False, True):
        with pytest.raises(EnrichError, match=r"2 rows were refused, more than max_errors=1; .* row 3"):
            run(source, output, **wanted, max_errors=1, resume=resume)
    with pytest.raises(EnrichError, match="2 rows were refused and skipped by an earlier run"):
        run(source, output, **in_process, resume=True)
    assert not output.exists()
    summary = run(source, output, **wanted, max_errors=2, resume=True)
    assert (summary.rows, summary.refused, summary.resumed_rows) == (6, 2, 6)
