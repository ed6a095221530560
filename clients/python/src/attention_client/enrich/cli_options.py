"""The options that `attention-client enrich` and `python -m clients.enrich` share."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from attention_client.enrich import OnError, Pool
from attention_client.enrich.cli_text_options import text_arguments
from attention_client.enrich.options import EnrichOptions

MODEL, COLUMNS, SERVERS, JOB, OUTPUT = "Model", "Columns", "Servers", "Job", "Reporting"


@dataclass(frozen=True, kw_only=True)
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
Token: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Bearer token of every call. Default: the environment variable ATTENTION_TOKEN.",
        rich_help_panel=SERVERS,
        show_default=False,
    ),
]
Tls: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tls",
        help="Encrypt the connections; verify with the system's certificates.",
        rich_help_panel=SERVERS,
    ),
]
Ca: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Encrypt; verify the servers with the authorities of this PEM file.",
        rich_help_panel=SERVERS,
        show_default=False,
    ),
]
Certificate: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--certificate",
        metavar="FILE",
        help="Encrypt; show this certificate (PEM). Needs --key.",
        rich_help_panel=SERVERS,
        show_default=False,
    ),
]
Key: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "--private-key",
        metavar="FILE",
        help="Private key (PEM) of --certificate.",
        rich_help_panel=SERVERS,
        show_default=False,
    ),
]
RetrySeconds: TypeAlias = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="End the job after this many seconds without an answer from any server, 0 or more. "
        "0 ends it at the first failure.",
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
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the query: lists of vectors, lists of token ids, or texts. Exactly one of "
            "--column, --text-column and --template is required.",
            rich_help_panel=COLUMNS,
        ),
    ] = None,
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
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the new column. Default: embedding for text encoders, otherwise context_vectors.",
            rich_help_panel=COLUMNS,
            show_default=False,
        ),
    ] = None,
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
            help="With --on-error skip, end the job if more rows than this are refused. 0 allows none. "
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
    """Adds the options of jobs and of texts to a command; it receives them as its argument `job`."""
    shared, texts, own = (
        inspect.signature(function).parameters for function in (job_arguments, text_arguments, command)
    )

    @functools.wraps(command)
    def run(**values: Any) -> None:
        own_texts = text_arguments(**{name: values.pop(name) for name in texts})
        job = job_arguments(**{name: values.pop(name) for name in shared})
        sources = (job.options["column"], own_texts["text_column"], own_texts["template"])
        if sum(source is not None for source in sources) != 1:
            raise typer.BadParameter("exactly one of --column, --text-column and --template is required")
        options: EnrichOptions = {**job.options, **own_texts}
        command(job=replace(job, options=options), **values)

    mine = [parameter for name, parameter in own.items() if name != "job"]
    positional = [parameter for parameter in mine if parameter.kind is not parameter.KEYWORD_ONLY]
    options = [parameter for parameter in mine if parameter.kind is parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*positional, *shared.values(), *texts.values(), *options])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {
        **command.__annotations__,
        **job_arguments.__annotations__,
        **text_arguments.__annotations__,
    }
    return run
