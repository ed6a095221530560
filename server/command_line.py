"""Reads the settings from flags, environment variables and a TOML file. Errors name the source of a value."""

import inspect
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin

import typer
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from attention_serving.server import NAME, VERSION
from attention_serving.server.settings import SECTIONS, Settings

PREFIX = "ATTENTION_"
# The value of an option as it was given: text, or whether a switch is on.
Value: TypeAlias = str | bool
# The name of an option, its value, and a description of both.
Given: TypeAlias = tuple[str, tuple[Value, str]]
CONFIG = "config"
# Variables of the client's commands and of the benchmarks, which may be set in the same shell.
OTHER_VARIABLES = frozenset({f"{PREFIX}SERVER", f"{PREFIX}TOKEN", f"{PREFIX}PEERS"})
MAX_SHOWN = 200
MAX_METAVAR = 16
METAVARS: dict[Any, str] = {
    ByteSize: "SIZE",
    Path: "FOLDER",
    Path | None: "FILE",
    int: "INTEGER",
    int | None: "INTEGER",
    float: "NUMBER",
    float | None: "NUMBER",
}
HELP = "\n\n".join(
    (
        "Serve the models of a repository over gRPC.",
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


class SettingsError(Exception):
    """The settings are invalid. The message has one line for each problem."""


@dataclass
class Sources:
    """The given values by option name, and for each a description of the value and its source."""

    values: dict[str, Any] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    file: Path | None = None

    def add(self, name: str, value: Any, description: str) -> None:
        """Sets a value, which replaces one from a source of lower precedence."""
        self.values[name] = value
        self.descriptions[name] = _bounded(description)

    def add_file(self, file: Path) -> None:
        """Reads a TOML file.

        Raises:
            SettingsError: The file cannot be read or is not TOML.
        """
        try:
            content = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(f"{file}: the configuration file cannot be read: {reason}") from error
        self.file = file
        for name, value in content.items():
            self.add(name, value, f"{file}: {name} = {json.dumps(value, default=str)}")


def make_application(serve: Callable[[Settings], int]) -> typer.Typer:
    """The command `python -m server`.

    Args:
        serve: Serves with the given settings, and returns the exit status.
    """
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def command(context: typer.Context, **flags: Value | None) -> None:
        try:
            settings = read_settings(context, flags)
        except SettingsError as error:
            typer.echo("\n".join(f"error: {line}" for line in str(error).splitlines()), err=True)
            raise typer.Exit(2) from error
        raise typer.Exit(serve(settings))

    # typer reads the options from the signature: one for each field of the settings.
    command.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    names = {"help_option_names": ["-h", "--help"]}
    application.command(help=HELP, epilog=EPILOG, context_settings=names)(command)
    return application


def read_settings(context: typer.Context, flags: Mapping[str, Value | None]) -> Settings:
    """The settings of a parsed command line.

    Raises:
        SettingsError: A value, a variable or the file is invalid.
    """
    sources = Sources()
    given = dict(_given(context, flags))
    if CONFIG in given:
        file, description = given.pop(CONFIG)
        path = Path(str(file))
        if not path.is_file():
            raise SettingsError(f"{description}: the file does not exist")
        sources.add_file(path)
    for name, (value, description) in given.items():
        sources.add(name, value, description)
    try:
        return Settings.model_validate(sources.values)
    except ValidationError as error:
        problems = [_problem(details, sources) for details in error.errors()]
        raise SettingsError("\n".join(problems)) from error


def unknown_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Environment variables that begin with ATTENTION_ but set no option, each with the most similar name.

    The second name is empty if no name is similar.
    """
    known = {_variable(name): name.upper() for name in (CONFIG, *Settings.model_fields)}
    for variable in sorted(environment):
        if variable in known or variable in OTHER_VARIABLES or not variable.upper().startswith(PREFIX):
            continue
        similar = get_close_matches(variable.upper().removeprefix(PREFIX), known.values(), 1)
        yield variable, f"{PREFIX}{similar[0]}" if similar else ""


def _given(context: typer.Context, flags: Mapping[str, Value | None]) -> Iterator[Given]:
    """The options that were given as flags or variables: name, value and description of the source."""
    for name, value in flags.items():
        source = context.get_parameter_source(name)
        if value is None or source is None:
            continue
        if source.name == "COMMANDLINE":
            shown = _flag(name) if isinstance(value, bool) else f"{_flag(name)} {_shown(value)}"
            yield name, (value, shown)
        elif source.name == "ENVIRONMENT":
            yield name, (value, f"{_variable(name)}={_shown(value)}")


def _parameters() -> Iterator[inspect.Parameter]:
    yield inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    for section, model in SECTIONS.items():
        for name, option in model.model_fields.items():
            if option.annotation is bool:
                yield _switch(name, option.description, section)
                continue
            yield _parameter(name, option.description, _metavar(option), _default(option), section)
    yield _parameter(CONFIG, "TOML file with values for any of these options.", "FILE", None, "Options")
    show = typer.Option(
        "--version", help="Print name and version, and exit.", is_eager=True, callback=_print_version
    )
    yield _keyword("version", Annotated[bool, show], default=False)


def _parameter(
    name: str, text: str | None, metavar: str, default: str | None, section: str
) -> inspect.Parameter:
    """An option whose value typer passes on as text: pydantic converts and checks it."""
    option = typer.Option(
        _flag(name),
        help=text,
        metavar=metavar,
        envvar=_variable(name),
        show_envvar=False,
        rich_help_panel=section,
    )
    return _keyword(name, Annotated[str | None, option], default=default)


def _switch(name: str, text: str | None, section: str) -> inspect.Parameter:
    """An option without a value. As an environment variable, it has one: true or false."""
    option = typer.Option(
        _flag(name), help=text, envvar=_variable(name), show_envvar=False, rich_help_panel=section
    )
    return _keyword(name, Annotated[bool, option], default=False)


def _keyword(name: str, annotation: Any, *, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _print_version(requested: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if requested:
        typer.echo(f"{NAME} {VERSION}")
        raise typer.Exit


def _metavar(option: FieldInfo) -> str:
    kind: Any = option.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        choices = tuple(kind)
    if choices:
        listed = "|".join(choices)
        return listed if len(listed) <= MAX_METAVAR else "CHOICE"  # the description lists them
    return METAVARS.get(kind, "TEXT")


def _default(option: FieldInfo) -> str | None:
    if option.is_required() or option.default is None:
        return None
    if isinstance(option.default, ByteSize):
        return option.default.human_readable().replace(".0", "")
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _problem(details: ErrorDetails, sources: Sources) -> str:
    """One line: the source and the value, the rule, and what the option takes."""
    name = str(details["loc"][0])
    if details["type"] == "missing":
        return f"{_flag(name)} is required; {_variable(name)} and {name} in a TOML file set it too"
    source = sources.descriptions.get(name, _flag(name))  # a default may be invalid beside another option
    if name not in Settings.model_fields:
        similar = get_close_matches(name, Settings.model_fields, 1)
        return f"{source}: unknown option" + (f"; did you mean {similar[0]}?" if similar else "")
    rule = details["msg"]
    if details["type"].startswith("byte_size"):
        rule = "must be a number of bytes or a size such as 64MiB"
    return f"{source}: {rule[0].lower()}{rule[1:]} ({Settings.model_fields[name].description})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return str(value)
    return value if value and value.isprintable() else repr(value)


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
