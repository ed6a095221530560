"""Context vectors or embeddings as a new column of a table, computed on servers.

Needs the extra `enrich`: `pip install './clients/python[enrich]'` in the repository.

```python
from attention_client.enrich import enrich

summary = enrich(
    "in.parquet", "out.parquet", model="self-attention", column="embeddings", servers=["127.0.0.1:8001"]
)
enrich("in.parquet", "out.parquet", model="my-encoder", text_column="text", servers=["127.0.0.1:8001"])
```
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from attention_client.enrich.options import EnrichOptions, OnError, PassageLayout, Pool, read_options
from attention_client.enrich.outcome import EnrichError, Refusal, ServersUnavailableError, Summary

if TYPE_CHECKING:
    from grpc import ChannelCredentials

    from attention_client import TlsFiles

__all__ = [
    "EnrichError",
    "EnrichOptions",
    "OnError",
    "PassageLayout",
    "Pool",
    "Refusal",
    "ServersUnavailableError",
    "Summary",
    "enrich",
]

RETRY_SECONDS = 120.0


def enrich(
    source: Any,
    output: str | PathLike[str] | None = None,
    *,
    servers: str | Sequence[str],
    retry_seconds: float = RETRY_SECONDS,
    credentials: "ChannelCredentials | TlsFiles | None" = None,
    token: str | None = None,
    **options: Any,
) -> Summary:
    """Adds context vectors, or embeddings of texts, to a table as a new column.

    Args:
        source: Path or URL of a Parquet or Arrow file, or of a folder of them; or a table in memory (Arrow,
            pandas, Polars, DuckDB), or an Arrow dataset.
        output: Path or URL of the result: a file for a file, a folder for either. None returns the result
            as the `table` of the summary; `source` must then be a table in memory or a dataset.
        servers: Server to compute on, HOST:PORT, or several; on the command line, repeat the option or use
            commas. Each address of a host name is one server.
        retry_seconds: End the job after this many seconds without an answer from any server, 0 or more. 0
            ends it at the first failure.
        credentials: Credentials of the connections, as of `AttentionClient`; None means unencrypted ones.
        token: Sent with every call, as of `AttentionClient`.
        **options: See EnrichOptions.

    Raises:
        ServersUnavailableError: No server answered for `retry_seconds`. Chunks that were finished are kept
            for `resume`.
        EnrichError: There is no result, for another reason. Finished chunks are kept here too.
    """
    read = read_options(options)
    # Imported here so that the command line starts without pyarrow.
    from attention_client.enrich.backends import ServerBackend  # noqa: PLC0415
    from attention_client.enrich.job import run_job  # noqa: PLC0415

    backend = ServerBackend(servers, read, retry_seconds=retry_seconds, credentials=credentials, token=token)
    with closing(backend):
        return replace(run_job(source, output, backend, read), server_failures=dict(backend.failures))
