"""The command `attention-client enrich`.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from attention_client import AttentionClientError
from attention_client._tls import tls_files
from attention_client.enrich import RETRY_SECONDS, EnrichError, Summary, enrich
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
from attention_client.enrich.summary import counted, were_refused

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
INTERRUPTED = 130
DEFAULT_SERVER = "127.0.0.1:8001"
SERVER_VARIABLE, TOKEN_VARIABLE = "ATTENTION_SERVER", "ATTENTION_TOKEN"


@app.command(name="enrich")
@with_job_arguments
def enrich_command(
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
) -> None:
    """Add context vectors, or embeddings of texts, to a table as a new column, computed on servers.

    Without --server, the server is that of the environment variable ATTENTION_SERVER, or 127.0.0.1:8001.
    """
    targets = split_servers(servers or [os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER])
    run_and_report(
        job,
        lambda: enrich(
            source,
            output,
            servers=targets,
            retry_seconds=retry_seconds,
            credentials=tls_files(ca, certificate, key, tls=tls),
            token=token or os.environ.get(TOKEN_VARIABLE) or None,
            **job.options,
        ),
    )


def split_servers(servers: list[str]) -> list[str]:
    """Every server of options that may each name several, separated by commas."""
    return [server.strip() for option in servers for server in option.split(",") if server.strip()]


def run_and_report(job: JobArguments, run: Callable[[], Summary]) -> None:
    """Runs a job, prints its summary and maps its errors to exit codes."""
    try:
        summary = run()
    except (AttentionClientError, EnrichError, OSError) as error:
        _end(f"error: {' '.join(str(error).split())}", 1)
    except ImportError as error:
        _end(f"error: {error}; install attention-client with its extra 'enrich'", 1)
    except KeyboardInterrupt:
        _end("interrupted; --resume continues the job", INTERRUPTED)
    sys.stdout.write(_json(summary) if job.as_json else _text(summary))


def _end(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise typer.Exit(code)


def _json(summary: Summary) -> str:
    """One line. The refused rows are listed in the file that `rejects` names."""
    values = {
        field.name: getattr(summary, field.name)
        for field in dataclasses.fields(summary)
        if field.name not in ("refusals", "table")
    }
    return json.dumps(values) + "\n"


def _text(summary: Summary) -> str:
    lines = [f"{summary.output}: {counted(summary.rows, 'row', 'rows')}"]
    if summary.already_complete:
        lines[0] += "; the job is already complete, nothing was computed"
    else:
        rate = f"{summary.tokens_per_second:,.0f} tokens/s"
        lines.append(f"{summary.tokens:,} tokens in {summary.seconds:,.1f} s, {rate}")
    parity = "unknown" if summary.parity_error is None else f"{summary.parity_error:.2g}"
    lines.append(
        f"model {summary.model}, version {summary.version}; largest difference from eager PyTorch {parity}"
    )
    if summary.resumed_rows and not summary.already_complete:
        earlier = counted(summary.resumed_rows, "row was", "rows were")
        lines.append(f"{earlier} computed by earlier runs")
    if summary.passages:
        lines.append(counted(summary.passages, "passage", "passages"))
    if summary.truncated:
        cut = counted(summary.truncated, "row has a text that was", "rows have texts that were")
        lines.append(f"{cut} cut to the tokens that the model takes")
    if summary.nulls:
        lines.append(f"{counted(summary.nulls, 'row is', 'rows are')} null: nothing to compute")
    if summary.rejects:
        lines.append(f"{were_refused(summary.refused)}: {summary.rejects}")
    for server, failures in summary.server_failures.items():
        lines.append(f"server {server} failed {counted(failures, 'time', 'times')}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app(prog_name="attention-client enrich")
