"""The command `attention-client enrich`, and what `python -m clients.enrich` shares with it.

Exit codes: 0 the output is complete, 1 there is no result (one line on stderr says why), 2 wrong usage,
130 interrupted.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from attention_client import AttentionClientError
from attention_client._commands.session import SERVER, TOKEN, fail, secure_options, set_parameters, texts_of
from attention_client._connection.settings import DEFAULT_TARGET
from attention_client._connection.tls import tls_files
from attention_client.enrich import RETRY_SECONDS, EnrichError, Summary, enrich
from attention_client.enrich.options import LEAST, EnrichOptions
from attention_client.enrich.outcome import UsageError, counted, were_refused

INTERRUPTED = 130
SERVERS, OUTPUT = "Servers", "Reporting"
# The panels of the help: the options of a job in each, and what stands for their values.
JOB_OPTIONS = {
    "Model": "model=NAME version=VERSION",
    "Columns": "column=NAME key_column=NAME value_column=NAME context=FILE output_column=NAME pool weights",
    "Texts": "text_column=NAME template=TEXT prompt=NAME input_kind outputs=NAMES top_k=NUMBER "
    "dimensions=NUMBER output_type truncate",
    "Passages of texts": "passage_tokens=TOKENS passage_overlap=TOKENS passages tokenizer=FILE",
    "Job": "on_error max_errors=ROWS resume overwrite",
}
# Another option of a command: its panel, what stands for its value, its type and its default.
Option: TypeAlias = tuple[str, str | None, Any, Any]
COMMAND_OPTIONS: Mapping[str, Option] = {
    "quiet": (OUTPUT, None, bool, False),
    "as_json": (OUTPUT, None, bool, False),
    "servers": (SERVERS, "HOST:PORT", list[str], []),
    "retry_seconds": (SERVERS, "SECONDS", float, RETRY_SECONDS),
}
FLAGS = {"servers": "--server", "as_json": "--json"}


def _flag(name: str) -> str:
    return FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _parameters(run: Callable[..., Summary], further: Mapping[str, Option]) -> Iterator[Parameter]:
    """The parameters of a command. What its help says of them is what the docstrings of the functions say."""
    texts = {
        **texts_of(run, "Args:"),
        **texts_of(enrich, "Args:"),
        **texts_of(EnrichOptions, "Attributes:"),
        **texts_of(make_command, "Arguments of the command:"),
    }
    yield Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    for name in ("source", "output"):
        argument = typer.Argument(metavar=name.removesuffix("source").upper() or "INPUT", help=texts[name])
        yield Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[str, argument])
    hints, defaults = get_type_hints(EnrichOptions), EnrichOptions(model="")
    job = {
        name: (panel, metavar or None, hints[name], getattr(defaults, name))
        for panel, options in JOB_OPTIONS.items()
        for name, _, metavar in (option.partition("=") for option in options.split())
    }
    for name, (panel, metavar, kind, default) in {**job, **COMMAND_OPTIONS, **further}.items():
        annotation = typer.Option(
            *([_flag(name)] if kind is bool or name in FLAGS else []),
            metavar=metavar,
            min=LEAST.get(name),
            help=re.sub(r"`(\w+)`", lambda match: _flag(match[1]), texts.get(name, "")),
            rich_help_panel=panel,
            show_default=bool(default),
        )
        yield Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if name == "model" else default,
            annotation=Annotated[kind, annotation],
        )
    yield from secure_options(SERVERS)


def version_option(program: str) -> Parameter:
    """Prints the name and the version of a program. `--version` is the model's."""

    def show(requested: bool) -> None:  # noqa: FBT001 - as typer calls it
        if requested:
            typer.echo(program)
            raise typer.Exit

    option = typer.Option(
        "--tool-version",
        "-V",
        help="Show the version of this program and exit.",
        is_eager=True,
        callback=show,
    )
    return Parameter(
        "tool_version", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def make_command(
    run: Callable[..., Summary],
    description: str,
    *,
    default_servers: Callable[[], Sequence[str]] = list,
    further: Mapping[str, Option] = {},
    program: str = "",
) -> Callable[..., None]:
    """The command of a function like `enrich`.

    Args:
        run: The function.
        description: What `--help` says.
        default_servers: The servers if none is named.
        further: Further options of the function, whose docstring says what they mean.
        program: Name and version, for a command that shows them.

    Arguments of the command:
        source: Path or URL of a Parquet or Arrow file, or of a folder of them.
        output: Path or URL of the result: a file for a file, a folder for either. The name of a file states
            its format: .parquet, .arrow, .arrows.
        quiet: Report no progress on stderr.
        as_json: Print the summary as JSON.
    """

    def command(ctx: typer.Context, source: str, output: str, **options: Any) -> None:
        options.pop("tool_version", None)
        _add_options_before(ctx, options)
        servers = ",".join(options["servers"] or default_servers()).split(",")
        options["servers"] = [server.strip() for server in servers if server.strip()]
        if options["servers"]:
            options["token"] = options["token"] or os.environ.get(TOKEN) or None
        options["progress"] = not options.pop("quiet")
        if options["template"] is not None:
            options["template"] = options["template"].replace("\\n", "\n")
        as_json = options.pop("as_json")
        files = [options.pop(name) for name in ("ca", "certificate", "private_key")]
        tls = bool(options.pop("tls"))
        try:
            summary = run(source, output, credentials=tls_files(*files, tls=tls), **options)
        except UsageError as error:  # has the names of options in Python
            message = re.sub(
                r"\w+", lambda word: _flag(word[0]) if word[0] in options else word[0], str(error)
            )
            raise typer.BadParameter(message) from error
        except (AttentionClientError, EnrichError, OSError) as error:
            fail(str(error))
        except ImportError as error:
            fail(f"{error}; install attention-client with its extra 'enrich'")
        except KeyboardInterrupt as error:
            kept = f": {error}" if error.args else ""
            typer.echo(f"interrupted{kept}; --resume continues the job", err=True)
            raise typer.Exit(INTERRUPTED) from None
        sys.stdout.write(_json(summary) if as_json else _text(summary))

    set_parameters(command, [*_parameters(run, further), *([version_option(program)] if program else [])])
    command.__doc__ = description
    return command


def _add_options_before(ctx: typer.Context, options: dict[str, Any]) -> None:
    """Adds the options of the connection that stand before the command, if there is a list of commands."""
    before = {name: value for name, value in (ctx.obj or {}).items() if value is not None}
    if unknown := before.keys() & {"timeout", "wait", "max_message_bytes"}:
        raise typer.BadParameter(f"enrich does not support {', '.join(map(_flag, sorted(unknown)))}")
    for name, value in before.items():
        option = {"server": "servers", "json": "as_json"}.get(name, name)
        options[option] = options[option] or ([value] if option == "servers" else value)


def _json(summary: Summary) -> str:
    """One line. The refused rows are listed in the file that `rejects` names."""
    values = {name: value for name, value in vars(summary).items() if name not in ("refusals", "table")}
    return json.dumps(values) + "\n"


def _text(summary: Summary) -> str:
    lines = [f"{summary.output}: {counted(summary.rows, 'row', 'rows')}"]
    if summary.already_complete:
        lines[0] += "; the job is already complete, nothing was computed"
    else:
        tokens = summary.tokens - summary.resumed_tokens
        rate = f"{summary.tokens_per_second:,.0f} tokens/s"
        lines.append(f"{tokens:,} tokens in {summary.seconds:,.1f} s, {rate}")
    parity = "unknown" if summary.parity_error is None else f"{summary.parity_error:.2g}"
    lines.append(
        f"model {summary.model}, version {summary.version}; largest difference from golden vectors {parity}"
    )
    notes = {
        "rows computed by earlier runs": 0 if summary.already_complete else summary.resumed_rows,
        "passages": summary.passages,
        "rows with texts that were cut to the tokens that the model takes": summary.truncated,
        "rows with nothing to compute (null)": summary.nulls,
    }
    lines += [f"{note}: {count:,}" for note, count in notes.items() if count]
    if summary.rejects:
        lines.append(f"{were_refused(summary.refused)}: {summary.rejects}")
    for server, failures in summary.server_failures.items():
        lines.append(f"server {server} failed {counted(failures, 'time', 'times')}")
    return "\n".join(lines) + "\n"


command = make_command(
    enrich,
    "Add context vectors, or embeddings of texts, to a table as a new column, computed on servers.\n\n"
    "Without --server, the server is that of the environment variable ATTENTION_SERVER, or 127.0.0.1:8001.",
    default_servers=lambda: [os.environ.get(SERVER) or DEFAULT_TARGET],
)
