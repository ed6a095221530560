"""Command line: `python -m server.http --target HOST:PORT`, for a gRPC server that runs elsewhere."""

import asyncio
import logging
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from attention_serving.server import logs
from attention_serving.server.errors import ServerError
from attention_serving.server.http.listener import listen
from attention_serving.server.http.options import HttpOptions, LogFormat, LogLevel, LogRequests
from attention_serving.server.http.serve import Stop, serve
from attention_serving.server.shutdown import StopRequest, handle_signals
from attention_serving.server.tls import exposure
from attention_serving.server.tls.files import TlsFiles
from attention_serving.server.tracing.options import trace_options

log = logging.getLogger("attention_serving.server.http")
application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
DEFAULTS = HttpOptions(target="")


def _size(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError as error:
        raise typer.BadParameter("must be a number of bytes or a size such as 64MiB") from error


@application.command()
def main(
    *,
    target: Annotated[
        str, typer.Option(help="The gRPC server: HOST:PORT or unix:PATH.", envvar="ATTENTION_SERVER")
    ],
    host: Annotated[str, typer.Option(help="Address or host name to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0 selects a free port.")
    ] = 8000,
    connections: Annotated[int, typer.Option(min=1, max=1024, help="Connections to the gRPC server.")] = 1,
    max_message_bytes: Annotated[str, typer.Option(help="Maximum size of a body, decompressed.")] = "64MiB",
    max_in_flight_bytes: Annotated[
        str, typer.Option(help="Maximum memory of requests in progress.")
    ] = "1GiB",
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Maximum number of inference requests in progress.")
    ] = DEFAULTS.max_concurrent_requests,
    max_connections: Annotated[
        int,
        typer.Option(
            min=1, help="Maximum number of connections. A further one replaces the one idle longest."
        ),
    ] = DEFAULTS.max_connections,
    receive_timeout_seconds: Annotated[
        float, typer.Option(min=0, help="How long a body may take to arrive, in seconds. 0 sets no limit.")
    ] = DEFAULTS.receive_timeout_seconds,
    send_timeout_seconds: Annotated[
        float, typer.Option(min=0, help="How long a client may take to read on, in seconds. 0 sets no limit.")
    ] = DEFAULTS.send_timeout_seconds,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long requests in progress may take at the end, in seconds.")
    ] = DEFAULTS.grace_seconds,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM file of this process's certificate. Encrypts HTTP.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file of authorities whose certificates clients must show.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept to listen on a public address without encryption.")
    ] = False,
    authorize: Annotated[
        bool,
        typer.Option(
            help="Ask the gRPC server who may call before a large body is read: for a server with tokens."
        ),
    ] = DEFAULTS.authorize,
    explore: Annotated[
        bool, typer.Option(help="Serve a page at /explore that draws the attention weights of texts.")
    ] = DEFAULTS.explore,
    log_level: Annotated[LogLevel, typer.Option(help="Minimum level of events.")] = DEFAULTS.log_level,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log.")] = DEFAULTS.log_format,
    log_requests: Annotated[
        LogRequests, typer.Option(help="Requests that have a line in the log.")
    ] = DEFAULTS.log_requests,
) -> None:
    """Serve HTTP/REST for a gRPC server. SIGTERM, SIGINT and SIGHUP stop it once requests have finished.

    OpenTelemetry's environment variables switch traces on.
    """
    options = HttpOptions(
        target=target,
        connections=connections,
        tls=_tls_files(tls_certificate, tls_key, tls_client_ca),
        max_message_bytes=_size(max_message_bytes),
        max_in_flight_bytes=_size(max_in_flight_bytes),
        max_concurrent_requests=max_concurrent_requests,
        max_connections=max_connections,
        receive_timeout_seconds=receive_timeout_seconds,
        send_timeout_seconds=send_timeout_seconds,
        grace_seconds=grace_seconds,
        authorize=authorize,
        explore=explore,
        log_level=log_level,
        log_format=log_format,
        log_requests=log_requests,
        traces=trace_options("", host=host, port=port),
    )
    raise typer.Exit(_run(options, host, port, insecure=insecure))


def _tls_files(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
    if certificate and key:
        return TlsFiles(certificate=certificate, key=key, client_ca=client_ca)
    if certificate or key or client_ca:
        raise typer.BadParameter("--tls-certificate and --tls-key are needed together")
    return None


def _run(options: HttpOptions, host: str, port: int, *, insecure: bool) -> int:
    logs.configure(options.log_level, options.log_format)
    try:
        exposure.check(host, encrypted=options.tls is not None, insecure=insecure)
        return _serve(options, listen(host, port), host)
    except ServerError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1


def _serve(options: HttpOptions, sockets: list[socket.socket], host: str) -> int:

    def begin(stop: Stop) -> None:
        loop = asyncio.get_running_loop()

        def stop_at_signal(request: StopRequest) -> None:
            log.info("draining", extra=request.fields)
            loop.call_soon_threadsafe(stop)

        handle_signals(stop_at_signal)
        bound = sockets[0].getsockname()[1]
        log.info("serving", extra={"host": host, "http_port": bound, "target": options.target})

    serve(options, sockets, begin)
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(application())
