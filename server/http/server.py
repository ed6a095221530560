"""uvicorn with what it lacks: limits of connections, heads, chunks and time; errors in JSON.

Source of the hooks: uvicorn.server and uvicorn.protocols.http.httptools_impl of the pinned release.
"""

import asyncio
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import httptools
import orjson
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from attention_serving.server.addresses import BACKLOG
from attention_serving.server.http.app import create_application
from attention_serving.server.http.exchange import CONNECTION, JSON, REFUSED_WITH, Service
from attention_serving.server.http.text_models import error_json
from attention_serving.server.lifecycle import (
    HEARTBEAT_SECONDS,
    SERVES,
    StopRequest,
    handle_signals,
    run_child,
)
from attention_serving.server.observe import logs
from attention_serving.server.security.peers import names_in
from attention_serving.server.security.tls import renewing_context, watch
from attention_serving.server.settings import Settings

# How long a client may take for a handshake, and to answer the end of a connection. An idle one does not.
HANDSHAKE_SECONDS, TLS_SHUTDOWN_SECONDS = 10.0, 0.5
# Seconds of work on one large body share the cores with the server's runs, and with small calls.
LARGE_BODIES_NICE = 5
# The request line and the headers together; also what a body has between two pieces of its data.
MAX_HEAD_BYTES = 1 << 16
# Parsing a chunk takes about a microsecond, however small it is.
MAX_CHUNKS = 1 << 16
# Requests of a connection that wait for the answer to an earlier one.
MAX_PIPELINED = 16
# How long a connection may be without a request.
IDLE_SECONDS = 75
# The parts of a request that a client must send in time.
HEAD, BODY = "head of the request", "body"

log = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        peer_identities: The names in the verified certificate of the client.
        on_lost: Is called when the connection is lost.
    """

    peer_identities: Sequence[str] = ()
    on_lost: Callable[[], object] | None = None
    # Whether the next bytes belong to a head.
    _in_head = True
    # Bytes that the parser has received since the last ones that it has passed on.
    _unparsed = 0
    _chunks = 0
    # The part of a request that must arrive in time, and since when the connection waits for its client.
    _awaited, _since = "", 0.0
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, settings: Settings, *arguments: Any) -> None:
        """Creates the protocol of a connection, with uvicorn's own arguments after the settings."""
        super().__init__(*arguments)
        self._settings = settings

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(cast("asyncio.Transport", transport))
        encryption = transport.get_extra_info("ssl_object")
        if certificate := encryption and encryption.getpeercert(binary_form=True):
            self.peer_identities = names_in(certificate)
        self.app_state = {**self.app_state, CONNECTION: self}
        self._await(HEAD)
        if len(self.connections) > self._settings.max_connections:
            connections = cast("set[Connection]", self.connections)
            oldest = min(connections, key=lambda open_: math.inf if open_._is_answering else open_._since)
            connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the call that is made for the client."""
        super().connection_lost(exc)
        self._await("")
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived."""
        self._unparsed += len(data)
        try:
            self.parser.feed_data(data)
            self._check_size(self._unparsed)
        except httptools.HttpParserUpgrade as stop:
            self._parse_again(data[stop.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, HTTPException) else _invalid(400, str(error)))
        except HTTPException as error:
            self._refuse(error)
        if not self._awaited and (self._unparsed or not self._in_head):
            self._await(HEAD if self._in_head else BODY)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. Trailers, which follow a body, are dropped."""
        if self._in_head:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Checks the head, and begins to answer the request."""
        self._check_head()
        super().on_headers_complete()
        self._in_head, self._unparsed, self._chunks = False, 0, 0
        self._unset_keepalive_if_required()
        self._await("")

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body."""
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise _invalid(413, f"the body has more than {MAX_CHUNKS} chunks")

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._in_head, self._unparsed = True, 0
        self._await("")
        super().on_message_complete()
        # A large body has paused the reading. Without it, a client that leaves would not be noticed.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The connection waits for its client again."""
        self._since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client has to read on in time."""
        super().pause_writing()
        if seconds := self._settings.message_timeout_seconds:
            self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _await(self, part: str) -> None:
        """Ends the connection if a part of a request does not arrive in time; empty awaits nothing."""
        self._awaited, self._since = part, time.monotonic()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        if part and (seconds := self._settings.message_timeout_seconds):
            self._unset_keepalive_if_required()
            error = HTTPException(408, f"the {part} did not arrive within {seconds:g} seconds")
            self._read_timer = self.loop.call_later(seconds, self._refuse, error)

    @property
    def is_lost(self) -> bool:
        """Whether the client has left."""
        return self.transport.is_closing()

    @property
    def _is_open(self) -> bool:
        """Whether a request has not been answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has arrived and has not been answered."""
        return self._is_open and not self.cycle.more_body

    def _should_upgrade(self) -> bool:
        """Makes the library ignore a request whose parser has stopped; see `_parse_again`."""
        return True

    def _parse_again(self, body: bytes) -> None:
        """Parses a request that asks for another protocol, without this wish.

        The parser would take the body for the other protocol, and the bytes after that for a request.
        """
        headers = b"".join(b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade")
        version = self.parser.get_http_version().encode()
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(line + headers + b"\r\n" + body)

    def _check_head(self) -> None:
        """Refuses what the parser takes and HTTP forbids, or a proxy may understand in another way.

        Raises:
            HTTPException: It is refused.
        """
        self._check_size(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers))
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if version not in ("1.0", "1.1") or method == b"CONNECT":
            raise _invalid(400, f"{method.decode()} of HTTP/{version} is not supported")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _invalid(400, f"it has {hosts} Host headers; must have one")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            raise _invalid(501, "Transfer-Encoding must be chunked, in HTTP/1.1")
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _invalid(400, f"{MAX_PIPELINED} requests of the connection wait already")

    def _check_size(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            what = "head is" if self._in_head else "extensions or trailers of the body are"
            raise _invalid(431, f"the {what} larger than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, error: HTTPException) -> None:
        """Answers the request that is being parsed, if it can be answered, and closes the connection."""
        if self.transport.is_closing():
            return
        if self._in_head and self._is_open:  # earlier requests are answered first
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if not self._in_head:
            if self.cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            scope: Any = self.cycle.scope
            scope[REFUSED_WITH] = error.status_code
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        path = (self.url or b"").partition(b"?")[0].decode("latin-1")
        json = orjson.dumps(error_json(error, path))
        head = f"content-type: {JSON}\r\ncontent-length: {len(json)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status_code] + head.encode() + json)
        self.transport.close()


def _invalid(status: int, reason: str) -> HTTPException:
    return HTTPException(status, f"the request is not valid: {reason}")


class HttpServer(uvicorn.Server):
    """Listens with what uvicorn cannot be told, and watches its connections. Belongs to one event loop.

    Attributes:
        service: What all requests share.
    """

    def __init__(self, settings: Settings, targets: Sequence[str]) -> None:
        """Listens with `serve`, until `should_exit` is set.

        Args:
            settings: Settings of the server.
            targets: The private socket of each process of the gRPC server, as unix:PATH.

        Raises:
            ServerError: A certificate cannot be used.
        """
        self.service = Service(settings, targets)
        super().__init__(
            uvicorn.Config(
                create_application(self.service),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
            )
        )
        self._connect = partial(Connection, settings, self.config, self.server_state, {})
        self._certificates = watch(settings.tls_files) if settings.tls_files else None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves, and returns when the requests in progress have been answered."""
        # Work on large bodies holds the interpreter's lock most of the time: more threads would not finish it
        # sooner, and each would take turns from the event loop.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1, "large-bodies", initializer=_lower_priority))
        await super().serve(sockets)
        await self.service.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process: uvicorn would raise them again at the end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections.

        asyncio accepts up to `backlog` connections in a row. If there are no descriptors, it logs a traceback
        for each of them, and tries each again after a second: with one in a row, once a second.
        """
        options: dict[str, Any] = {}
        if self._certificates is not None:
            options["ssl"] = renewing_context(self._certificates)
            options |= {
                "ssl_handshake_timeout": HANDSHAKE_SECONDS,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS,
            }
        loop = asyncio.get_running_loop()
        self.servers = []
        for listener in sockets or ():
            self.servers.append(await loop.create_server(self._connect, sock=listener, backlog=1, **options))
            # asyncio does it for sockets that state their protocol, which these do not.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            listener.listen(BACKLOG)  # asyncio has told the system that only one may wait
        self.started = True


async def _serve(settings: Settings, targets: list[str], descriptors: list[int], pipe: Any) -> None:
    """Serves until a signal asks to stop, or the pipe closes, and requests in progress have been answered."""
    loop, server = asyncio.get_running_loop(), HttpServer(settings, targets)

    def stop(request: StopRequest) -> None:
        log.info("draining", extra=request)
        server.should_exit = True

    def parent_has_ended() -> None:
        loop.remove_reader(pipe.fileno())
        stop(StopRequest({"reason": "the server has ended"}))

    def announce() -> None:
        with suppress(OSError):  # the parent has ended
            pipe.send(server.service.refusals or SERVES)
            server.service.refusals.clear()
        loop.call_later(HEARTBEAT_SECONDS, announce)

    handle_signals(stop)
    loop.add_reader(pipe.fileno(), parent_has_ended)
    os.set_blocking(pipe.fileno(), False)  # a parent that is stopped does not stop the loop
    announce()
    await server.serve([socket.socket(fileno=descriptor) for descriptor in descriptors])
    announce()


def _child(pipe: Any, assignment: tuple[Settings, list[str], list[int]]) -> None:
    settings, targets, descriptors = assignment
    logs.configure(settings.log_level, settings.log_format, process="http")
    # Their events say what this server's own log says too, or nothing about requests.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for library in ("asyncio", "grpc"):
        logging.getLogger(library).setLevel(logging.INFO)
    asyncio.run(_serve(settings, targets, descriptors, pipe))


def _lower_priority() -> None:
    """Lets the server's threads, and small requests here, run before the calling thread."""
    with suppress(OSError):  # a system whose threads have none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LARGE_BODIES_NICE)


if __name__ == "__main__":
    run_child(_child)
