"""Command line: `python -m clients.enrich --help`.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

try:
    import typer
    from attention_client._tls import tls_files
    from attention_client.enrich import RETRY_SECONDS
    from attention_client.enrich.cli import TOKEN_VARIABLE, run_and_report, split_servers
    from attention_client.enrich.cli_options import (
        Ca,
        Certificate,
        JobArguments,
        Key,
        Output,
        RetrySeconds,
        Servers,
        Source,
        Tls,
        Token,
        with_job_arguments,
    )
except ImportError as error:
    sys.exit(f"error: {error}; install it: pip install './clients/python[enrich]' '.[cpu,enrich]'")

from attention_serving.enrich.placement import enrich

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
IN_PROCESS = "Without servers"


class Provider(StrEnum):
    """What ONNX Runtime computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class EngineName(StrEnum):
    """What runs a job without servers."""

    RAY = "ray"


@app.command()
@with_job_arguments
def main(
    source: Source,
    output: Output,
    *,
    job: JobArguments,
    servers: Servers = [],  # noqa: B006 - Typer copies it
    retry_seconds: RetrySeconds = RETRY_SECONDS,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Compute in this process with a model of this repository, without a server.",
            rich_help_panel=IN_PROCESS,
        ),
    ] = None,
    provider: Annotated[
        Provider,
        typer.Option(help="Execution provider of ONNX Runtime.", rich_help_panel=IN_PROCESS),
    ] = Provider.CPU,
    engine: Annotated[
        EngineName | None,
        typer.Option(
            help="Compute on a Ray cluster instead of in this process. All its nodes must have the "
            "repository and the tables under the same paths.",
            rich_help_panel=IN_PROCESS,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="ACTORS",
            min=1,
            help="Maximum number of Ray actors. Default: as many as fit the cluster's cores.",
            rich_help_panel=IN_PROCESS,
        ),
    ] = None,
    cores_per_worker: Annotated[
        int,
        typer.Option(
            metavar="CORES", min=1, help="Number of cores of each Ray actor.", rich_help_panel=IN_PROCESS
        ),
    ] = 1,
) -> None:
    """Add context vectors or embeddings to a table as a new column: on servers, in this process or on Ray.

    Exactly one of --server and --model-repository is required.
    """
    if bool(servers) == (model_repository is not None):
        raise typer.BadParameter("exactly one of --server and --model-repository is required")
    if engine and servers:
        raise typer.BadParameter("--engine ray needs --model-repository, not --server")
    if not servers and (token or tls or ca or certificate or key):
        raise typer.BadParameter("--token, --tls, --ca, --certificate and --key need --server")
    if servers and provider is not Provider.CPU:
        raise typer.BadParameter("--provider needs --model-repository; a server has its own setting")
    if (workers or cores_per_worker != 1) and not engine:
        raise typer.BadParameter("--workers and --cores-per-worker need --engine ray")
    run_and_report(
        job,
        lambda: enrich(
            source,
            output,
            servers=split_servers(servers),
            retry_seconds=retry_seconds,
            credentials=tls_files(ca, certificate, key, tls=tls),
            token=(token or os.environ.get(TOKEN_VARIABLE) or None) if servers else None,
            model_repository=model_repository,
            provider=provider,
            engine=engine,
            workers=workers,
            cores_per_worker=cores_per_worker,
            **job.options,
        ),
    )


if __name__ == "__main__":
    app()
