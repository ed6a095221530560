"""Reads the settings from flags, environment variables and a TOML file. Errors name the source of a value."""

import inspect
import json
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from attention_serving.server import NAME, VERSION
from attention_serving.server.errors import ServerError
from attention_serving.server.settings import SECTIONS, Settings

PREFIX = "ATTENTION_"
# Options by name: the value, and a description of the value and its source.
Options: TypeAlias = dict[str, tuple[Any, str]]
Flag: TypeAlias = str | bool | list[str] | None
CONFIG = "config"
# Variables of the client's commands and of the benchmarks, which may be set in the same shell.
OTHER_VARIABLES = {f"{PREFIX}SERVER", f"{PREFIX}TOKEN", f"{PREFIX}PEERS"}
MAX_SHOWN = 200
METAVAR_WIDTH = 17
METAVARS = {ByteSize: "SIZE", Path: "PATH", int: "INTEGER", float: "NUMBER"}
HELP = "\n\n".join(
    (
        "Serve the models of a repository over gRPC, and over HTTP with --http-port.",
        f"Every option can also be set with an environment variable ({PREFIX}PORT for --port) or a key of"
        " a TOML file (port = 8001). Flags take precedence over environment variables, and environment"
        " variables over the file.",
        "A size is a number of bytes, or a number with a unit, such as 64MiB or 1GiB.",
    )
)
EPILOG = (
    "SIGTERM, SIGINT and SIGHUP stop the server after the calls in progress have finished. A SIGHUP that was"
    " ignored at startup, as under nohup, stays ignored."
)


def create_command(serve: Callable[[Settings], int]) -> typer.Typer:
    """The command `python -m server`.

    Args:
        serve: Serves with the given settings, and returns the exit status.
    """
    group = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def command(context: typer.Context, **flags: Flag) -> None:
        try:
            settings = read_settings(context, flags)
        except ServerError as error:
            typer.echo("\n".join(f"error: {line}" for line in str(error).splitlines()), err=True)
            raise typer.Exit(2) from error
        raise typer.Exit(serve(settings))

    # typer reads the options from the signature: one for each field of the settings.
    command.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    names = {"help_option_names": ["-h", "--help"]}
    group.command(help=HELP, epilog=EPILOG, context_settings=names)(command)
    return group


def read_settings(context: typer.Context, flags: Mapping[str, Flag]) -> Settings:
    """The settings of a parsed command line.

    Raises:
        ServerError: A value, a variable or the file is invalid.
    """
    options: Options = {}
    for name, value in flags.items():
        source = context.get_parameter_source(name)
        if value is None or source is None:
            continue
        value = ",".join(value) if isinstance(value, list) else value  # noqa: PLW2901 - of an option that repeats
        text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
        if source.name == "COMMANDLINE":
            options[name] = value, _flag(name) if isinstance(value, bool) else f"{_flag(name)} {text}"
        elif source.name == "ENVIRONMENT":
            options[name] = value, f"{_variable(name)}={text}"
    if CONFIG in options:
        options = {**_of_file(*options.pop(CONFIG)), **options}
    try:
        return Settings.model_validate({name: value for name, (value, _) in options.items()})
    except ValidationError as error:
        raise ServerError("\n".join(_problem(details, options) for details in error.errors())) from error


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Environment variables that look like those of this program and set nothing: most likely a slip."""
    variables = OTHER_VARIABLES | {_variable(name) for name in (CONFIG, *Settings.model_fields)}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in variables)


def shown_default(option: FieldInfo) -> str | None:
    """The default of an option, as it is typed; None if there is none."""
    value = option.get_default()
    if option.is_required() or value in (None, "", {}):
        return None
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "") if value else "0"
    # Without separators, and a float without ".0".
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def _of_file(name: str, source: str) -> Options:
    """The options that a TOML file sets."""
    file = Path(name)
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ServerError(f"{source}: the configuration file cannot be read: {reason}") from error
    return {
        name: (value, f"{file}: {name} = {json.dumps(value, default=str)}") for name, value in content.items()
    }


def _parameters() -> Iterator[inspect.Parameter]:
    """What typer passes on: texts, which pydantic converts and checks.

    A switch has no value. As an environment variable, it has one: true or false.
    """
    file = FieldInfo(annotation=Path, default=None, description="TOML file with values for these options.")
    sections = {title: section.model_fields for title, section in SECTIONS.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", keyword, annotation=typer.Context)
    for title, fields in (*sections.items(), ("Options", {CONFIG: file})):
        for name, field in fields.items():
            is_switch = field.annotation is bool
            option = typer.Option(
                _flag(name),
                help=field.description,
                metavar=None if is_switch else _metavar(field.annotation),
                envvar=_variable(name),
                show_envvar=False,
                rich_help_panel=title,
            )
            kind: Any = list[str] if get_origin(field.annotation) is dict else str
            kind, default = (bool, False) if is_switch else (kind | None, shown_default(field))
            yield inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])
    show = typer.Option(
        "--version", help="Print name and version, and exit.", is_eager=True, callback=_print_version
    )
    yield inspect.Parameter("version", keyword, default=False, annotation=Annotated[bool, show])


def _print_version(requested: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if requested:
        typer.echo(f"{NAME} {VERSION}")
        raise typer.Exit


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        # In lines, which leave room for the names of options in a terminal of 80 columns.
        return textwrap.fill("| ".join(get_args(kind)), METAVAR_WIDTH).replace("| ", "|")
    if isinstance(kind, type) and kind in METAVARS:
        return METAVARS[kind]
    return next((name for part in get_args(kind) if (name := _metavar(part)) != "TEXT"), "TEXT")


def _problem(details: ErrorDetails, options: Options) -> str:
    """One line: the source and the value, the rule, and what the option takes."""
    name = str(details["loc"][0])
    if details["type"] == "missing":
        return f"{_flag(name)} is required; {_variable(name)} and {name} in a TOML file set it too"
    _, source = options.get(
        name, (None, _flag(name))
    )  # a default may be invalid in combination with another option
    if len(source) > MAX_SHOWN:
        source = f"{source[:MAX_SHOWN]}..."
    if name not in Settings.model_fields:
        similar = get_close_matches(name, Settings.model_fields, 1)
        return f"{source}: unknown option" + (f"; did you mean {similar[0]}?" if similar else "")
    rule = details["msg"].removeprefix("Value error, ")
    if details["type"].startswith("byte_size"):
        rule = "must be a number of bytes or a size such as 64MiB"
    return f"{source}: {rule[0].lower()}{rule[1:]} ({Settings.model_fields[name].description})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"
