"""The command `attention-client enrich`, and what `python -m clients.enrich` shares with it.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import dataclasses
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, NoReturn, TypeAlias, get_type_hints

import typer

from attention_client import AttentionClientError
from attention_client._commands.session import secure_options
from attention_client._tls import tls_files
from attention_client.enrich import RETRY_SECONDS, EnrichError, Summary, enrich
from attention_client.enrich.options import LEAST, EnrichOptions, JobOptions
from attention_client.enrich.outcome import UsageError, counted, were_refused

INTERRUPTED = 130
DEFAULT_SERVER = "127.0.0.1:8001"
SERVER_VARIABLE, TOKEN_VARIABLE = "ATTENTION_SERVER", "ATTENTION_TOKEN"
MODEL, COLUMNS, TEXTS, PASSAGES = "Model", "Columns", "Texts", "Passages of texts"
SERVERS, JOB, OUTPUT = "Servers", "Job", "Reporting"
# A parameter of a command: its type, its default, and how the command line shows it.
Option: TypeAlias = tuple[Any, Any, Any]


# The panel of each option of a job in the help, and what stands for its value.
JOB_OPTIONS: Mapping[str, tuple[str, str | None]] = {
    "model": (MODEL, "NAME"),
    "version": (MODEL, "VERSION"),
    "column": (COLUMNS, "NAME"),
    "key_column": (COLUMNS, "NAME"),
    "value_column": (COLUMNS, "NAME"),
    "output_column": (COLUMNS, "NAME"),
    "pool": (COLUMNS, None),
    "weights": (COLUMNS, None),
    "on_error": (JOB, None),
    "max_errors": (JOB, "ROWS"),
    "resume": (JOB, None),
    "overwrite": (JOB, None),
    "text_column": (TEXTS, "NAME"),
    "template": (TEXTS, "TEXT"),
    "prompt": (TEXTS, "NAME"),
    "dimensions": (TEXTS, "NUMBER"),
    "truncate": (TEXTS, None),
    "passage_tokens": (PASSAGES, "TOKENS"),
    "passage_overlap": (PASSAGES, "TOKENS"),
    "passages": (PASSAGES, None),
    "tokenizer": (PASSAGES, "FILE"),
}


def option(panel: str, metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    """How the command line shows an option; the name is that of the parameter unless others are given."""
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, **settings)


def _job_options() -> Iterator[tuple[str, Option]]:
    """The options of a job: types and defaults are those of JobOptions, texts those of EnrichOptions."""
    attributes = inspect.cleandoc(EnrichOptions.__doc__ or "").partition("Attributes:")[2]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE))
    hints = get_type_hints(JobOptions)
    for field in dataclasses.fields(JobOptions):
        if field.name in JOB_OPTIONS:
            panel, metavar = JOB_OPTIONS[field.name]
            text = re.sub(
                r"`(\w+)`", lambda name: _flag(name[1]), " ".join(texts.get(field.name, "").split())
            )
            names = [_flag(field.name)] if hints[field.name] is bool else []
            settings = {"min": LEAST.get(field.name), "show_default": field.default != ""}
            yield (
                field.name,
                (
                    hints[field.name],
                    Parameter.empty if field.default is dataclasses.MISSING else field.default,
                    option(panel, metavar, text, *names, **settings),
                ),
            )


def _flag(name: str) -> str:
    return "--server" if name == "servers" else f"--{name.replace('_', '-')}"


SERVER_OPTIONS: Mapping[str, Option] = {
    "servers": (
        list[str],
        [],
        option(
            SERVERS,
            "HOST:PORT",
            "Server to compute on. For several servers, repeat the option or separate them by commas. Each "
            "address of a host name is one server.",
            "--server",
            show_default=False,
        ),
    ),
    "retry_seconds": (
        float,
        RETRY_SECONDS,
        option(
            SERVERS,
            "SECONDS",
            "End the job after this many seconds without an answer from any server, 0 or more. 0 ends it at "
            "the first failure.",
            min=0,
        ),
    ),
}
OUTPUT_OPTIONS: Mapping[str, Option] = {
    "quiet": (bool, False, option(OUTPUT, None, "Report no progress on stderr.", "--quiet")),
    "as_json": (bool, False, option(OUTPUT, None, "Print the summary as JSON.", "--json")),
}
SOURCE_HELP = "Path or URL of a Parquet or Arrow file, or of a folder of them."
OUTPUT_HELP = (
    "Path or URL of the result: a file for a file, a folder for either. The name of a file states its "
    "format: "
    ".parquet, .arrow, .arrows."
)


def make_app(
    run: Callable[..., Summary],
    description: str,
    *,
    default_servers: Callable[[], Sequence[str]] = list,
    own: Mapping[str, Option] = {},
) -> typer.Typer:
    """The command line of a function like `enrich`.

    Args:
        run: The function.
        description: What `--help` says.
        default_servers: The servers if none is named.
        own: Further options of the function.
    """

    def command(source: str, output: str, **given: Any) -> None:
        named = given["servers"] or default_servers()
        given["servers"] = [each.strip() for item in named for each in item.split(",") if each.strip()]
        if given["servers"]:
            given["token"] = given["token"] or os.environ.get(TOKEN_VARIABLE) or None
        given["progress"] = not given.pop("quiet")
        if given["template"] is not None:
            given["template"] = given["template"].replace("\\n", "\n")
        as_json = given.pop("as_json")
        files = [given.pop(name) for name in ("ca", "certificate", "private_key")]
        tls = bool(given.pop("tls"))
        try:
            credentials = tls_files(*files, tls=tls)
            _report(lambda: run(source, output, credentials=credentials, **given), as_json=as_json)
        except UsageError as error:
            raise typer.BadParameter(_with_flags(str(error), given)) from error

    secure = {name: (annotation, None, None) for name, annotation in secure_options(SERVERS).items()}
    positional = {"source": ("INPUT", SOURCE_HELP), "output": ("OUTPUT", OUTPUT_HELP)}
    parameters = [
        Parameter(
            name,
            Parameter.POSITIONAL_OR_KEYWORD,
            annotation=Annotated[str, typer.Argument(metavar=metavar, help=text, show_default=False)],
        )
        for name, (metavar, text) in positional.items()
    ]
    options = {**dict(_job_options()), **OUTPUT_OPTIONS, **SERVER_OPTIONS, **secure, **own}
    for name, (kind, default, shown) in options.items():
        annotation = Annotated[kind, shown] if shown else kind
        parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = description
    made = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    made.command(name="enrich")(command)
    return made


def _report(run: Callable[[], Summary], *, as_json: bool) -> None:
    """Runs a job, prints its summary and maps its errors to exit codes."""
    try:
        summary = run()
    except UsageError:
        raise
    except (AttentionClientError, EnrichError, OSError) as error:
        _end(f"error: {' '.join(str(error).split())}", 1)
    except ImportError as error:
        _end(f"error: {error}; install attention-client with its extra 'enrich'", 1)
    except KeyboardInterrupt:
        _end("interrupted; --resume continues the job", INTERRUPTED)
    sys.stdout.write(_json(summary) if as_json else _text(summary))


def _with_flags(message: str, names: Collection[str]) -> str:
    """A message with the names of options as the command line has them."""
    return re.sub(r"\w+", lambda word: _flag(word[0]) if word[0] in names else word[0], message)


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


app = make_app(
    enrich,
    "Add context vectors, or embeddings of texts, to a table as a new column, computed on servers.\n\n"
    "Without --server, the server is that of the environment variable ATTENTION_SERVER, or 127.0.0.1:8001.",
    default_servers=lambda: [os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER],
)


if __name__ == "__main__":
    app(prog_name="attention-client enrich")
