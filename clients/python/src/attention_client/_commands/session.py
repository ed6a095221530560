"""What all commands share: the options of the connection, before or after the command, and error handling.

What the help of a command says of its options is what the docstring of its function says of its arguments.
"""

import inspect
import os
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from typer.models import OptionInfo

from attention_client import AttentionClient, AttentionClientError, InvalidArgumentError
from attention_client._connection.settings import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_TARGET, DEFAULT_TIMEOUT
from attention_client._connection.tls import tls_files

_CONNECTION = "Connection (before or after the command)"
SERVER, TOKEN = "ATTENTION_SERVER", "ATTENTION_TOKEN"


def option(*names: str, metavar: str | None = None, panel: str = _CONNECTION, **options: Any) -> Any:
    """An option whose help is in the docstring of its command."""
    return typer.Option(*names, metavar=metavar, rich_help_panel=panel, show_default=False, **options)


def texts_of(documented: Any, section: str) -> dict[str, str]:
    """What a docstring says of each argument or attribute."""
    text = inspect.cleandoc(documented.__doc__ or "").partition(section)[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def parameters_of(command: Callable[..., Any]) -> list[Parameter]:
    """The keyword parameters of a function, with what its docstring says of them as their help."""
    texts = texts_of(command, "Options:")
    return [
        _change(parameter, help=texts[name]) if name in texts else parameter
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    ]


def _change(parameter: Parameter, **attributes: Any) -> Parameter:
    kind, annotation = get_args(parameter.annotation)
    changed = copy(annotation)
    vars(changed).update(attributes)
    return parameter.replace(annotation=Annotated[kind, changed])


def connect(
    *,
    server: Annotated[str | None, option(metavar="HOST:PORT")] = None,
    timeout: Annotated[float | None, option(metavar="SECONDS")] = None,
    wait: Annotated[bool | None, option("--wait")] = None,
    token: Annotated[str | None, option(metavar="TOKEN")] = None,
    tls: Annotated[bool | None, option("--tls")] = None,
    ca: Annotated[Path | None, option("--ca", "--tls-ca", metavar="FILE")] = None,
    certificate: Annotated[Path | None, option(metavar="FILE")] = None,
    private_key: Annotated[Path | None, option("--key", "--private-key", metavar="FILE")] = None,
    max_message_bytes: Annotated[int | None, option(metavar="BYTES", min=1)] = None,
) -> AttentionClient:
    """A client as the options of the command line describe it.

    Options:
        server: Server, or several separated by commas. Default: ATTENTION_SERVER, or else 127.0.0.1:8001.
        timeout: Longest time that a call may take, in seconds, above 0. Default: 30.
        wait: Wait for the server to start, up to the timeout, rather than fail.
        token: Bearer token of every call. Default: ATTENTION_TOKEN.
        tls: Encrypt the connection; verify with the system's certificates.
        ca: Encrypt the connection; verify the server with the authorities of this PEM file.
        certificate: Encrypt the connection; show this certificate (PEM). Needs its key.
        private_key: Private key (PEM) of --certificate.
        max_message_bytes: Largest request and response, in bytes, 1 or more. Default: 67108864 (64 MiB).

    Raises:
        typer.BadParameter: An option has a value that is not allowed.
    """
    try:
        return AttentionClient(
            _targets(server),
            credentials=tls_files(ca, certificate, private_key, tls=bool(tls)),
            token=token or os.environ.get(TOKEN) or None,
            timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
            wait_for_ready=bool(wait),
            max_message_bytes=DEFAULT_MAX_MESSAGE_BYTES if max_message_bytes is None else max_message_bytes,
        )
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message) from error


def secure_options(panel: str) -> list[Parameter]:
    """The options of a connection that other commands have as well."""
    names = ("token", "tls", "ca", "certificate", "private_key")
    return [_change(item, rich_help_panel=panel) for item in parameters_of(connect) if item.name in names]


# None means that an option was not given here, so that one before the command applies.
_JSON = Parameter(
    "json",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[bool | None, option("--json", panel="Output", help="Print JSON rather than text.")],
)
_SHARED = [*parameters_of(connect), _JSON]


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with.

    Attributes:
        client: A client of the server.
        json: Whether to print JSON.
        waits: Whether to wait for the server.
        timeout: Longest time that a call may take, in seconds.
        token: Bearer token of every call; empty for none.
    """

    client: AttentionClient
    json: bool
    waits: bool
    timeout: float
    token: str


def add_options(callback: Callable[..., None]) -> Callable[..., None]:
    """The callback of the root command, extended by the shared options, which it stores for the commands."""

    def run(ctx: typer.Context, **values: Any) -> None:
        ctx.obj = {parameter.name: values.pop(parameter.name) for parameter in _SHARED}
        callback(**values)

    return _with_shared_options(run, callback)


def add_command(app: typer.Typer, command: Callable[..., None], *, panel: str) -> None:
    """Adds a command whose first argument is a Session, extended by the shared options."""
    annotations = {item.name: get_args(item.annotation)[-1] for item in parameters_of(command)}
    option_names = {name for name, annotation in annotations.items() if isinstance(annotation, OptionInfo)}

    def run(ctx: typer.Context, **values: Any) -> None:
        options = {parameter.name: values.pop(parameter.name) for parameter in _SHARED}
        options = {name: ctx.obj[name] if value is None else value for name, value in options.items()}
        json = bool(options.pop("json"))
        options["server"] = values.get("grpc") or options["server"]  # the option of `prove`
        timeout = options["timeout"] or DEFAULT_TIMEOUT
        token = options["token"] or os.environ.get(TOKEN) or ""
        try:
            with connect(**options) as client:
                command(Session(client, json, bool(options["wait"]), timeout, token), **values)
        except BrokenPipeError:  # as of `… | head`, which ends the command
            raise
        except (AttentionClientError, OSError, ValueError) as error:
            # The client's argument has the name of the option.
            argument = re.split(r"\W", getattr(error, "field", ""))[0]
            is_option = argument in option_names and str(error).startswith(argument)
            option_name = argument.replace("_", "-")
            fail(f"--{option_name}{str(error).removeprefix(argument)}" if is_option else str(error))

    app.command(command.__name__.rstrip("_"), rich_help_panel=panel)(_with_shared_options(run, command))


def _with_shared_options(run: Callable[..., None], command: Callable[..., None]) -> Callable[..., None]:
    """Gives a function the parameters that typer reads: context, the command's own, and the shared ones."""
    parameters, shared = parameters_of(command), _SHARED
    if any(parameter.name == "key" for parameter in parameters):  # the --key of the command is an array
        only = {"default": "--private-key", "param_decls": ()}  # as typer stores the names of an option
        shared = [_change(item, **only) if item.name == "private_key" else item for item in shared]
    context = Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)
    set_parameters(run, [context, *parameters, *shared])
    run.__doc__ = inspect.cleandoc(command.__doc__ or "").partition("\n\nOptions:")[0]
    return run


def set_parameters(run: Callable[..., None], parameters: list[Parameter]) -> None:
    """Gives a function the parameters that typer reads."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


ModelName = Annotated[str, typer.Option("--model", metavar="NAME", help="Name of the model.")]
ModelVersion = Annotated[
    str,
    option(metavar="N", panel="Options", help="Version of the model. Default: the highest that is ready."),
]


def fail(message: str) -> NoReturn:
    """Prints one line and ends with exit code 1."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


def _targets(server: str | None) -> str | list[str]:
    server = server or os.environ.get(SERVER) or DEFAULT_TARGET
    return server.split(",") if "," in server and ":///" not in server else server
