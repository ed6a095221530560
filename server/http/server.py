"""The HTTP server: answers requests by the table of routes, turns errors into replies, and drains.

This is also the program of the process.
"""

import asyncio
import logging
import math
import os
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from attention_serving.server import lifecycle
from attention_serving.server.addresses import BACKLOG
from attention_serving.server.api.errors import UNEXPECTED
from attention_serving.server.engine.errors import EngineError, OverloadedError
from attention_serving.server.http import text_models
from attention_serving.server.http.backend import Backend
from attention_serving.server.http.connection import (
    TIMEOUT_SECONDS,
    Connection,
    HttpError,
    HttpRequest,
    Reply,
)
from attention_serving.server.http.routes import PARAMETER, ROUTES, Handler, describe
from attention_serving.server.observe import logs
from attention_serving.server.security.tls import renewing_context, watch
from attention_serving.server.settings import Settings

# How long a client may take for a handshake, and to answer the end of a connection. An idle one does not.
TLS_SECONDS = {"ssl_handshake_timeout": 10.0, "ssl_shutdown_timeout": 0.5}
# How long requests may take to end that are cancelled at the end of the grace.
CANCEL_SECONDS = 1.0
# Seconds of work on one large body share the cores with the server's runs, and with small calls.
LARGE_BODIES_NICE = 5
SHUTTING_DOWN = "the server is shutting down; retry on another server"
# gRPC codes, by the status that clients of HTTP know for the same. Source: google/rpc/code.proto.
STATUSES = {
    **dict.fromkeys(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE"), 400),
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    **dict.fromkeys(("ABORTED", "ALREADY_EXISTS"), 409),
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DOCS = Path(__file__).with_name("docs.html")
# A checkout has the page in the client's distribution, from which the build of this one copies it.
EXPLORER = Path(__file__).with_name("explorer.html")
if not EXPLORER.exists():
    EXPLORER = Path(__file__).parents[3] / "clients/python/src/attention_client/_explorer.html"
# What a page may load is in its own policy. Here is what only a header can state.
PAGE_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

log = logging.getLogger(__name__)


class HttpServer:
    """Listens, and answers requests. Belongs to the event loop in which it is created.

    Attributes:
        backend: What all requests share.
    """

    def __init__(self, settings: Settings, targets: Sequence[str]) -> None:
        """Listens with `serve`, until `stop`.

        Args:
            settings: Settings of the server.
            targets: The private socket of each process of the gRPC server, as unix:PATH.

        Raises:
            ServerError: A certificate cannot be used.
        """
        self.backend = Backend(settings, targets)
        self._certificates = watch(settings.tls_files) if settings.tls_files else None
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._connections: set[Connection] = set()
        table: dict[str, dict[str, Handler]] = defaultdict(dict)
        for route in ROUTES:
            for path in route.paths:
                table[path][route.http_method] = route.handle
        table["/openapi.json"]["GET"] = _openapi
        table["/metrics"]["GET"] = _metrics
        table["/docs"]["GET"] = partial(_page, DOCS.read_bytes())
        if settings.http_explore:
            table["/explore"]["GET"] = partial(_page, EXPLORER.read_bytes())
            table["/explore/models"]["GET"] = text_models.explore
        self._table = []
        for path, handlers in table.items():
            # Clients of OpenAI's API send the slashes of a model's name as they are; elsewhere they are %2F.
            characters = "." if path.startswith("/v1/") else "[^/]"
            pattern = PARAMETER.sub(rf"(?P<\1>{characters}+)", path.replace(".", r"\."))
            self._table.append((re.compile(pattern), path, handlers))

    def stop(self) -> None:
        """Begins to drain. For any thread and for signal handlers."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Serves, and returns when the requests in progress have been answered, or the grace has ended.

        asyncio accepts up to `backlog` connections in a row. If there are no descriptors, it logs a traceback
        for each of them, and tries each again after a second: with one in a row, once a second.
        """
        # Work on large bodies holds the interpreter's lock most of the time: more threads would not finish it
        # sooner, and each would take turns from the event loop.
        self._loop.set_default_executor(ThreadPoolExecutor(1, "large-bodies", initializer=_lower_priority))
        options: dict[str, Any] = {}
        if self._certificates is not None:
            options = {"ssl": renewing_context(self._certificates), **TLS_SECONDS}
        connect = partial(Connection, self.backend, self._answer, self._connections)
        servers = []
        for listener in listeners:
            servers.append(await self._loop.create_server(connect, sock=listener, backlog=1, **options))
            # asyncio does it for sockets that state their protocol, which these do not.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.listen(BACKLOG)  # asyncio has told the system that only one may wait
        await self._stopping.wait()
        for server in servers:
            server.close()
        self.backend.is_draining = True
        for connection in tuple(self._connections):
            if not connection.requests:  # otherwise the last reply closes it
                connection.close()
        await self._wait_until_closed(self.backend.settings.grace_seconds)
        for connection in self._connections:
            if connection.task is not None:
                connection.task.cancel()
        await self._wait_until_closed(CANCEL_SECONDS)
        await self.backend.close()

    async def _wait_until_closed(self, seconds: float) -> None:
        if self._connections:
            await asyncio.wait([connection.closed for connection in self._connections], timeout=seconds)

    async def _answer(self, request: HttpRequest) -> None:
        try:
            await request.send(await self._reply(request))
        except HttpError as error:  # the client left
            request.status = error.status
        finally:
            request.close()

    async def _reply(self, request: HttpRequest) -> Reply:
        try:
            return await self._handler(request)(request)
        except (Exception, asyncio.CancelledError) as error:
            refusal = self._refusal(request, error)
        return Reply.of_json(text_models.error_json(refusal, request.path), refusal.status, refusal.headers)

    def _handler(self, request: HttpRequest) -> Handler:
        """What answers a request, whose route and parameters are set."""
        if request.error is not None:
            raise request.error
        for pattern, route, handlers in self._table:
            if match := pattern.fullmatch(request.path):
                request.route = route
                request.parameters = {name: unquote(value) for name, value in match.groupdict().items()}
                if handler := handlers.get("GET" if request.http_method == "HEAD" else request.http_method):
                    return handler
                allowed = ", ".join(sorted({*handlers, "HEAD"} if "GET" in handlers else handlers))
                message = f"{request.path[:200]}: the method is {request.http_method[:20]}; must be {allowed}"
                raise HttpError(405, message, {"allow": allowed})
        raise HttpError(404, f"{request.path[:200]}: there is no such path; /docs lists them")

    def _refusal(self, request: HttpRequest, error: BaseException) -> HttpError:
        retry_seconds = 1.0
        if isinstance(error, EngineError):
            self.backend.refusals[error.reason] += 1
        match error:
            case HttpError():
                return error
            case grpc.aio.AioRpcError():
                status, message = STATUSES.get(error.code().name, 500), error.details() or error.code().name
                retry_seconds = _retry_seconds(error)
            case OverloadedError():
                status, message, retry_seconds = 503, error.message, error.retry_after
            case EngineError():
                status, message = STATUSES.get(error.code.name, 500), error.message
            case asyncio.CancelledError():  # the grace has ended
                status, message = 503, SHUTTING_DOWN
            case _:
                log.exception("request failed", extra={"route": request.route})
                status, message = 500, UNEXPECTED
        retry = {"retry-after": str(max(1, math.ceil(retry_seconds)))}
        headers = {401: {"www-authenticate": "Bearer"}, 429: retry, 503: retry}
        return HttpError(status, message, headers.get(status))


def _retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """The seconds of google.rpc.RetryInfo; 0 without it."""
    retry = error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (ValueError, DecodeError):  # the details contradict the status
        return 0
    for detail in status.details if status else ():
        detail.Unpack(retry)
    return float(retry.retry_delay.ToMicroseconds() / 1e6)


async def _openapi(_request: HttpRequest) -> Reply:
    return Reply.of_json(describe())


async def _metrics(request: HttpRequest) -> Reply:
    """The metrics of the metrics port, which decides who may read them."""
    settings = request.backend.settings
    if settings.tls_files is not None:
        raise HttpError(501, "with TLS, only the metrics port has the metrics")
    token = request.headers.get("authorization")
    head = "GET /metrics HTTP/1.0\r\n" + (f"Authorization: {token}\r\n" if token else "") + "\r\n"
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(settings.host, settings.metrics_port)
            with closing(writer):
                writer.write(head.encode("latin-1"))
                head, _, page = (await reader.read()).decode().partition("\r\n\r\n")
        return Reply([page.encode()], int(head.split(" ", 2)[1]), {"content-type": METRICS_TYPE})
    except (OSError, IndexError) as error:
        raise HttpError(503, f"the metrics port does not answer: {error}") from None


async def _page(content: bytes, _request: HttpRequest) -> Reply:
    return Reply([content], headers=PAGE_HEADERS)


def _lower_priority() -> None:
    """Lets the server's threads, and small requests here, run before the calling thread."""
    with suppress(OSError):  # a system whose threads have none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LARGE_BODIES_NICE)


async def _serve(pipe: Any, settings: Settings, targets: list[str], descriptors: list[int]) -> None:
    """Serves until a signal asks to stop, or the pipe closes, and requests in progress have been answered."""
    logs.configure(settings.log_level, settings.log_format, process="http")
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(logging.INFO)
    loop, server = asyncio.get_running_loop(), HttpServer(settings, targets)

    def stop(request: lifecycle.StopRequest) -> None:
        log.info("draining", extra=request)
        server.stop()

    def parent_has_ended() -> None:
        loop.remove_reader(pipe.fileno())
        stop(lifecycle.StopRequest({"reason": "the server has ended"}))

    def announce() -> None:
        with suppress(OSError):  # the parent has ended
            pipe.send(server.backend.refusals or lifecycle.SERVES)
            server.backend.refusals.clear()
        loop.call_later(lifecycle.HEARTBEAT_SECONDS, announce)

    lifecycle.handle_signals(stop)
    loop.add_reader(pipe.fileno(), parent_has_ended)
    os.set_blocking(pipe.fileno(), False)  # a parent that is stopped does not stop the loop
    announce()
    await server.serve([socket.socket(fileno=descriptor) for descriptor in descriptors])
    announce()


if __name__ == "__main__":
    lifecycle.run_child(lambda pipe, assignment: asyncio.run(_serve(pipe, *assignment)))
