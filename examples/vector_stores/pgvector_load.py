"""Writes passages of a Parquet file as a script for PostgreSQL with the extension pgvector.

The file has a row for each passage, as docs/enrich.md describes.

```sh
python examples/vector_stores/pgvector_load.py passages.parquet | psql "$DATABASE_URL"
psql "$DATABASE_URL" -c "SELECT passage FROM passages ORDER BY embedding <=> '[0.1, 0.2, ...]' LIMIT 3"
```
"""

import sys
from collections.abc import Iterator

import pyarrow.parquet as pq

HEAD = """\
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE passages (source_row bigint, passage text, embedding vector({width}));
COPY passages FROM STDIN;
"""
TAIL = """\
\\.
CREATE INDEX ON passages USING hnsw (embedding vector_cosine_ops);
"""
# Characters with a meaning in the text format of COPY.
ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def script(path: str) -> Iterator[str]:
    """The parts of the script. Rows without an embedding are left out."""
    file = pq.ParquetFile(path)
    yield HEAD.format(width=file.schema_arrow.field("embedding").type.list_size)
    for batch in file.iter_batches(columns=["source_row", "passage", "embedding"]):
        for row in batch.to_pylist():
            if row["embedding"] is not None:
                passage = row["passage"].translate(ESCAPES).replace("\0", "")  # which PostgreSQL refuses
                vector = ",".join(map(repr, row["embedding"]))
                yield f"{row['source_row']}\t{passage}\t[{vector}]\n"
    yield TAIL


if __name__ == "__main__":
    sys.stdout.writelines(script(sys.argv[1]))
