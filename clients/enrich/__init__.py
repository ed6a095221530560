"""Context vectors or embeddings as a new column of a table: on servers, in this process or on a Ray cluster.

```python
from attention_serving.enrich import enrich

enrich("in.parquet", "out.parquet", model="self-attention", column="embeddings", model_repository="models")
enrich("in.parquet", "out.parquet", model="my-encoder", text_column="text", model_repository="models")
```
"""

try:
    from attention_serving.enrich.placement import enrich
except ModuleNotFoundError as error:
    if error.name != "attention_client":
        raise
    needed = "attention_serving.enrich needs attention_client: pip install './clients/python[enrich]'"
    raise ModuleNotFoundError(needed, name=error.name) from None

__all__ = ["enrich"]
