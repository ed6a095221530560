"""Context vectors as a new column of a table, computed on servers, in this process or on a Ray cluster.

```python
from clients.enrich import enrich

enrich("in.parquet", "out.parquet", model="self-attention", column="embeddings", model_repository="models")
```
"""

from clients.enrich.placement import enrich

__all__ = ["enrich"]
