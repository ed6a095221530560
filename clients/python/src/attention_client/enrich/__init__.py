"""Context vectors as new columns of a table, computed on servers: the extra `enrich` of attention_client.

```python
from attention_client.enrich import enrich

summary = enrich(
    "in.parquet", "out.parquet", model="self-attention", column="embeddings", servers=["127.0.0.1:8001"]
)
```
"""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from attention_client.enrich.backend import Role
from attention_client.enrich.errors import EnrichError
from attention_client.enrich.job import Summary, run_job
from attention_client.enrich.plan import ATTENTION_WEIGHTS, CONTEXT_VECTORS, Options
from attention_client.enrich.pooling import Pool
from attention_client.enrich.servers import RETRY_SECONDS, ServerBackend

__all__ = ["EnrichError", "Pool", "Summary", "enrich"]


def enrich(
    source: Any,
    output: str | PathLike[str] | None = None,
    *,
    model: str,
    column: str,
    servers: str | Sequence[str],
    key_column: str | None = None,
    value_column: str | None = None,
    output_column: str = CONTEXT_VECTORS,
    pool: Pool | str = Pool.NONE,
    weights: bool = False,
    on_error: str = "fail",
    version: str = "",
    retry_seconds: float = RETRY_SECONDS,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Summary:
    """Adds context vectors to a table.

    Args:
        source: A Parquet or Arrow IPC file, or a folder of them, local or by its URL; or a table in memory
            (of Arrow, pandas, Polars or DuckDB), or a data set of Arrow.
        output: A file or a folder; a folder becomes a folder. None for the `table` of the summary, where the
            source is one in memory.
        model: Name of the model.
        column: Column of its query: lists of vectors, lists of token ids, or texts.
        servers: Servers as HOST:PORT.
        key_column: For cross-attention.
        value_column: For models that separate the value from the key.
        output_column: Name of the new column.
        pool: none for the context vectors of every row; mean, cls or max for one vector.
        weights: Whether to add the attention weights too, as column `attention_weights`.
        on_error: fail, or skip: whether a row that is refused ends the job, or has no result.
        version: Version of the model; empty for the highest that answers.
        retry_seconds: How long to try again while no server answers.
        resume: Whether to go on with an unfinished job.
        overwrite: Whether to replace an output that is there, at the end.
        quiet: Whether to show no progress.

    Raises:
        EnrichError: There is no result; what was done stays for `resume`.
    """
    options = make_options(
        column, key_column, value_column, output_column, pool=pool, weights=weights, on_error=on_error
    )
    backend = ServerBackend(servers, model, version, return_weights=weights, retry_seconds=retry_seconds)
    try:
        return run_job(source, output, backend, options, resume=resume, overwrite=overwrite, quiet=quiet)
    finally:
        backend.close()


def make_options(
    column: str,
    key_column: str | None,
    value_column: str | None,
    output_column: str,
    *,
    pool: Pool | str,
    weights: bool,
    on_error: str,
) -> Options:
    """Reads the options that every way of enriching has.

    Raises:
        EnrichError: One of them has a value that it cannot have.
    """
    if on_error not in ("fail", "skip"):
        raise EnrichError(f"on_error is fail or skip, not {on_error!r}")
    if pool not in list(Pool):
        raise EnrichError(f"pool is one of {', '.join(Pool)}, not {pool!r}")
    named = {Role.QUERY: column, Role.KEY: key_column, Role.VALUE: value_column}
    return Options(
        columns={role: name for role, name in named.items() if name is not None},
        output_column=output_column,
        weights_column=ATTENTION_WEIGHTS if weights else None,
        pool=Pool(pool),
        skip_refused=on_error == "skip",
    )
