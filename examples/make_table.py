"""Writes a table of random embeddings, for the examples that enrich tables.

    python -m examples.make_table embeddings.parquet --rows 1000 --width 768

Each row holds one sequence of 1 to 32 vectors, as a flat list of numbers. The same arguments give the same
table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LONGEST = 32


def make_table(rows: int, width: int, seed: int = 0) -> pa.Table:
    """A column `id`, and a column `embeddings` of sequences (T, width) with T from 1 to 32."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(1, LONGEST + 1, rows)) * width
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    numbers = rng.standard_normal(int(offsets[-1]), np.float32)
    embeddings = pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers))
    return pa.table({"id": pa.array(range(rows), pa.int64()), "embeddings": embeddings})


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a table of random embeddings.")
    parser.add_argument("path", type=Path, help="the Parquet file to write")
    parser.add_argument("--rows", type=int, default=1000, help="number of rows (default: 1000)")
    parser.add_argument("--width", type=int, default=768, help="elements of a vector (default: 768)")
    given = parser.parse_args(arguments)
    if given.rows < 0 or given.width < 1:
        parser.error("--rows must be 0 or more, and --width 1 or more")
    table = make_table(given.rows, given.width)
    pq.write_table(table, given.path)
    print(f"{given.path}: {table.num_rows} rows, vectors of width {given.width}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
