"""The command `attention-client enrich`, and the options that `python -m clients.enrich` shares with it.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeAlias

import typer

from attention_client.enrich import RETRY_SECONDS, EnrichError, OnError, Pool, Summary, enrich
from attention_client.enrich.options import CONTEXT_VECTORS, EnrichOptions

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
INTERRUPTED = 130
DEFAULT_SERVER = "127.0.0.1:8001"
SERVER_VARIABLE = "ATTENTION_SERVER"
MODEL, COLUMNS, SERVERS, JOB, OUTPUT = "Model", "Columns", "Servers", "Job", "Reporting"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobArguments:
    """The shared options of one command line.

    Attributes:
        options: Options of the job.
        as_json: Whether to print the summary as JSON.
    """

    options: EnrichOptions
    as_json: bool


Source: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="Path or URL of a Parquet or Arrow file, or of a folder of them.",
        show_default=False,
    ),
]
Output: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="OUTPUT",
        help="Path or URL of the result: a file for a file, a folder for either. The name of a file states "
        "its format: .parquet, .arrow, .arrows.",
        show_default=False,
    ),
]
Servers: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--server",
        metavar="HOST:PORT",
        help="Server to compute on. For several servers, repeat the option or separate them by commas. Each "
        "address of a host name is one server.",
        rich_help_panel=SERVERS,
        show_default=False,
    ),
]
RetrySeconds: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Seconds without any answer after which the job ends; 0 ends it at the first failure.",
        rich_help_panel=SERVERS,
    ),
]


def job_arguments(
    *,
    model: Annotated[str, typer.Option(metavar="NAME", help="Name of the model.", rich_help_panel=MODEL)],
    version: Annotated[
        str,
        typer.Option(
            metavar="VERSION",
            help="Version of the model. Default: the highest version that is ready.",
            rich_help_panel=MODEL,
            show_default=False,
        ),
    ] = "",
    column: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Column of the query: lists of vectors, lists of token ids, or texts.",
            rich_help_panel=COLUMNS,
        ),
    ],
    key_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column of the key, for cross-attention.", rich_help_panel=COLUMNS),
    ] = None,
    value_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the value, for models with a separate value.",
            rich_help_panel=COLUMNS,
        ),
    ] = None,
    output_column: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the new column.", rich_help_panel=COLUMNS)
    ] = CONTEXT_VECTORS,
    pool: Annotated[
        Pool,
        typer.Option(
            help="Store all context vectors of a row (none), or one vector: their mean, the first (cls) or "
            "the maximum of each element (max).",
            rich_help_panel=COLUMNS,
        ),
    ] = Pool.NONE,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Add the attention weights too, as column attention_weights.",
            rich_help_panel=COLUMNS,
        ),
    ] = False,
    on_error: Annotated[
        OnError,
        typer.Option(
            help="If the model refuses a row, end the job (fail), or give the row null and list it in "
            "OUTPUT.rejects.jsonl (skip).",
            rich_help_panel=JOB,
        ),
    ] = OnError.FAIL,
    max_errors: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=0,
            help="With --on-error skip, end the job when more rows than this are refused. 0 allows none. "
            "Default: no limit.",
            rich_help_panel=JOB,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an unfinished job.", rich_help_panel=JOB)
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing output, once the new one is complete.",
            rich_help_panel=JOB,
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Report no progress on stderr.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel=OUTPUT)
    ] = False,
) -> JobArguments:
    """Collects the options that every command of enrichment has."""
    if max_errors is not None and on_error is OnError.FAIL:
        raise typer.BadParameter("--max-errors needs --on-error skip")
    options = EnrichOptions(
        model=model,
        version=version,
        column=column,
        key_column=key_column,
        value_column=value_column,
        output_column=output_column,
        pool=pool,
        weights=weights,
        on_error=on_error,
        max_errors=max_errors,
        resume=resume,
        overwrite=overwrite,
        progress=not quiet,
    )
    return JobArguments(options=options, as_json=as_json)


def with_job_arguments(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `job_arguments` to a command; it receives them as its argument `job`."""
    shared, own = inspect.signature(job_arguments).parameters, inspect.signature(command).parameters

    @functools.wraps(command)
    def run(**values: Any) -> None:
        job = job_arguments(**{name: values.pop(name) for name in shared})
        command(job=job, **values)

    mine = [parameter for name, parameter in own.items() if name != "job"]
    positional = [parameter for parameter in mine if parameter.kind is not parameter.KEYWORD_ONLY]
    options = [parameter for parameter in mine if parameter.kind is parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*positional, *shared.values(), *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, **job_arguments.__annotations__}
    return run


@app.command(name="enrich")
@with_job_arguments
def enrich_command(
    context: typer.Context,
    source: Source,
    output: Output,
    *,
    job: JobArguments,
    servers: Servers = [],  # noqa: B006 - Typer copies it
    retry_seconds: RetrySeconds = RETRY_SECONDS,
) -> None:
    """Add context vectors to a table as a new column, computed on servers.

    Without --server, the server is that of the environment variable ATTENTION_SERVER, or 127.0.0.1:8001.
    """
    targets = split_servers(servers or [_default_server(context)])
    run_and_report(
        job, lambda: enrich(source, output, servers=targets, retry_seconds=retry_seconds, **job.options)
    )


def split_servers(servers: list[str]) -> list[str]:
    """Every server of options that may each name several, separated by commas."""
    return [server.strip() for option in servers for server in option.split(",") if server.strip()]


def _default_server(context: typer.Context) -> str:
    """The server that is named before the command, in the environment, or the default."""
    before = context.parent.params.get("server") if context.parent else None
    return str(before or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER)


def run_and_report(job: JobArguments, run: Callable[[], Summary]) -> None:
    """Runs a job, prints its summary and maps its errors to exit codes."""
    try:
        summary = run()
    except (EnrichError, OSError) as error:
        _end(f"error: {' '.join(str(error).split())}", 1)
    except ImportError as error:
        _end(f"error: {error}; install the extra: pip install 'attention-client[enrich]'", 1)
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
    lines = [f"{summary.output}: {summary.rows:,} rows"]
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
        lines.append(f"{summary.resumed_rows:,} rows were computed by earlier runs")
    if summary.nulls:
        lines.append(f"{summary.nulls:,} rows are null: nothing to compute")
    if summary.rejects:
        lines.append(f"{summary.refused:,} rows were refused: {summary.rejects}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the command by itself."""
    app(prog_name="attention-client enrich")


if __name__ == "__main__":
    main()
