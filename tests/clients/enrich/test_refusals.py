"""Jobs that cannot be done, and rows that the model refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from attention_client.enrich import EnrichError, Summary, plan

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import read, vectors_of, write
from tests.server.samples import CROSS, SELF, TEXT

QUERY: dict[str, Any] = {"model": SELF, "column": "query"}
Options = dict[str, Any]
GOOD, NARROW = [[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0]]


def run(source: Path, output: Path, **options: Any) -> Summary:
    return enrich(str(source), str(output), **{**QUERY, **options})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"column": "missing"},
            "no column 'missing' for the query; the columns are id, name, text, query",
        ),
        ({"column": "name"}, r"column 'name' is dictionary<.*vectors are lists"),
        (
            {"output_column": "id"},
            "already has a column 'id'; choose another name with --output-column",
        ),
        ({"model": "missing"}, "missing"),
        ({"version": 7}, "7"),
        ({"pool": "median"}, "pool is 'median'; it must be one of none, mean, cls, max"),
        ({"on_error": "ignore"}, "on_error is 'ignore'; it must be one of fail, skip"),
        ({"max_errors": 1}, "max_errors needs on_error='skip'"),
        ({"max_errors": -1, "on_error": "skip"}, "max_errors is -1; it must be 0 or more"),
        ({"model": CROSS}, "takes query, key, value; columns are given for query"),
        ({"key_column": "key"}, "takes query; columns are given for query, key"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_job_that_cannot_be_done_is_refused_before_anything_is_computed(
    tmp_path: Path, in_process: Options, options: Options, words: str
) -> None:
    source = write(tmp_path, 10)
    with pytest.raises(EnrichError, match=words):
        run(source, tmp_path / "out.parquet", **{**in_process, **options})
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]


WIDE = {
    "lists": (vectors_of([[1.0, 2.0]] * 3, None, NARROW), "holds vectors of 2 numbers.* takes vectors of 4"),
    "fixed lists": (
        pa.array([NARROW], pa.list_(pa.list_(pa.float32(), 2))),
        "holds vectors of 2 numbers; the model takes vectors of 4",
    ),
    "flat lists": (
        pa.array([[1.0] * 5, [], None, [1.0] * 3]),
        "holds lists of 3, 5 numbers.* multiples of 4",
    ),
    "fixed flat lists": (pa.array([[1.0] * 6], pa.list_(pa.float32(), 6)), "holds lists of 6 numbers"),
    "tensors": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((1, 4, 2), np.float32)),
        r"holds tensors of shape \[4, 2\]; the model takes vectors of 4",
    ),
}


@pytest.mark.parametrize(("cells", "words"), WIDE.values(), ids=WIDE)
def test_a_table_whose_width_cannot_fit_is_refused_at_once(
    tmp_path: Path, in_process: Options, cells: pa.Array, words: str
) -> None:
    with pytest.raises(EnrichError, match=f"column 'query' {words}"):
        enrich(pa.table({"query": cells}), tmp_path / "out.parquet", **QUERY, **in_process, on_error="skip")
    assert not list(tmp_path.iterdir())


def test_a_refused_row_ends_the_job_or_is_listed(tmp_path: Path, backend_options: Options) -> None:
    texts = ["Life is short", "unheard words", None, "eat dessert"]
    source = write(tmp_path, 4, text=pa.array(texts))
    wanted = {"model": TEXT, "column": "text", **backend_options}
    with pytest.raises(EnrichError, match=r"row 1 is refused: .*unheard.*--on-error skip"):
        run(source, tmp_path / "out.parquet", **wanted)
    assert not (tmp_path / "out.parquet").exists()
    summary = run(source, tmp_path / "out.parquet", **wanted, on_error="skip", resume=True)
    vectors = read(tmp_path / "out.parquet").column("context_vectors").to_pylist()
    assert [None if cell is None else len(cell) for cell in vectors] == [3, None, None, 2]
    assert (summary.refused, summary.nulls) == (1, 1)
    assert summary.rejects is not None
    (line,) = map(json.loads, Path(summary.rejects).read_text().splitlines())
    assert (line["file"], line["row"]) == (str(source), 1)
    assert "unheard" in line["message"]
    assert [refusal.row for refusal in summary.refusals] == [1]


def test_a_damaged_cell_affects_no_other_cell(in_process: Options) -> None:
    cells = pa.table({"query": vectors_of(GOOD, NARROW, [[1.0, None, 3.0, 4.0]], GOOD)})
    summary = enrich(cells, **QUERY, **in_process, on_error="skip")
    assert summary.table is not None
    assert summary.table.column("context_vectors").is_null().to_pylist() == [False, True, True, False]
    assert summary.rejects is None
    assert [(refusal.row, refusal.reason) for refusal in summary.refusals] == [
        (1, "INVALID_CELL"),
        (2, "INVALID_CELL"),
    ]


def test_a_job_whose_rows_are_all_refused_has_no_result(tmp_path: Path, in_process: Options) -> None:
    source, output = write(tmp_path, 3, text=pa.array(["unheard", None, "of"])), tmp_path / "out.parquet"
    wanted = {"model": TEXT, "column": "text", "on_error": "skip", **in_process}
    with pytest.raises(EnrichError, match="nothing was computed: 2 rows were refused; the first is row 0: "):
        run(source, output, **wanted)
    rejects = output.with_name("out.parquet.rejects.jsonl")
    assert sorted(tmp_path.iterdir()) == [rejects, source]
    assert [json.loads(line)["row"] for line in rejects.read_text().splitlines()] == [0, 2]
    nulls = write(tmp_path, 2, "nulls.parquet", text=pa.array([None, None], pa.string()))
    assert run(nulls, output, **wanted).nulls == 2


def test_too_many_refused_rows_end_the_job_and_lose_nothing(
    tmp_path: Path, in_process: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", 2)
    source = write(tmp_path, 6, query=vectors_of(GOOD, GOOD, NARROW, GOOD, NARROW, GOOD))
    output = tmp_path / "out.parquet"
    wanted = {"on_error": "skip", **in_process}
    with pytest.raises(EnrichError, match=r"1 row was refused, more than max_errors=0; the last is row 2: "):
        run(source, output, **wanted, max_errors=0)
    with pytest.raises(EnrichError, match="1 row was refused, more than max_errors=0"):
        run(source, output, **wanted, max_errors=0, resume=True)
    assert not output.exists()
    summary = run(source, output, **wanted, max_errors=2, resume=True)
    assert (summary.rows, summary.refused, summary.resumed_rows) == (6, 2, 4)


def test_a_job_that_computed_nothing_leaves_nothing(tmp_path: Path, in_process: Options) -> None:
    source, output = write(tmp_path, 3, text=pa.array(["unheard"] * 3)), tmp_path / "out.parquet"
    with pytest.raises(EnrichError, match="row 0 is refused"):
        enrich(source, output, model=TEXT, column="text", **in_process)
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]
    enrich(source, output, **QUERY, **in_process)
    assert read(output).num_rows == 3
