"""Runs uvicorn on open sockets until it is asked to stop."""

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from server.http.application import create_application
from server.http.connection import IDLE_SECONDS, MAX_HEAD_BYTES, connection_type
from server.http.options import HttpOptions

Stop = Callable[[], None]


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
    """
    # Their events say what this server's own log says too, or nothing about requests.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(logging.INFO)
    asyncio.run(_serve(_Server(_configuration(options)), list(sockets), begin))


async def _serve(server: uvicorn.Server, sockets: list[socket.socket], begin: Callable[[Stop], None]) -> None:
    def stop() -> None:
        server.should_exit = True

    begin(stop)
    await server.serve(sockets)


def _configuration(options: HttpOptions) -> uvicorn.Config:
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
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=None
        if math.isinf(options.grace_seconds)
        else math.ceil(options.grace_seconds),
    )
