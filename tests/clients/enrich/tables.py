"""Tables of random sequences, and their context vectors by eager PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attention_client.enrich import Summary
from numpy.typing import NDArray

from attention_serving.enrich import enrich
from tests.server.samples import SELF, WIDTHS, WORDS, eager_module
from tests.support import eager

Array = NDArray[Any]
# Keyword arguments of `enrich`.
Options = dict[str, Any]
QUERY: Options = {"model": SELF, "column": "query"}
METADATA = {b"owner": b"tests"}
LONGEST = 12


def vector_column(rows: int, width: int, seed: int) -> pa.Array:
    """Random sequences of 1 to LONGEST - 1 vectors; the same seed gives the same lengths for any width."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, LONGEST, rows), dtype=np.int32)
    total = int(ends[-1]) if rows else 0
    numbers = pa.array(rng.standard_normal(total * width, np.float32))
    vectors = pa.ListArray.from_arrays(np.arange(total + 1, dtype=np.int32) * width, numbers)
    return pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), vectors)


def table(rows: int, *, seed: int = 0, **columns: Any) -> pa.Table:
    """A table of ordinary columns, one column of sequences for each input, and texts."""
    rng = np.random.default_rng(seed)
    words = rng.choice(WORDS, (rows, LONGEST))
    counts = rng.integers(1, 5, rows)
    made: dict[str, Any] = {
        "id": pa.array(range(rows), pa.int64()),
        "name": pa.array([f"row {row}" for row in range(rows)], pa.string()).dictionary_encode(),
        "text": pa.array(
            [" ".join(row[:count]) for row, count in zip(words, counts, strict=True)], pa.string()
        ),
    }
    for name, width in WIDTHS.items():
        # The value has as many rows as the key.
        made[name] = vector_column(rows, width, seed + (name != "query"))
    made.update(columns)
    return pa.table(made).replace_schema_metadata(METADATA)


def write(
    folder: Path, rows: int, name: str = "table.parquet", *, group_rows: int = 1000, **columns: Any
) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    made = table(rows, **columns)
    if path.suffix == ".parquet":
        pq.write_table(made, path, row_group_size=group_rows)
    else:
        create = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
        with create(path, made.schema) as writer:
            writer.write_table(made, max_chunksize=group_rows)
    return path


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    opened = pa.ipc.open_stream if path.suffix == ".arrows" else pa.ipc.open_file
    return opened(path).read_all()


def vectors_of(*cells: Any) -> pa.Array:
    """A column of lists of vectors, whatever the vectors' widths are."""
    return pa.array(cells, pa.list_(pa.list_(pa.float32())))


def eager_answers(model: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Array, Array]]:
    """Context vectors and weights of each row's inputs."""
    module = eager_module(model)
    return [eager.attend(module, *(np.asarray(cell, np.float32) for cell in row)) for row in rows]


def eager_vectors(source: pa.Table) -> list[Array]:
    """Context vectors of each query of a table."""
    queries = source.column("query").to_pylist()
    return [vectors for vectors, _ in eager_answers(SELF, [(query,) for query in queries])]


def assert_enriched(result: pa.Table, source: pa.Table) -> None:
    """The columns of the source are unchanged, and every query has the context vectors of eager PyTorch."""
    assert result.select(source.column_names).equals(source.select(source.column_names))
    assert result.schema.metadata == source.schema.metadata
    eager.assert_parity(result.column("context_vectors").to_pylist(), eager_vectors(source))


def run(source: Path, output: Path, **options: Any) -> Summary:
    """A job of the model and column of QUERY, unless the options name others."""
    return enrich(str(source), str(output), **{**QUERY, **options})
