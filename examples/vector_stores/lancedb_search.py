"""Searches passages in a Parquet file with LanceDB.

The file has a row for each passage, as docs/enrich.md describes.

```sh
pip install lancedb
python examples/vector_stores/lancedb_search.py passages.parquet database 127.0.0.1:8001 text-encoder "food"
```
"""

import sys

import lancedb
import numpy as np
import pyarrow.parquet as pq
from attention_client import AttentionClient
from numpy.typing import NDArray


def store(path: str, database: str) -> None:
    """Copies the passages into a table of a database, batch by batch, without rows that have no vector."""
    file = pq.ParquetFile(path)
    lancedb.connect(database).create_table(
        "passages",
        data=file.iter_batches(),
        schema=file.schema_arrow,
        mode="overwrite",
        on_bad_vectors="drop",  # nulls
    )


def search(database: str, query: NDArray[np.float32], count: int = 3) -> list[tuple[str, float]]:
    """The passages that are most similar to a query (d,), each with its cosine."""
    table = lancedb.connect(database).open_table("passages")
    rows = table.search(query).distance_type("cosine").limit(count).to_list()
    return [(row["passage"], 1 - row["_distance"]) for row in rows]


if __name__ == "__main__":
    path, database, server, model, text = sys.argv[1:]
    store(path, database)
    with AttentionClient(server) as client:
        for passage, similarity in search(database, client.embed(model, text)):
            print(f"{similarity:.3f}  {passage}")
