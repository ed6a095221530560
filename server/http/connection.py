"""HTTP/1.1: connections of clients, and the requests on them, with limits of size, number, memory and time.

httptools parses; asyncio reads and writes.
"""

import asyncio
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar, cast

import httptools
import orjson

from attention_serving.server.api import schemas
from attention_serving.server.api.errors import UNEXPECTED
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, OverloadedError
from attention_serving.server.http.backend import Backend, access_question
from attention_serving.server.observe import logs, records
from attention_serving.server.security import peers
from attention_serving.server.transport.create import METADATA_BYTES

log = logging.getLogger(__name__)
T = TypeVar("T")
# Names in lower case, and values.
Headers: TypeAlias = Sequence[tuple[str, str]]
JSON = "application/json"
# How zlib is told the format: gzip, and what HTTP calls deflate.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# A compressed body is decompressed in pieces of this size, each of which is reserved. A reply is sent in
# pieces, so that its memory is held until the client has read most of it.
PIECE_BYTES = 1 << 18
# How long the rest of a refused request is read, so that a client that writes all of it first sees the reply.
DISCARD_SECONDS = 5.0
# More than this takes noticeable time to parse or encode, which is then done on another thread; a larger
# body is worth a question to the gRPC server before it is read; and not more of it waits to be read.
LARGE_BYTES = 1 << 16
# Headers of bodies whose size is not known before they are read.
UNKNOWN_SIZE = {"transfer-encoding", "content-encoding"}
# Headers that are passed on to the gRPC server, which refuses larger ones than these, and asks to try again.
# The rest is for the headers of gRPC itself.
FORWARDED = {records.PARENT, records.STATE, "authorization", "model-id"}
MAX_FORWARDED_BYTES = METADATA_BYTES - 512
# What a header counts for in addition to its name and value. Source: RFC 9113, section 6.5.2.
HEADER_BYTES = 32
# Everything but inference, contexts, and loading of models, is answered at once.
TIMEOUT_SECONDS = 10.0
# The request line and the headers together; also what a body has between two pieces of its data. And the
# number of headers, whose objects take more memory than their bytes.
MAX_HEAD_BYTES, MAX_HEADERS = 1 << 16, 256
# Parsing a chunk takes about a microsecond, however small it is.
MAX_CHUNKS = 1 << 16
# Requests of a connection that wait for the reply to an earlier one.
MAX_PIPELINED = 16
# How long a connection may be without a request.
IDLE_SECONDS = 75
# What a client must send in time. The head of the first request begins with the connection.
HEAD, BODY, NEXT_REQUEST, END = "head of the request", "body", "next request", "end"
# The status in the log of a request whose client has closed its connection, or did not read on in time.
CLIENT_LEFT = 499
PHRASES = {status.value: status.phrase for status in HTTPStatus} | {CLIENT_LEFT: "Client Closed Request"}


