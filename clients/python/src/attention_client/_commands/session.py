"""What all commands share: the options of the connection, before or after the command, and error handling."""

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from attention_client import AttentionClient, AttentionClientError, InvalidArgumentError
from attention_client._connection.settings import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_TARGET, DEFAULT_TIMEOUT
from attention_client._connection.tls import tls_files

_ValueT = TypeVar("_ValueT")
_CONNECTION = "Connection (before or after the command)"
_SERVER, _TOKEN = "ATTENTION_SERVER", "ATTENTION_TOKEN"


_SIZE = re.compile(r"([0-9]+) *([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def _size(text: str) -> int:
    """Reads a number of bytes, such as 64MiB."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise typer.BadParameter(f"{text!r} is not a size: give a number of bytes, or a size such as 64MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _option(*names: str, text: str, panel: str = _CONNECTION, **options: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **options)


_PRIVATE_KEY: dict[str, Any] = {"metavar": "FILE", "text": "Private key (PEM) of --certificate."}


def secure_options(panel: str) -> dict[str, Any]:
    """The options of a connection that other commands have as well, by the names of their parameters."""
    certificate = "Encrypt the connection; show this certificate (PEM). Needs its key."
    authorities = "Encrypt the connection; verify the server with the authorities of this PEM file."
    system = "Encrypt the connection; verify with the system's certificates."
    token = f"Bearer token of every call. Default: {_TOKEN}."
    return {
        "token": Annotated[str | None, _option("--token", metavar="TOKEN", text=token, panel=panel)],
        "tls": Annotated[bool | None, _option("--tls", text=system, panel=panel)],
        "ca": Annotated[
            Path | None, _option("--ca", "--tls-ca", metavar="FILE", text=authorities, panel=panel)
        ],
        "certificate": Annotated[
            Path | None, _option("--certificate", metavar="FILE", text=certificate, panel=panel)
        ],
        "private_key": Annotated[Path | None, _option("--key", "--private-key", panel=panel, **_PRIVATE_KEY)],
    }


# None means that the option was not given here, so that one before the command applies.
_OPTIONS: dict[str, Any] = {
    "server": Annotated[
        str | None,
        _option(
            "--server",
            metavar="HOST:PORT",
            text=f"Server, or several separated by commas. Default: {_SERVER}, or else {DEFAULT_TARGET}.",
        ),
    ],
    "timeout": Annotated[
        float | None,
        _option(
            "--timeout",
            metavar="SECONDS",
            text=f"Longest time that a call may take, in seconds, above 0. Default: {DEFAULT_TIMEOUT:g}.",
        ),
    ],
    "wait": Annotated[
        bool | None,
        _option("--wait", text="Wait for the server to start, up to the timeout, rather than fail."),
    ],
    **secure_options(_CONNECTION),
    "max_message_bytes": Annotated[
        int | None,
        _option(
            "--max-message-bytes",
            metavar="SIZE",
            text="Largest request and response, above 0: a number of bytes, or a size such as 1GiB. "
            f"Default: {DEFAULT_MAX_MESSAGE_BYTES >> 20}MiB.",
            parser=_size,
        ),
    ],
    "json": Annotated[bool | None, _option("--json", text="Print JSON rather than text.", panel="Output")],
}


@dataclass(frozen=True, slots=True)
class Session:
    """What a command works with.

    Attributes:
        client: A client of the server.
        json: Whether to print JSON.
        waits: Whether to wait for the server.
    """

    client: AttentionClient
    json: bool
    waits: bool


def add_options(callback: Callable[..., None]) -> Callable[..., None]:
    """The callback of the root command, extended by the shared options, which it stores for the commands."""

    def run(ctx: typer.Context, **values: Any) -> None:
        ctx.obj = {name: values.pop(name) for name in _OPTIONS}
        callback(**values)

    return _with_parameters(run, callback, list(inspect.signature(callback).parameters.values()))


def add_command(app: typer.Typer, command: Callable[..., None], *, panel: str) -> None:
    """Adds a command whose first argument is a Session, extended by the shared options."""

    def run(ctx: typer.Context, **values: Any) -> None:
        given = {name: values.pop(name) for name in _OPTIONS}
        given = {name: ctx.obj[name] if value is None else value for name, value in given.items()}
        try:
            with _client(given) as client:
                command(Session(client, json=bool(given["json"]), waits=bool(given["wait"])), **values)
        except (AttentionClientError, OSError, ValueError) as error:
            fail(str(error))

    own = list(inspect.signature(command).parameters.values())[1:]
    app.command(command.__name__, rich_help_panel=panel)(_with_parameters(run, command, own))


def complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the server's models, for the shell; none if the server does not answer within a second."""
    server = ctx.params.get("server") or ctx.find_root().params.get("server")
    try:
        with AttentionClient(_targets(server), wait_for_ready=False, max_retries=0) as client:
            names = {model.name for model in client.models(timeout=1)}
    except AttentionClientError:
        return []
    return sorted(name for name in names if name.startswith(incomplete))


MODEL_NAME: dict[str, Any] = {
    "metavar": "NAME",
    "help": "Name of the model.",
    "autocompletion": complete_model,
}
ModelName = Annotated[str, typer.Option("--model", **MODEL_NAME)]
ModelVersion = Annotated[
    str,
    typer.Option(
        "--version",
        metavar="N",
        help="Version of the model. Default: the highest that is ready.",
        show_default=False,
    ),
]


def fail(message: str) -> NoReturn:
    """Prints one line and ends with exit code 1."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


def _client(given: dict[str, Any]) -> AttentionClient:
    try:
        return AttentionClient(
            _targets(given["server"]),
            credentials=tls_files(
                given["ca"], given["certificate"], given["private_key"], tls=bool(given["tls"])
            ),
            token=given["token"] or os.environ.get(_TOKEN) or None,
            timeout=_or_default(given["timeout"], DEFAULT_TIMEOUT),
            wait_for_ready=bool(given["wait"]),
            max_message_bytes=_or_default(given["max_message_bytes"], DEFAULT_MAX_MESSAGE_BYTES),
        )
    except InvalidArgumentError as error:
        raise typer.BadParameter(error.message) from error


def _or_default(value: _ValueT | None, default: _ValueT) -> _ValueT:
    return default if value is None else value


def _targets(server: str | None) -> str | list[str]:
    server = server or os.environ.get(_SERVER) or DEFAULT_TARGET
    return server.split(",") if "," in server and ":///" not in server else server


def _with_parameters(
    run: Callable[..., None], original: Callable[..., None], own: list[inspect.Parameter]
) -> Callable[..., None]:
    """Gives a function the signature that typer reads: context, own parameters, shared options."""
    options = dict(_OPTIONS)
    if any(item.name == "key" for item in own):  # the command's own --key is an array
        options["private_key"] = Annotated[Path | None, _option("--private-key", **_PRIVATE_KEY)]
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    parameters = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in (context, *own, *shared)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__doc__ = original.__doc__
    return run
