"""uvicorn with what it lacks: limits of connections, heads, chunks and time; errors in JSON.

Source of the hooks: uvicorn.protocols.http.httptools_impl of the pinned release.
"""

import asyncio
import errno
import logging
import math
import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast

import httptools
import orjson
import uvicorn
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from attention_serving.server.addresses import BACKLOG
from attention_serving.server.http.app import create_application
from attention_serving.server.http.exchange import CONNECTION, JSON
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.tls import current_certificates
from attention_serving.server.tls.files import CurrentCertificates
from attention_serving.server.tls.identities import names_in

Stop = Callable[[], None]
# How long a client may take for a handshake, and to answer the end of a connection. An idle one does not.
HANDSHAKE_SECONDS, GOODBYE_SECONDS = 10.0, 0.5
# Seconds of work on one large body share the cores with the server's runs, and with small calls.
LARGE_BODIES_NICE = 5
# Why a connection cannot be accepted: the process or the system has no descriptors or no memory left.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# The request line and the headers together; also what a body has between two pieces of its data.
MAX_HEAD_BYTES = 1 << 16
# Parsing a chunk takes about a microsecond, however small it is.
MAX_CHUNKS = 1 << 16
# Requests of a connection that wait for the answer to an earlier one.
MAX_PIPELINED = 16
# How long a connection may be without a request.
IDLE_SECONDS = 75

log = logging.getLogger(__name__)


class _CorkedTransport:
    """Sends the head of an answer together with the first bytes of its body: one system call less."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: Any) -> None:
        """Keeps a head until `flush` or what follows it; 100 Continue is an answer of its own."""
        if not self._head and data[:9] == b"HTTP/1.1 " and data[9:10] != b"1":
            self._head = data
            return
        head, self._head = self._head, b""
        self._transport.write(b"".join((head, data)) if head else data)

    def flush(self) -> None:
        """Sends a head that nothing follows."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        """Closes the connection once all has been sent."""
        self.flush()
        self._transport.close()


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Attributes of the class, set by `connection_type`:
        max_connections: Of more, the one that has waited for its client for the longest time is closed.
        head_seconds: How long the head of a request may take to arrive. 0 sets no limit.
        send_seconds: How long the client may take to read on. 0 sets no limit.

    Attributes:
        peer_identities: The names in the verified certificate of the client.
        on_lost: Is called when the connection is lost.
    """

    max_connections = 0
    head_seconds = 0.0
    send_seconds = 0.0
    peer_identities: Sequence[str] = ()
    on_lost: Callable[[], object] | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    # Whether the next bytes belong to a head.
    _in_head = True
    # Bytes that the parser has received since the last ones that it has passed on.
    _unparsed = 0
    _chunks = 0
    # When the connection, its request or its idle time began.
    _began = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(cast("asyncio.Transport", transport))
        encryption = transport.get_extra_info("ssl_object")
        if certificate := encryption and encryption.getpeercert(binary_form=True):
            self.peer_identities = names_in(certificate)
        self.app_state = {**self.app_state, CONNECTION: weakref.proxy(self)}
        self.transport = cast("asyncio.Transport", _CorkedTransport(self.transport))
        self._began = time.monotonic()
        if len(self.connections) > self.max_connections:
            others = cast("set[Connection]", self.connections)
            oldest = min(others, key=lambda each: math.inf if each._is_answering else each._began)
            others.discard(oldest)
            oldest.transport.abort()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clocks."""
        self._stop_head_timer()
        self._stop_send_timer()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived, and watches what has not."""
        self._unset_keepalive_if_required()
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
        self._watch_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._began = time.monotonic()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. Trailers, which follow a body, are dropped."""
        if self._in_head:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Checks the head, and begins to answer the request."""
        self._check_head()
        super().on_headers_complete()
        self._in_head, self._unparsed, self._chunks = False, 0, 0

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
        super().on_message_complete()
        # A large body has paused the reading. Without it, nobody would notice that the client leaves.
        if not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """The connection waits for its client again."""
        self.transport.flush()  # type: ignore[attr-defined]
        self._began = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read: the clock starts."""
        super().pause_writing()
        self._stop_send_timer()
        if self.send_seconds:
            self._send_timer = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        super().resume_writing()
        self._stop_send_timer()

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

    def _parse_again(self, rest: bytes) -> None:
        """Parses a request that asks for another protocol, without this wish.

        The parser would take the body for the other protocol, and the bytes after that for a request.
        """
        headers = b"".join(b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade")
        line = b"%s %s HTTP/%s\r\n" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(line + headers + b"\r\n" + rest)

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

    def _watch_head(self) -> None:
        """The clock runs while there is neither a request in progress nor an idle connection."""
        if self._is_open or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None and self.head_seconds:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        message = f"the head of the request did not arrive within {self.head_seconds:g} seconds"
        self._refuse(HTTPException(408, message))

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
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        json = orjson.dumps({"error": error.detail})
        head = f"content-type: {JSON}\r\ncontent-length: {len(json)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status_code] + head.encode() + json)
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def _invalid(status: int, reason: str) -> HTTPException:
    return HTTPException(status, f"the request is not valid: {reason}")


def connection_type(max_connections: int, head_seconds: float, send_seconds: float) -> Any:
    """The class of connections with these limits, as uvicorn takes it."""
    limits = {"max_connections": max_connections, "head_seconds": head_seconds, "send_seconds": send_seconds}
    return type("LimitedConnection", (Connection,), limits)


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
    large_bodies = ThreadPoolExecutor(1, "large-bodies", initializer=_lower_priority)
    asyncio.get_running_loop().set_default_executor(large_bodies)
    begin(stop)
    await server.serve(sockets)


def _lower_priority() -> None:
    """Lets the server's threads, and small requests here, run before the calling thread."""
    with suppress(OSError):  # a system whose threads have none
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LARGE_BODIES_NICE)


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
    from attention_serving.server.tls.certificates import renewing_context  # noqa: PLC0415 - its library is needed with TLS only

    return lambda _configuration, _default: renewing_context(certificates)
