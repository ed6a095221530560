"""Context vectors or embeddings as a new column of a table: on servers, in this process or on a Ray cluster.

```python
from attention_serving.enrich import enrich

enrich("in.parquet", "out.parquet", model="self-attention", column="embeddings", model_repository="models")
enrich("in.parquet", "out.parquet", model="my-encoder", text_column="text", model_repository="models")
```
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attention_client.enrich
from attention_client.enrich import RETRY_SECONDS, EnrichError, Summary
from attention_client.enrich.options import check_values, read_options
from attention_client.enrich.outcome import UsageError

if TYPE_CHECKING:
    from attention_client import TlsFiles
    from grpc import ChannelCredentials

__all__ = ["enrich"]


def enrich(
    source: Any,
    output: str | PathLike[str] | None = None,
    *,
    servers: str | Sequence[str] = (),
    retry_seconds: float = RETRY_SECONDS,
    credentials: "ChannelCredentials | TlsFiles | None" = None,
    token: str | None = None,
    model_repository: str | PathLike[str] | None = None,
    provider: str = "cpu",
    engine: str | None = None,
    workers: int | None = None,
    cores_per_worker: int = 1,
    **options: Any,
) -> Summary:
    """Adds context vectors to a table, as `attention_client.enrich.enrich` on servers, or here.

    Args:
        source: See `attention_client.enrich.enrich`.
        output: See `attention_client.enrich.enrich`.
        servers: Servers as HOST:PORT, to compute on servers.
        retry_seconds: Seconds without any answer of a server after which the job ends, 0 or more.
        credentials: See `attention_client.enrich.enrich`; for servers only.
        token: See `attention_client.enrich.enrich`; for servers only.
        model_repository: Folder of artifacts, to compute without servers.
        provider: Execution provider of ONNX Runtime: cpu or cuda. Without servers only.
        engine: ray computes on a Ray cluster instead of in this process. All its nodes must have the model
            repository and the tables under the same paths.
        workers: Maximum number of Ray actors. Default: as many as the cluster has cores for.
        cores_per_worker: Number of cores of each Ray actor.
        **options: See `attention_client.enrich.EnrichOptions`.

    Raises:
        EnrichError: There is no result. Chunks that were finished are kept for `resume`.
    """
    values = {
        "provider": provider,
        "engine": engine,
        "workers": workers,
        "cores_per_worker": cores_per_worker,
    }
    check_values(values)
    if bool(servers) == (model_repository is not None):
        raise UsageError("exactly one of servers and model_repository is required")
    if engine is None and (workers is not None or cores_per_worker != 1):
        raise UsageError("workers and cores_per_worker need engine='ray'")
    if model_repository is None:
        if engine is not None or provider != "cpu":
            raise UsageError(f"{'engine' if engine else 'provider'} needs model_repository, not servers")
        return attention_client.enrich.enrich(
            source,
            output,
            servers=servers,
            retry_seconds=retry_seconds,
            credentials=credentials,
            token=token,
            **options,
        )
    if credentials is not None or token is not None:
        raise UsageError("credentials and token need servers")
    if options.get("tokenizer") is not None:
        raise UsageError("tokenizer needs servers; an artifact contains its own")
    read = read_options(options)
    # Imported here so that a job on servers, and --help, need no ONNX Runtime.
    try:
        from attention_client.enrich.job import run_job  # noqa: PLC0415

        from attention_serving.enrich.local import LocalBackend  # noqa: PLC0415

        if engine is not None:
            from attention_serving.enrich.cluster import make_runner  # noqa: PLC0415
    except ImportError as error:
        extra, option = ("ray", "--engine ray") if engine else ("cpu", "--model-repository")
        raise EnrichError(f"install what {option} needs: pip install '.[{extra}]' ({error})") from error
    load = partial(LocalBackend, Path(model_repository).absolute(), read, provider)
    if engine is None:
        with closing(load()) as backend:
            return run_job(source, output, backend, read)
    backend = load(parallel=cores_per_worker)  # fails at once if the model cannot be loaded
    backend.close()
    # All actors load the version that was chosen here.
    chosen = partial(load, version=backend.model.version, parallel=cores_per_worker)
    return run_job(source, output, backend, read, runner=make_runner(chosen, cores_per_worker, workers))
