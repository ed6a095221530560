"""Searches passages in a Parquet file with DuckDB.

The file has a row for each passage, as docs/enrich.md describes.

```sh
pip install duckdb
python examples/vector_stores/duckdb_search.py passages.parquet 127.0.0.1:8001 text-encoder "what to eat"
```
"""

import sys

import duckdb
import numpy as np
from attention_client import AttentionClient
from numpy.typing import NDArray

# Parquet has no lists of fixed size, DuckDB's functions of vectors need them: FLOAT[width].
SEARCH = """
SELECT passage, array_cosine_similarity(embedding::FLOAT[{width}], $query::FLOAT[{width}]) AS similarity
FROM read_parquet($path) WHERE embedding IS NOT NULL
ORDER BY similarity DESC LIMIT $count
"""


def search(path: str, query: NDArray[np.float32], count: int = 3) -> list[tuple[str, float]]:
    """The passages that are most similar to a query (d,), each with its cosine."""
    values = {"path": path, "query": query.tolist(), "count": count}
    return duckdb.execute(SEARCH.format(width=len(query)), values).fetchall()


if __name__ == "__main__":
    path, server, model, text = sys.argv[1:]
    with AttentionClient(server) as client:
        for passage, similarity in search(path, client.embed(model, text)):
            print(f"{similarity:.3f}  {passage}")
