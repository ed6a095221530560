"""Searches passages in a Parquet file with FAISS.

The file has a row for each passage, as docs/enrich.md describes.

```sh
pip install faiss-cpu
python examples/vector_stores/faiss_search.py passages.parquet 127.0.0.1:8001 text-encoder "what to eat"
```
"""

import sys

import faiss
import numpy as np
import pyarrow.parquet as pq
from attention_client import AttentionClient
from numpy.typing import NDArray


def search(path: str, query: NDArray[np.float32], count: int = 3) -> list[tuple[str, float]]:
    """The passages that are most similar to a query (d,), each with its cosine."""
    table = pq.read_table(path, columns=["passage", "embedding"])
    table = table.filter(table["embedding"].is_valid())
    # A column of lists of fixed size is one block of numbers: (rows, d).
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(-1, len(query)).copy()
    unit_query = query[np.newaxis].copy()
    faiss.normalize_L2(vectors)  # the inner product of vectors of length 1 is their cosine
    faiss.normalize_L2(unit_query)
    index = faiss.IndexFlatIP(len(query))
    index.add(vectors)
    similarities, rows = index.search(unit_query, min(count, len(vectors)))
    passages = table["passage"].take(rows[0]).to_pylist()
    return list(zip(passages, similarities[0].tolist(), strict=True))


if __name__ == "__main__":
    path, server, model, text = sys.argv[1:]
    with AttentionClient(server) as client:
        for passage, similarity in search(path, client.embed(model, text)):
            print(f"{similarity:.3f}  {passage}")
