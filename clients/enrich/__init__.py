"""Bulk enrichment: context vectors as new columns of a table, computed here, on servers or on a Ray cluster.

```python
from clients.enrich import enrich

enrich("in.parquet", "out.parquet", model="self-attention", column="embeddings", model_repository="models")
```
"""

from clients.enrich.engines import enrich

__all__ = ["enrich"]
