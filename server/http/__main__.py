"""Command line: `python -m server.http --target HOST:PORT`, for a gRPC server that runs elsewhere."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from attention_serving.server.addresses import check_exposure, listen
from attention_serving.server.command_line import shown_default
from attention_serving.server.errors import ServerError
from attention_serving.server.http.child import MAX_CONNECTIONS, HttpOptions
from attention_serving.server.http.server import serve
from attention_serving.server.observe import logs
from attention_serving.server.settings import Settings

log = logging.getLogger("attention_serving.server.http")
application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# As users of Triton expect.
PORT = "8000"
# Settings of the server that are options here too, and their names here.
SHARED = (
    *("host", "insecure", "tls_certificate", "tls_key", "tls_client_ca", "max_connections"),
    *("max_message_bytes", "max_memory", "max_in_flight_bytes", "message_timeout_seconds"),
    *("grace_seconds", "log_level", "log_format", "log_requests"),
)
FLAGS = {name: f"--{name.replace('_', '-')}" for name in SHARED} | {
    "http_port": "--port",
    "max_concurrent_calls": "--max-concurrent-requests",
    "http_explore": "--explore",
}


def main(
    *,
    target: Annotated[
        str, typer.Option(help="The gRPC server: HOST:PORT or unix:PATH.", envvar="ATTENTION_SERVER")
    ],
    connections: Annotated[
        int, typer.Option(min=1, max=MAX_CONNECTIONS, help="Connections to it: a few for each worker.")
    ] = 1,
    authorize: Annotated[
        bool, typer.Option("--authorize", help="Ask it who may call before a large body is read.")
    ] = False,
    **given: Any,
) -> None:
    """Serve HTTP/REST for a gRPC server. SIGTERM, SIGINT and SIGHUP stop it once requests have finished.

    OpenTelemetry's environment variables switch traces on.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings.model_validate({"model_repository": Path(), **chosen})
    except ValidationError as error:
        problem = error.errors()[0]
        raise typer.BadParameter(problem["msg"], param_hint=FLAGS[str(problem["loc"][0])]) from error
    logs.configure(settings.log_level, settings.log_format)
    options = HttpOptions(settings=settings, targets=(target,) * connections, authorize=authorize)
    try:
        encrypted = settings.tls_files is not None
        check_exposure(settings.host, encrypted=encrypted, insecure=settings.insecure)
        asyncio.run(serve(options, listen(settings.host, settings.http_port or 0)))
    except ServerError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        raise typer.Exit(1) from error
    log.info("stopped")


def _parameters() -> Iterator[inspect.Parameter]:
    """The parameters of `main`, and one for each shared setting, whose text pydantic converts and checks."""
    kind = inspect.Parameter.KEYWORD_ONLY
    yield from (each for each in inspect.signature(main).parameters.values() if each.kind is kind)
    for name, flag in FLAGS.items():
        field = Settings.model_fields[name]
        default: Any = PORT if name == "http_port" else shown_default(field)
        annotation: Any = str | None
        if field.annotation is bool:
            default, annotation = False, bool
        option = typer.Option(flag, help=field.description)
        yield inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, option])


# typer reads the options from the signature.
main.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
application.command()(main)

if __name__ == "__main__":
    sys.exit(application())
