"""Tables of random sequences, and what eager PyTorch makes of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tests.server.samples import WIDTHS, WORDS, eager_module
from tests.support import eager

Array = NDArray[Any]
METADATA = {b"owner": b"tests"}
LONGEST = 12


def sequences(rows: int, width: int, seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, width), np.float32) for length in rng.integers(1, LONGEST, rows)]


def table(rows: int, *, seed: int = 0, **columns: Sequence[Any]) -> pa.Table:
    """A table of some ordinary columns beside one of sequences for each input, and of texts."""
    rng = np.random.default_rng(seed)
    vectors = pa.list_(pa.list_(pa.float32()))
    made: dict[str, Any] = {
        "id": pa.array(range(rows), pa.int64()),
        "name": pa.array([f"row {row}" for row in range(rows)], pa.string()).dictionary_encode(),
        "text": pa.array([" ".join(rng.choice(WORDS, rng.integers(1, 5))) for _ in range(rows)], pa.string()),
    }
    for number, (name, width) in enumerate(WIDTHS.items()):
        # The value has as many rows as the key.
        own = sequences(rows, width, seed + (1 if name == "value" else number))
        made[name] = pa.array([one.tolist() for one in own], vectors)
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
        with pa.ipc.new_file(path, made.schema) as writer:
            writer.write_table(made, max_chunksize=group_rows)
    return path


def read(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


def eager_answers(model: str, rows: Sequence[Sequence[Any]]) -> list[tuple[Array, Array]]:
    """Context vectors and weights of each row's inputs."""
    module = eager_module(model)
    return [eager.attend(module, *(np.asarray(cell, np.float32) for cell in row)) for row in rows]


def assert_enriched(result: pa.Table, source: pa.Table, model: str, columns: Sequence[str]) -> None:
    """Every column of the source is as it was, and every row has what eager PyTorch answers."""
    assert result.select(source.column_names).equals(source.select(source.column_names))
    assert result.schema.metadata == source.schema.metadata
    inputs = list(zip(*(source.column(name).to_pylist() for name in columns), strict=True))
    expected = [vectors for vectors, _ in eager_answers(model, inputs)]
    eager.assert_parity(result.column("context_vectors").to_pylist(), expected)