class HttpError(Exception):
    """A request is refused with a status, and perhaps headers."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


class Reply(NamedTuple):
    """The reply to a request. The body is in parts, so that tensors are not copied."""

    parts: list[bytes]
    status: int = 200
    headers: Mapping[str, str] = {}

    @classmethod
    def of_json(cls, document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Self:
        """A reply in JSON, which may contain arrays of NumPy."""
        return cls([orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)], status, headers or {})


class HttpRequest:
    """One request and its reply. It holds memory, and for inference a place, until `close`.

    Attributes:
        connection: The connection that it came on.
        backend: What all requests share.
        http_method: Such as GET; empty if the head is not valid.
        path: The path.
        query: The part of the URL after the path.
        headers: The headers by their names in lower case; of several with one name, the first.
        route: The path, in which names of parameters are in braces; empty until it is found in the table.
        parameters: The parameters of the path, without escapes.
        request_id: What the client and the log know it by.
        memory: The memory of the request and its reply.
        status: The status of the reply; 0 before it has begun.
        has_arrived: Whether all of the body has arrived, or there is none.
        error: Why the rest of it cannot be read; None if it can.
        body: What has arrived of it.
        arrival: Has a result when the body is complete or refused; None until it is read.
        keep_alive: Whether the connection stays open after it.
        expects_continue: Whether the client waits for a status before it sends the body.
        is_complete: Whether the reply has been sent.
    """

    route = ""
    parameters: Mapping[str, str] = {}
    status = 0
    has_arrived = keep_alive = expects_continue = is_complete = False
    error: Exception | None = None
    _has_place = False
    arrival: "asyncio.Future[None] | None" = None

    def __init__(
        self, connection: "Connection", http_method: str, url: tuple[str, str], headers: Headers
    ) -> None:
        """Reads nothing yet.

        Args:
            connection: The connection that it came on.
            http_method: Such as GET.
            url: The path and the query.
            headers: All headers, with their names in lower case.
        """
        self.connection, self.backend = connection, connection.backend
        self.http_method, (self.path, self.query) = http_method, url
        self._header_list, self.headers = headers, dict(reversed(headers))
        self.request_id = records.sent_request_id(headers) or records.new_request_id()
        self.memory = Reservation(self.backend.budget)
        self._arrived_at = time.monotonic()
        self.body = bytearray()

    def receive(self, data: bytes) -> None:
        """Adds data to the body as it arrives, or as it is decompressed.

        Raises:
            HttpError: The body is too large.
            OverloadedError: The memory is not available.
        """
        if len(self.body) + len(data) > self.backend.settings.max_message_bytes:
            raise self._too_large()
        self.memory.add(len(data))
        self.body += data

    def end(self, error: Exception | None = None) -> None:
        """The body has arrived, or the rest of it cannot be read."""
        self.has_arrived, self.error = error is None, error
        if self.arrival is not None and not self.arrival.done():
            self.arrival.set_result(None)

    def close(self) -> None:
        """Frees what the request holds, notes its end, and leaves the connection to the next one."""
        self.memory.release()
        self.backend.places += self._has_place
        log_requests = self.backend.settings.log_requests
        has_failed = self.status >= HTTPStatus.BAD_REQUEST
        if self.http_method and (log_requests == "all" or (log_requests == "failed" and has_failed)):
            fields: dict[str, object] = {"request_id": self.request_id, "method": self.http_method}
            if trace := records.callers_trace(self._header_list):
                fields["trace_id"] = trace[0]
            total = logs.milliseconds(time.monotonic() - self._arrived_at)
            fields |= {"route": self.route, "total_ms": total, "status": self.status}
            logs.requests.info("http request", extra=fields)
        self.connection.finish()

    def take_place(self) -> None:
        """Takes a place among the inference requests in progress.

        Raises:
            OverloadedError: There is none.
        """
        if not self.backend.places:
            limit = f"{self.backend.max_requests} requests are in progress, which is this server's limit"
            raise OverloadedError(f"{limit}; try again later")
        self.backend.places -= 1
        self._has_place = True

    async def call(self, method: str, message: bytes, timeout: float | None = TIMEOUT_SECONDS) -> bytes:
        """Calls a method of the gRPC server on behalf of the client; returns the serialized reply.

        Args:
            method: Full name of the method, such as /inference.GRPCInferenceService/ServerLive.
            message: The serialized message.
            timeout: Seconds until the deadline; None sets none.

        Raises:
            AioRpcError: The call ended with a status other than OK.
            HttpError: The client left, which cancels the call.
        """
        metadata = self._metadata()
        channel, calls = self.backend.channel(), self.backend.calls
        unary: Any = channel.unary_unary(method)
        calls[channel] += 1
        try:
            reply: bytes = await self.connection.wait(unary(message, metadata=metadata, timeout=timeout))
        finally:
            calls[channel] -= 1
        return reply

    def _metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the gRPC server is told of the client and by it.

        Raises:
            InvalidRequestError: A header contains what gRPC's metadata cannot.
            HttpError: The headers are larger than the gRPC server takes.
        """
        metadata: list[tuple[str, str | bytes]] = [(records.REQUEST_ID, self.request_id)]
        for name, text in self._header_list:
            if name in FORWARDED:
                if not (text.isascii() and text.isprintable()):
                    raise InvalidRequestError(name, "contains characters other than printable ASCII")
                metadata.append((name, text))
        if names := self.connection.peer_identities:
            metadata.append((peers.FORWARDED, orjson.dumps(names)))
        if self.backend.settings.has_identities:  # tokens that fail count for it
            metadata.append((peers.CLIENT, self.connection.client))
        size = sum(len(name) + len(value) + HEADER_BYTES for name, value in metadata)
        if size > MAX_FORWARDED_BYTES:
            message = f"the headers that are passed on take {size} bytes; the limit is {MAX_FORWARDED_BYTES}"
            raise HttpError(431, message)
        return metadata

    async def decode_body(self, data: bytearray, json_size: int, decode: Callable[[bytearray], T]) -> T:
        """Decodes a body whose first bytes are JSON, for which memory is reserved meanwhile.

        Raises:
            HttpError: The JSON could take more memory than there is.
            OverloadedError: The memory is not available.
        """
        scratch, limit = Reservation(self.backend.budget), self.backend.budget.limit_bytes

        def work() -> T:
            memory = schemas.memory_of(data, json_size)
            if memory > limit:
                could = f"the JSON could take {memory} bytes of memory; the limit is {limit}"
                raise HttpError(413, f"{could}; send binary tensors")
            scratch.add(memory)
            return decode(data)

        try:
            return await run(len(data), work)
        finally:
            scratch.release()

    async def read(self, method: str) -> bytearray:
        """The body, decompressed, of a request that a method of the gRPC server answers.

        Raises:
            AioRpcError: The client may not call the method.
            HttpError: It is too large, too slow, not valid or unknown to decompress, or the client left.
            InvalidRequestError: It cannot be decompressed.
            OverloadedError: The memory is not available.
        """
        settings, size = self.backend.settings, int(self.headers.get("content-length", 0))
        may_be_large = size > LARGE_BYTES or not UNKNOWN_SIZE.isdisjoint(self.headers)
        if settings.has_identities and may_be_large:  # a small body is sent on, and refused there
            await self.call(peers.ACCESS_CHECK, access_question(method, self.parameters.get("model", "")))
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity" and encoding not in WINDOW_BITS:
            message = f"Content-Encoding: is {encoding[:100]!r}; must be gzip, deflate or identity"
            raise HttpError(415, message, {"accept-encoding": "gzip, deflate, identity"})
        if size > settings.max_message_bytes:
            raise self._too_large()
        if not (self.has_arrived or self.error):
            if self.expects_continue:
                self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.arrival = self.connection.loop.create_future()
            self.connection.transport.resume_reading()
            await self.connection.wait(self.arrival)
        if self.error is not None:
            raise self.error
        if encoding != "identity":
            await asyncio.to_thread(self._decompress, zlib.decompressobj(WINDOW_BITS[encoding]))
        return self.body

    def _decompress(self, decoder: "zlib._Decompress") -> None:
        """Decompresses the body. 64 KB may contain 64 MB, which is too much for the event loop."""
        body, self.body = self.body, bytearray()
        for at in range(0, len(body), PIECE_BYTES):
            data, has_more = bytes(body[at : at + PIECE_BYTES]), True
            while has_more:
                try:
                    piece = decoder.decompress(data, PIECE_BYTES)
                except zlib.error as error:
                    raise InvalidRequestError("Content-Encoding", f"the body is damaged: {error}") from None
                self.receive(piece)
                data, has_more = decoder.unconsumed_tail, len(piece) == PIECE_BYTES
            if decoder.unused_data:
                raise InvalidRequestError("Content-Encoding", "data follow the compressed body")
        if not decoder.eof:
            raise InvalidRequestError("Content-Encoding", "the compressed body ends too early")

    def _too_large(self) -> HttpError:
        limit = int(self.backend.settings.max_message_bytes)
        return HttpError(413, f"the body is larger than the limit of {limit} bytes")

    async def send(self, reply: Reply) -> None:
        """Sends the reply; returns once the client has read most of it. A small body is sent with the head.

        Raises:
            HttpError: The client has left, or did not read on in time.
        """
        connection, self.status = self.connection, reply.status
        is_last = self.backend.is_draining and len(connection.requests) == 1
        self.keep_alive = self.keep_alive and self.has_arrived and not is_last
        size = sum(map(len, reply.parts))
        is_empty, is_small = self.status == HTTPStatus.NO_CONTENT, size <= LARGE_BYTES
        headers = {} if is_empty else {"content-type": JSON, "content-length": str(size)}
        headers |= {**reply.headers, "date": _date(int(time.time())), records.REQUEST_ID: self.request_id}
        headers |= {} if self.keep_alive else {"connection": "close"}
        lines = [f"HTTP/1.1 {self.status} {PHRASES[self.status]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        parts = [] if self.http_method == "HEAD" else reply.parts
        await connection.write(b"".join([head, *parts]) if is_small else head)
        for part in () if is_small else parts:
            for at in range(0, len(part), PIECE_BYTES):
                await connection.write(memoryview(part)[at : at + PIECE_BYTES])
        if not self.keep_alive:  # the end of TLS waits for less
            await connection.flush()
        self.is_complete = True


class Connection(asyncio.Protocol):
    """One connection of a client. Its requests are answered one after another.

    Attributes:
        backend: What all requests share.
        loop: The event loop.
        transport: Reads and writes.
        requests: The request that is answered, and those that wait for it.
        task: Answers the request.
        client: The address of the client, as ADDRESS:PORT.
        peer_identities: The names in the verified certificate of the client.
        closed: Has a result when the connection is closed.
    """

    transport: asyncio.Transport
    peer_identities: Sequence[str] = ()
    # What the request that is answered waits for; it is cancelled if the client leaves.
    _awaited: Any = None
    task: "asyncio.Task[None] | None" = None
    # Whether the next bytes belong to a head.
    _in_head = True
    # Bytes that the parser has received since the last ones that it has passed on.
    _unparsed = _chunks = 0
    _url = b""
    # The part of a request that must arrive in time, and since when the connection waits for its client.
    _read_part, _since = "", 0.0
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    # Has a result when the client has read enough; None if it has.
    _writable: "asyncio.Future[None] | None" = None

    def __init__(
        self, backend: Backend, answer: Callable[[HttpRequest], Any], connections: "set[Connection]"
    ) -> None:
        """Begins without a transport.

        Args:
            backend: What all requests share.
            answer: Answers a request.
            connections: All open connections.
        """
        self.backend, self._answer, self._connections = backend, answer, connections
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        self._headers: list[tuple[str, str]] = []
        self.requests: deque[HttpRequest] = deque()
        self._create_parser()

    def _create_parser(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        # A request that asks to close the connection is answered also if more bytes follow it.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first request; makes room for it if there are too many connections."""
        self.transport = cast("asyncio.Transport", transport)
        host, port, *_ = transport.get_extra_info("peername")
        self.client = f"{host}:{port}"
        encryption = transport.get_extra_info("ssl_object")
        if certificate := encryption and encryption.getpeercert(binary_form=True):
            self.peer_identities = peers.names_in(certificate)
        self._set_read_timer(HEAD)
        self._connections.add(self)
        if len(self._connections) > self.backend.settings.max_connections:
            oldest = min(self._connections, key=lambda open_: open_._waits_since)
            self._connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        """Cancels what is done for the client."""
        self._connections.discard(self)
        self._set_read_timer("")
        if self._awaited is not None:
            self._awaited.cancel()
        self.resume_writing()
        self._parser = None  # it refers to the connection
        self.closed.set_result(None)

    async def wait(self, awaitable: Any) -> Any:
        """The result of a future or of a call of gRPC, which is cancelled if the client leaves.

        Raises:
            HttpError: The client has left.
        """
        if self.transport.is_closing():
            awaitable.cancel()
        self._awaited = awaitable
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self.transport.is_closing():
                raise HttpError(CLIENT_LEFT, "the client left") from None
            raise
        finally:
            self._awaited = None

    async def write(self, data: bytes | memoryview) -> None:
        """Writes, and waits until the client has read most of it.

        Raises:
            HttpError: The client has left, or did not read on in time.
        """
        self.transport.write(data)
        if self._writable is not None:
            await self.wait(self._writable)
        elif self.transport.is_closing():
            raise HttpError(CLIENT_LEFT, "the client left")

    async def flush(self) -> None:
        """Waits until the client has read all that was written.

        Raises:
            HttpError: The client has left, or did not read on in time.
        """
        self.transport.set_write_buffer_limits(high=0)
        await self.write(b"")

    def pause_writing(self) -> None:
        """The client has to read on in time."""
        self._writable = self.loop.create_future()
        if seconds := self.backend.settings.message_timeout_seconds:
            self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def finish(self) -> None:
        """Begins to answer the next request, or waits for it, after the end of one."""
        request = self.requests.popleft()
        self.transport.resume_reading()
        if not request.is_complete or (request.has_arrived and not request.keep_alive):
            self.close()
            while self.requests:  # they are not answered
                self.requests.popleft().memory.release()
        elif not request.keep_alive:
            self._set_read_timer(END)
            self._unparsed = 0
            with suppress(OSError, NotImplementedError):  # the client has left; TLS
                self.transport.write_eof()
        elif self.requests:
            self._start()
            if not self._in_head:
                self._set_read_timer(BODY)
        elif not self._read_part:
            self._set_read_timer(NEXT_REQUEST)

    def close(self) -> None:
        """Closes the connection once the client has read what was written, for which it has a time."""
        self._set_read_timer("")
        self.transport.close()
        if seconds := self.backend.settings.message_timeout_seconds:
            self._write_timer = self.loop.call_later(seconds, self.transport.abort)

    def _start(self) -> None:
        self.task = self.loop.create_task(self._answer(self.requests[0]))

    @property
    def _waits_since(self) -> float:
        """Since when the connection waits for its client; infinite if it does not."""
        return math.inf if self.requests and self.requests[-1].has_arrived else self._since

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived."""
        self._unparsed += len(data)
        if self._read_part == END and self._unparsed > self.backend.settings.max_message_bytes:
            self.transport.abort()
        if self._read_part == END or self.transport.is_closing():  # TLS may bring more
            return
        try:
            self._parser.feed_data(data)
            self._check_size(self._unparsed)
        except httptools.HttpParserUpgrade as stop:
            self._parse_again(data[stop.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__ or error
            if isinstance(cause, httptools.HttpParserError):
                cause = _invalid(400, str(cause))
            elif not isinstance(cause, HttpError | EngineError):
                log.error("request not parsed", exc_info=cause)
                cause = HttpError(500, UNEXPECTED)
            self._refuse(cause)
        except HttpError as error:
            self._refuse(error)
        is_paused = len(self.requests) > 1
        if self._read_part in ("", NEXT_REQUEST) and (self._unparsed or not self._in_head) and not is_paused:
            self._set_read_timer(HEAD if self._in_head else BODY)

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        """Takes a part of the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. Trailers, which follow a body, are dropped."""
        if self._in_head:
            if len(self._headers) == MAX_HEADERS:
                raise _invalid(431, f"it has more than {MAX_HEADERS} headers")
            self._headers.append((name.lower().decode("latin-1"), value.rstrip(b" \t").decode("latin-1")))

    def on_headers_complete(self) -> None:
        """Checks the head, and begins to answer the request."""
        version, http_method = self._parser.get_http_version(), self._parser.get_method().decode()
        self._check_head(version, http_method)
        if self._parser.should_upgrade():
            return
        url = httptools.parse_url(self._url)
        target = (url.path or b"/").decode("latin-1"), (url.query or b"").decode("latin-1")
        request = HttpRequest(self, http_method, target, self._headers)
        request.keep_alive = version == "1.1" and self._parser.should_keep_alive()
        expects = request.headers.get("expect", "").lower()
        request.expects_continue = version == "1.1" and expects == "100-continue"
        self._url, self._headers = b"", []
        self._add(request)
        self._in_head, self._unparsed, self._chunks = False, 0, 0
        self._set_read_timer("")

    def on_chunk_header(self) -> None:
        """Counts the chunks of a body."""
        self._chunks += 1
        if self._chunks > MAX_CHUNKS:
            raise _invalid(413, f"the body has more than {MAX_CHUNKS} chunks")

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body."""
        self._unparsed = 0
        request = self.requests[-1]
        request.receive(body)
        if request.arrival is None and len(request.body) > LARGE_BYTES:
            self.transport.pause_reading()  # until it is read

    def on_message_complete(self) -> None:
        """The request has arrived."""
        if self._parser.should_upgrade():
            return
        self._in_head, self._unparsed = True, 0
        self._set_read_timer("")
        self.requests[-1].end()
        # A large body has paused the reading. Without it, a client that leaves would not be noticed.
        if len(self.requests) == 1:
            self.transport.resume_reading()

    def _add(self, request: HttpRequest) -> None:
        """Begins to answer a request, if necessary after the earlier ones."""
        self.requests.append(request)
        if len(self.requests) == 1:
            self._start()
        else:
            self.transport.pause_reading()

    def _set_read_timer(self, part: str) -> None:
        """Ends the connection if a part of a request does not arrive in time; empty expects nothing."""
        self._read_part, self._since = part, time.monotonic()
        if self._read_timer is not None:
            self._read_timer.cancel()
        if part in (NEXT_REQUEST, END):
            seconds = DISCARD_SECONDS if part == END else IDLE_SECONDS
            self._read_timer = self.loop.call_later(seconds, self.close)
        elif part and (seconds := self.backend.settings.message_timeout_seconds):
            self._read_timer = self.loop.call_later(seconds, self._end_wait, part, seconds)

    def _end_wait(self, part: str, seconds: float) -> None:
        """Refuses a request of which a part did not arrive in time; ends a connection without a request."""
        if part == HEAD and not self._unparsed:
            self.transport.close()
        else:
            self._refuse(HttpError(408, f"the {part} did not arrive within {seconds:g} seconds"))

    def _parse_again(self, body: bytes) -> None:
        """Parses a request that asks for another protocol, without this wish.

        The parser would take the body for the other protocol, and the bytes after that for a request.
        """
        http_method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = "".join(f"{name}: {value}\r\n" for name, value in self._headers if name != "upgrade")
        self._create_parser()
        head = b"%s %s HTTP/%s\r\n%s\r\n" % (http_method, self._url, version, lines.encode("latin-1"))
        self.data_received(head + body)

    def _check_head(self, version: str, http_method: str) -> None:
        """Refuses what the parser takes and HTTP forbids, or a proxy may understand in another way.

        Raises:
            HttpError: It is refused.
        """
        self._check_size(len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers))
        if version not in ("1.0", "1.1") or http_method == "CONNECT":
            raise _invalid(400, f"{http_method} of HTTP/{version} is not supported")
        hosts = sum(name == "host" for name, _ in self._headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise _invalid(400, f"it has {hosts} Host headers; must have one")
        codings = [value.lower() for name, value in self._headers if name == "transfer-encoding"]
        if codings and (codings != ["chunked"] or version == "1.0"):
            raise _invalid(501, "Transfer-Encoding must be chunked, in HTTP/1.1")
        if len(self.requests) > MAX_PIPELINED:
            raise _invalid(400, f"{MAX_PIPELINED} requests of the connection wait already")

    def _check_size(self, size: int) -> None:
        if size > MAX_HEAD_BYTES:
            what = "head is" if self._in_head else "extensions or trailers of the body are"
            raise _invalid(431, f"the {what} larger than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, error: Exception) -> None:
        """Refuses the request that is being parsed, and reads no further ones.

        If its head is not valid and earlier requests have not been answered, only those are.
        """
        if self.transport.is_closing():
            return
        self._set_read_timer("")
        self.transport.pause_reading()
        is_head, self._in_head, self._unparsed = self._in_head, True, 0
        if is_head and self.requests:
            self.requests[-1].keep_alive = False
            return
        if is_head:
            path = self._url.partition(b"?")[0].decode("latin-1")
            self._add(HttpRequest(self, "", (path, ""), ()))
        self.requests[-1].end(error)


def _invalid(status: int, reason: str) -> HttpError:
    return HttpError(status, f"the request is not valid: {reason}")


@lru_cache(1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


async def run(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time by a size: inline if it is small, otherwise on another thread."""
    return function() if size <= LARGE_BYTES else await asyncio.to_thread(function)
