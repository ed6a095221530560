"""The same job by each way to compute: on servers, in this process, on a Ray cluster."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from attention_client.enrich import EnrichError, Pool, Summary, make_options
from attention_client.enrich.backend import Backend
from attention_client.enrich.job import RunChunks, run_job
from attention_client.enrich.plan import CONTEXT_VECTORS
from attention_client.enrich.servers import RETRY_SECONDS, ServerBackend

from clients.enrich.local import LocalBackend

RAY = "ray"


def enrich(
    source: Any,
    output: str | PathLike[str] | None = None,
    *,
    model: str,
    column: str,
    servers: str | Sequence[str] = (),
    model_repository: str | Path | None = None,
    engine: str | None = None,
    key_column: str | None = None,
    value_column: str | None = None,
    output_column: str = CONTEXT_VECTORS,
    pool: Pool | str = Pool.NONE,
    weights: bool = False,
    on_error: str = "fail",
    version: str = "",
    provider: str = "cpu",
    workers: int | None = None,
    cores_per_worker: int = 1,
    retry_seconds: float = RETRY_SECONDS,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Summary:
    """Adds context vectors to a table; as `attention_client.enrich.enrich`, and where it runs can be chosen.

    Args:
        source: A Parquet or Arrow IPC file, or a folder of them, local or by its URL; or a table in memory
            (of Arrow, pandas, Polars or DuckDB), or a data set of Arrow.
        output: A file or a folder; a folder becomes a folder. None for the `table` of the summary, where the
            source is one in memory.
        model: Name of the model.
        column: Column of its query: lists of vectors, lists of token ids, or texts.
        servers: Servers as HOST:PORT, for a job that asks them.
        model_repository: Folder of artifacts, for a job that computes by itself.
        engine: "ray" to compute on a Ray cluster, each of whose nodes sees the repository and the tables.
        key_column: For cross-attention.
        value_column: For models that separate the value from the key.
        output_column: Name of the new column.
        pool: none for the context vectors of every row; mean, cls or max for one vector.
        weights: Whether to add the attention weights too, as column `attention_weights`.
        on_error: fail, or skip: whether a row that is refused ends the job, or has no result.
        version: Version of the model; empty for the highest that answers.
        provider: cpu or cuda, where the job computes by itself.
        workers: Most actors of a Ray cluster; None for as many as it has room for.
        cores_per_worker: Cores of each of them.
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
    if bool(servers) == (model_repository is not None):
        raise EnrichError("name either servers or a model repository")
    if engine not in (None, RAY):
        raise EnrichError(f"engine is {RAY} or none, not {engine!r}")
    backend: Backend
    do: RunChunks | None = None
    if model_repository is None:
        if engine == RAY:
            raise EnrichError("a Ray cluster computes by itself: name a model repository, not servers")
        backend = ServerBackend(servers, model, version, return_weights=weights, retry_seconds=retry_seconds)
    else:
        repository = Path(model_repository).absolute()
        backend = LocalBackend(repository, model, version, return_weights=weights, provider=provider)
        if engine == RAY:
            from clients.enrich.cluster import ActorOptions, Cluster  # noqa: PLC0415 - only here needs Ray

            actor = ActorOptions(
                repository=repository,
                model=model,
                version=backend.model.version,
                provider=provider,
                cores=cores_per_worker,
                options=options,
            )
            do = Cluster(actor, workers).run_chunks
    try:
        return run_job(
            source, output, backend, options, resume=resume, overwrite=overwrite, quiet=quiet, do=do
        )
    finally:
        backend.close()
