"""Command line: `python -m server.http --target HOST:PORT`, for a gRPC server that runs elsewhere."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, ValidationError

from attention_serving.server.addresses import listen
from attention_serving.server.errors import ServerError
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.http.server import Stop, serve
from attention_serving.server.observe import logs
from attention_serving.server.observe.request_log import trace_options
from attention_serving.server.shutdown import StopRequest, handle_signals
from attention_serving.server.tls.files import TlsFiles, check_exposure

log = logging.getLogger("attention_serving.server.http")
application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(
    *,
    host: Annotated[str, typer.Option(help="Address or host name to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0 selects a free port.")
    ] = 8000,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of this process's certificate. Encrypts HTTP.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of authorities whose certificates clients must show.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow listening on a public address without encryption.")
    ] = False,
    **given: Any,
) -> None:
    """Serve HTTP/REST for a gRPC server. SIGTERM, SIGINT and SIGHUP stop it once requests have finished.

    OpenTelemetry's environment variables switch traces on.
    """
    tls = None
    if tls_certificate and tls_key:
        tls = TlsFiles(certificate=tls_certificate, key=tls_key, client_ca=tls_client_ca)
    elif tls_certificate or tls_key or tls_client_ca:
        raise typer.BadParameter("--tls-certificate and --tls-key are needed together")
    try:
        options = HttpOptions(**given, tls=tls, traces=trace_options("", host=host, port=port))
    except ValidationError as error:
        problem = error.errors()[0]
        raise typer.BadParameter(problem["msg"], param_hint=_flag(str(problem["loc"][0]))) from error
    raise typer.Exit(_run(options, host, port, insecure=insecure))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameters() -> Iterator[inspect.Parameter]:
    """The parameters of `main`, and one for each option that has a description."""
    own = inspect.signature(main).parameters.values()
    yield from (parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY)
    for name, field in HttpOptions.model_fields.items():
        if field.description:
            # pydantic reads sizes.
            is_size = field.annotation is ByteSize
            kind: Any = str if is_size else field.annotation
            default = field.default.human_readable().replace(".0", "") if is_size else field.default
            option = typer.Option(
                help=field.description, envvar="ATTENTION_SERVER" if name == "target" else None
            )
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.is_required() else default,
                annotation=Annotated[kind, option],
            )


# typer reads the options from the signature.
main.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
application.command()(main)


def _run(options: HttpOptions, host: str, port: int, *, insecure: bool) -> int:
    logs.configure(options.log_level, options.log_format)

    def begin(stop: Stop) -> None:
        loop = asyncio.get_running_loop()

        def stop_at_signal(request: StopRequest) -> None:
            log.info("draining", extra=request.fields)
            loop.call_soon_threadsafe(stop)

        handle_signals(stop_at_signal)
        bound = sockets[0].getsockname()[1]
        log.info("serving", extra={"host": host, "http_port": bound, "target": options.target})

    try:
        check_exposure(host, encrypted=options.tls is not None, insecure=insecure)
        sockets = listen(host, port)
        serve(options, sockets, begin)
    except ServerError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(application())
