"""Command line: `python -m server.http --target HOST:PORT`, for a gRPC server that runs elsewhere."""

import asyncio
import logging
import sys
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from server import logs
from server.errors import BindError
from server.http.listener import listen
from server.http.options import HttpOptions, LogFormat, LogLevel, LogRequests
from server.http.serve import Stop, serve
from server.shutdown import StopRequest, handle_signals
from server.tracing.options import trace_options

log = logging.getLogger("server.http")
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
        int, typer.Option(min=1, help="Maximum number of connections. Further ones are closed.")
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
        max_message_bytes=_size(max_message_bytes),
        max_in_flight_bytes=_size(max_in_flight_bytes),
        max_concurrent_requests=max_concurrent_requests,
        max_connections=max_connections,
        receive_timeout_seconds=receive_timeout_seconds,
        send_timeout_seconds=send_timeout_seconds,
        grace_seconds=grace_seconds,
        log_level=log_level,
        log_format=log_format,
        log_requests=log_requests,
        traces=trace_options("", None, host=host, port=port),
    )
    raise typer.Exit(_run(options, host, port))


def _run(options: HttpOptions, host: str, port: int) -> int:
    logs.configure(options.log_level, options.log_format)
    try:
        sockets = listen(host, port)
    except BindError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1

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
