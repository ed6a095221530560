"""Runs uvicorn on open sockets until it is asked to stop."""

import asyncio
import errno
import logging
import math
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import uvicorn

from attention_serving.server.http.application import create_application
from attention_serving.server.http.connection import IDLE_SECONDS, connection_type
from attention_serving.server.http.listener import BACKLOG
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.tls.context import renewing_context
from attention_serving.server.tls.files import CurrentCertificates
from attention_serving.server.tls.watch import current_certificates

Stop = Callable[[], None]
# How long a client may take for a handshake, and to answer the end of a connection. An idle one does not.
HANDSHAKE_SECONDS, GOODBYE_SECONDS = 10.0, 0.5
# Why a connection cannot be accepted: the process or the system has no descriptors or no memory left.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
log = logging.getLogger(__name__)


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with what uvicorn cannot be told: times of handshakes, and calm without descriptors."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        """As of asyncio, with limits for the time that encrypted connections take to begin and to end.

        asyncio accepts up to `backlog` connections in a row. If there are no descriptors, it logs a traceback
        for each of them, and tries each again after a second.
        """
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
            options["ssl_shutdown_timeout"] = GOODBYE_SECONDS
        server = await super().create_server(*arguments, **{**options, "backlog": 1})
        options["sock"].listen(BACKLOG)  # asyncio has told the system that only one may wait
        return server

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As of asyncio, without the traceback of a connection that cannot be accepted now."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            log.error("connections wait", extra={"reason": error.strerror})
        else:
            super().call_exception_handler(context)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process: uvicorn would raise them again at the end."""
        yield


def serve(options: HttpOptions, sockets: Sequence[socket.socket], begin: Callable[[Stop], None]) -> None:
    """Serves until it is asked to stop, and returns when the requests in progress have been answered.

    Args:
        options: What the process does.
        sockets: Where it listens.
        begin: Called in the event loop before the first request, with a function that asks to stop.

    Raises:
        TlsError: A certificate cannot be used.
    """
    # Their events say what this server's own log says too, or nothing about requests.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(logging.INFO)
    configuration = _configuration(options, current_certificates(options.tls))
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.run(_serve(_Server(configuration), list(sockets), begin))


async def _serve(server: uvicorn.Server, sockets: list[socket.socket], begin: Callable[[Stop], None]) -> None:
    def stop() -> None:
        server.should_exit = True

    # Work on large bodies holds the interpreter's lock most of the time: more threads would not finish it
    # sooner, and each would take turns from the event loop.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "large-bodies"))
    begin(stop)
    await server.serve(sockets)


def _configuration(options: HttpOptions, certificates: CurrentCertificates | None) -> uvicorn.Config:
    receive, send = options.receive_timeout_seconds, options.send_timeout_seconds
    return uvicorn.Config(
        create_application(options),
        http=connection_type(options.max_connections, receive, send),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=_context_factory(certificates) if certificates else None,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=None
        if math.isinf(options.grace_seconds)
        else math.ceil(options.grace_seconds),
    )


def _context_factory(
    certificates: CurrentCertificates,
) -> Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]:
    """What makes uvicorn's context, which takes the current certificates in each handshake."""
    return lambda _configuration, _default: renewing_context(certificates)
