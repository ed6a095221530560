"""Chooses where a job runs: on servers, in this process, or on a Ray cluster."""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import attention_client.enrich
from attention_client.enrich import RETRY_SECONDS, EnrichError, EnrichOptions, Summary
from attention_client.enrich.options import JobOptions, read_options

if TYPE_CHECKING:
    from attention_client import TlsFiles
    from grpc import ChannelCredentials

RAY = "ray"
PROVIDERS = ("cpu", "cuda")


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
    **options: Unpack[EnrichOptions],
) -> Summary:
    """Adds context vectors or embeddings to a table, as `attention_client.enrich.enrich` on servers, or here.

    Args:
        source: See `attention_client.enrich.enrich`.
        output: See `attention_client.enrich.enrich`.
        servers: Servers as HOST:PORT, to compute on servers.
        retry_seconds: Seconds without any answer of a server after which the job ends, 0 or more.
        credentials: See `attention_client.enrich.enrich`; for servers only.
        token: See `attention_client.enrich.enrich`; for servers only.
        model_repository: Folder of artifacts, to compute without servers.
        provider: cpu or cuda; without servers only.
        engine: None computes in this process; "ray" on a Ray cluster, each node of which must have the model
            repository and the tables under the same paths.
        workers: Maximum number of Ray actors, 1 or more; None for as many as the cluster has cores for.
        cores_per_worker: Cores of each actor, 1 or more.
        **options: See `attention_client.enrich.EnrichOptions`.

    Raises:
        EnrichError: There is no result. Chunks that were finished are kept for `resume`.
    """
    if bool(servers) == (model_repository is not None):
        raise EnrichError("name either servers (--server) or a model repository (--model-repository)")
    if model_repository is None:
        if engine is not None:
            raise EnrichError(f"engine {engine!r} needs a model repository (--model-repository), not servers")
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
        raise EnrichError("credentials and token need servers (--server)")
    read = read_options(options)
    if read.tokenizer is not None:
        raise EnrichError(
            "tokenizer (--tokenizer) needs servers; a model repository has the tokenizers of its models"
        )
    _check(provider, engine, workers, cores_per_worker)
    repository = Path(model_repository).absolute()
    if engine == RAY:
        return _run_on_ray(source, output, repository, provider, workers, cores_per_worker, read)
    return _run_here(source, output, repository, provider, read)


def _check(provider: str, engine: str | None, workers: int | None, cores_per_worker: int) -> None:
    if provider not in PROVIDERS:
        raise EnrichError(f"provider is {provider!r}; it must be one of {', '.join(PROVIDERS)}")
    if engine not in (None, RAY):
        raise EnrichError(f"engine is {engine!r}; it must be {RAY!r} or None")
    if workers is not None and workers < 1:
        raise EnrichError(f"workers is {workers}; it must be 1 or more")
    if cores_per_worker < 1:
        raise EnrichError(f"cores_per_worker is {cores_per_worker}; it must be 1 or more")


def _run_here(
    source: Any, output: str | PathLike[str] | None, repository: Path, provider: str, options: JobOptions
) -> Summary:
    # Imported here so that a job on servers, and --help, need no ONNX Runtime.
    try:
        from attention_client.enrich.job import run_job  # noqa: PLC0415

        from attention_serving.enrich.local import LocalBackend  # noqa: PLC0415
    except ImportError as error:
        raise EnrichError(f"install what --model-repository needs: pip install '.[cpu]' ({error})") from error
    backend = LocalBackend(
        repository,
        options.model,
        options.version,
        return_weights=options.weights,
        embed=options.embed,
        provider=provider,
    )
    try:
        return run_job(source, output, backend, options)
    finally:
        backend.close()


def _run_on_ray(
    source: Any,
    output: str | PathLike[str] | None,
    repository: Path,
    provider: str,
    workers: int | None,
    cores: int,
    options: JobOptions,
) -> Summary:
    try:
        from attention_serving.enrich.cluster import run_on_cluster  # noqa: PLC0415 - needs the extra `ray`
    except ImportError as error:
        raise EnrichError(f"engine {RAY!r} needs the extra: pip install '.[ray]' ({error})") from error
    return run_on_cluster(
        source,
        output,
        repository=repository,
        provider=provider,
        workers=workers,
        cores=cores,
        options=options,
    )
