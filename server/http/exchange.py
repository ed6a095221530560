"""One request and its answer; and what all requests share: the gRPC server, memory and places.

Of a request, here are its body, within limits of size, memory and time, its call, and what is sent.
"""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, NamedTuple, Self, TypeVar

import grpc
import orjson
from google.protobuf.wrappers_pb2 import StringValue
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import InvalidRequestError, OverloadedError
from attention_serving.server.http import schemas
from attention_serving.server.observe.logs import milliseconds, requests
from attention_serving.server.observe.records import (
    PARENT,
    REQUEST_ID,
    STATE,
    callers_trace,
    new_request_id,
    sent_request_id,
)
from attention_serving.server.security import peers
from attention_serving.server.settings import Settings
from attention_serving.server.transport.create import METADATA_BYTES

T = TypeVar("T")
JSON = "application/json"
# How zlib is told the format: gzip, and what HTTP calls deflate.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# A compressed body is decompressed in pieces of this size, each of which is reserved. An answer is sent in
# pieces, so that its memory is held until the client has read most of it.
PIECE_BYTES = 1 << 18
# How long the rest of a refused body is read, so that a client that writes all of it first sees the answer.
DISCARD_SECONDS = 5.0
# More than this takes noticeable time to parse or encode, which is then done on another thread; and a larger
# body is worth a question to the gRPC server before it is read.
LARGE_BYTES = 1 << 16
# Headers of bodies whose size is not known before they are read.
UNKNOWN_SIZE = {"transfer-encoding", "content-encoding"}
# Where the state of a scope has the connection.
CONNECTION = "connection"
# The gRPC server refuses larger headers, and asks to try again. The rest is for the headers of gRPC itself.
MAX_FORWARDED_BYTES = METADATA_BYTES - 512
# What a header counts for beside its name and value. Source: RFC 9113, section 6.5.2.
HEADER_BYTES = 32
Metadata = Sequence[tuple[str, str | bytes]]
READY = grpc.ChannelConnectivity.READY
OPTIONS = (
    # Sizes are limited by this process and by the gRPC server.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A stopped process of the server is noticed: its calls end, and it gets no more. The server allows a ping
    # every 10 s. gRPC's core waits a minute for the answer to a ping, whatever the timeout of keepalive is.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that starts again is found within a second. One attempt may take longer on a busy machine.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# Everything but inference, and loading of models, is answered at once.
TIMEOUT_SECONDS = 10.0
# The key in a request's scope of the status with which the connection has answered it.
REFUSED_WITH = "attention_refused_with"


class Service:
    """What all requests of one process share. Belongs to one event loop.

    Attributes:
        settings: Settings of the server.
        budget: Memory of all requests in progress.
        max_requests: Inference requests that may be in progress.
        places: Those that may begin now.
        refusals: What this process itself refused since it last reported them, by reason.
        calls: Calls in progress on each connection to the gRPC server; the least recently used one is first.
    """

    def __init__(self, settings: Settings, targets: Sequence[str]) -> None:
        """Connects to the gRPC server with the first call.

        Args:
            settings: Settings of the server.
            targets: The private socket of each of its processes, as unix:PATH.
        """
        self.settings = settings
        self.budget = MemoryBudget(settings.memory_for_requests)
        self.places = self.max_requests = settings.max_concurrent_calls * settings.workers
        self.refusals: Counter[str] = Counter()
        local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        self.calls = {grpc.aio.secure_channel(target, local, OPTIONS): 0 for target in targets}

    def channel(self) -> grpc.aio.Channel:
        """The connection with the fewest calls; of equal ones, each in turn.

        One that is not connected is left out while another is: its process may be starting again.
        """
        ready = [channel for channel in self.calls if channel.get_state(try_to_connect=True) is READY]
        channel = min(ready or self.calls, key=self.calls.__getitem__)
        self.calls[channel] = self.calls.pop(channel)  # it is the last one now
        return channel

    async def close(self) -> None:
        """Closes the connections. Open calls are cancelled."""
        for channel in self.calls:
            await channel.close()


def access_question(method: str, model: str) -> bytes:
    """The message that asks whether a method may be called, for a model if the name is not empty."""
    return bytes(StringValue(value=f"{method}{peers.SEPARATOR}{model}").SerializeToString())


class Reply(NamedTuple):
    """An answer. The body is in parts, so that tensors are not copied."""

    parts: list[bytes]
    status: int = 200
    headers: Mapping[str, str] = {}

    @classmethod
    def of_json(cls, document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Self:
        """An answer in JSON, which may contain arrays of NumPy."""
        return cls([orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)], status, headers or {})


class Exchange:
    """One request and its answer. It holds memory, and for inference a place, until `close`.

    Attributes:
        service: What all requests share.
        scope: The request, as ASGI describes it.
        route: The path, in which names of parameters are in braces.
        parameters: The parameters of the path.
        headers: The headers; of several with one name, the first.
        request_id: What the client and the log know it by.
        memory: The memory of the request and its answer.
        status: The status of the answer; 0 before it has begun.
    """

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send, route: str) -> None:
        """Reads nothing yet.

        Args:
            service: What all requests share.
            scope: The request.
            receive: Receives the body: a method of uvicorn's own state of the request.
            send: Sends the answer.
            route: The path, in which names of parameters are in braces.
        """
        self.service, self.scope, self._receive, self._send = service, scope, receive, send
        self._cycle: Any = receive.__self__  # type: ignore[attr-defined]
        self.route = route
        self.parameters: dict[str, str] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self.request_id = sent_request_id(self.headers.items()) or new_request_id()
        self._arrived_at = time.monotonic()
        self.memory = Reservation(service.budget)
        self.status = 0
        self._connection = scope["state"][CONNECTION]
        self._has_place = False

    def close(self) -> None:
        """Frees what the request holds, and notes its end."""
        self.memory.release()
        self.service.places += self._has_place
        log_requests = self.service.settings.log_requests
        if log_requests == "all" or (log_requests == "failed" and self.status >= HTTPStatus.BAD_REQUEST):
            traced = callers_trace(self.headers.items())
            fields: dict[str, object] = {"request_id": self.request_id, "method": self.scope["method"]}
            fields |= {"trace_id": traced[0]} if traced else {}
            total = milliseconds(time.monotonic() - self._arrived_at)
            fields |= {"route": self.route, "total_ms": total, "status": self.status}
            requests.info("http request", extra=fields)

    def take_place(self) -> None:
        """Takes a place among the inference requests in progress.

        Raises:
            OverloadedError: There is none.
        """
        if not self.service.places:
            limit = f"{self.service.max_requests} requests are in progress, which is this server's limit"
            raise OverloadedError(f"{limit}; try again later")
        self.service.places -= 1
        self._has_place = True

    async def call(self, method: str, message: bytes, timeout: float | None = TIMEOUT_SECONDS) -> bytes:
        """Calls a method of the gRPC server on behalf of the client; returns the serialized reply.

        Args:
            method: Full name of the method, such as /inference.GRPCInferenceService/ServerLive.
            message: The serialized message.
            timeout: Seconds until the deadline; None sets none.

        Raises:
            AioRpcError: The call ended with a status other than OK.
            ClientDisconnect: The client left, which cancels the call.
        """
        metadata, connection = self._metadata(), self._connection
        if connection.is_lost:
            raise ClientDisconnect
        channel, calls = self.service.channel(), self.service.calls
        unary: Any = channel.unary_unary(method)
        call = unary(message, metadata=metadata, timeout=timeout)
        calls[channel] += 1
        connection.on_lost = call.cancel
        try:
            reply: bytes = await call
        except asyncio.CancelledError:
            if connection.is_lost:
                raise ClientDisconnect from None
            raise
        finally:
            calls[channel] -= 1
            connection.on_lost = None
        return reply

    def _metadata(self) -> Metadata:
        """What the gRPC server is told of the client and by it.

        Raises:
            InvalidRequestError: A header contains what gRPC's metadata cannot.
            HTTPException: The headers are larger than the gRPC server takes.
        """
        metadata: list[tuple[str, str | bytes]] = [(REQUEST_ID, self.request_id)]
        for name in (PARENT, STATE, "authorization"):
            for text in self.headers.getlist(name):
                if not (text.isascii() and text.isprintable()):
                    raise InvalidRequestError(name, "contains characters other than printable ASCII")
                metadata.append((name, text))
        if names := self._connection.peer_identities:
            metadata.append((peers.FORWARDED, orjson.dumps(names)))
        if self.service.settings.has_identities and self.scope["client"]:  # tokens that fail count for it
            host, port = self.scope["client"]
            metadata.append((peers.CLIENT, f"{host}:{port}"))
        size = sum(len(name) + len(value) + HEADER_BYTES for name, value in metadata)
        if size > MAX_FORWARDED_BYTES:
            message = f"the headers that are passed on take {size} bytes; the limit is {MAX_FORWARDED_BYTES}"
            raise HTTPException(431, message)
        return metadata

    async def decode_body(self, data: bytearray, json_size: int, decode: Callable[[bytearray], T]) -> T:
        """Decodes a body whose first bytes are JSON, for which memory is reserved meanwhile.

        Raises:
            HTTPException: The JSON could take more memory than there is.
            OverloadedError: The memory is not available.
        """
        scratch, limit = Reservation(self.service.budget), self.service.budget.limit_bytes

        def work() -> T:
            memory = schemas.memory_of(data, json_size)
            if memory > limit:
                could = f"the JSON could take {memory} bytes of memory; the limit is {limit}"
                raise HTTPException(413, f"{could}; send binary tensors")
            scratch.add(memory)
            return decode(data)

        try:
            return await run(len(data), work)
        finally:
            scratch.release()

    @property
    def body_has_arrived(self) -> bool:
        """Whether all of the body has arrived, or there is none."""
        return not self._cycle.more_body

    async def read(self, method: str) -> bytearray:
        """The body, decompressed, of a request that a method of the gRPC server answers.

        Raises:
            AioRpcError: The client may not call the method.
            HTTPException: The body is too large, or compressed in an unknown way.
            InvalidRequestError: It cannot be decompressed.
            OverloadedError: The memory is not available.
            ClientDisconnect: The client left, or was too slow.
        """
        settings, size = self.service.settings, int(self.headers.get("content-length", 0))
        may_be_large = size > LARGE_BYTES or not UNKNOWN_SIZE.isdisjoint(self.headers)
        if settings.has_identities and may_be_large:  # a small body is sent on, and refused there
            await self.call(peers.ACCESS_CHECK, access_question(method, self.parameters.get("model", "")))
        data, decoder = bytearray(), self._decoder()
        if size > settings.max_message_bytes:
            raise self._too_large()
        while self._cycle.body or not self.body_has_arrived:
            chunk = await self._chunk()
            if decoder is None:
                self._add(data, chunk)
            else:
                await asyncio.to_thread(self._inflate, decoder, data, chunk)
        if decoder is not None and not decoder.eof:
            raise InvalidRequestError("Content-Encoding", "the compressed body ends too early")
        return data

    async def discard(self) -> None:
        """Reads and drops the rest of a refused body, for a bounded time and size."""
        if self._cycle.waiting_for_100_continue:
            return
        remaining: int = self.service.settings.max_message_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self.body_has_arrived and remaining > 0:
                    remaining -= len(await self._chunk())

    async def _chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return bytes(message["body"])

    def _inflate(self, decoder: "zlib._Decompress", data: bytearray, chunk: bytes) -> None:
        """Adds what compressed data contain. One of 64 KB may contain 64 MB: too much for the event loop."""
        more = bool(chunk)
        while more:
            try:
                piece = decoder.decompress(chunk, PIECE_BYTES)
            except zlib.error as error:
                raise InvalidRequestError("Content-Encoding", f"the body is damaged: {error}") from None
            self._add(data, piece)
            chunk, more = decoder.unconsumed_tail, len(piece) == PIECE_BYTES
        if decoder.unused_data:
            raise InvalidRequestError("Content-Encoding", "data follow the compressed body")

    def _add(self, data: bytearray, chunk: bytes) -> None:
        if len(data) + len(chunk) > self.service.settings.max_message_bytes:
            raise self._too_large()
        self.memory.add(len(chunk))
        data += chunk

    def _decoder(self) -> "zlib._Decompress | None":
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return None
        if encoding not in WINDOW_BITS:
            message = f"Content-Encoding: is {encoding[:100]!r}; must be gzip, deflate or identity"
            raise HTTPException(415, message, {"accept-encoding": "gzip, deflate, identity"})
        return zlib.decompressobj(WINDOW_BITS[encoding])

    def _too_large(self) -> HTTPException:
        limit = int(self.service.settings.max_message_bytes)
        return HTTPException(413, f"the body is larger than the limit of {limit} bytes")

    async def reply(self, reply: Reply) -> None:
        """Sends the answer; returns once the client has read most of it.

        uvicorn would write the head by itself. A small body is written with it, in one system call.

        Raises:
            ClientDisconnect: The client has left, or did not read on in time.
        """
        cycle, self.status = self._cycle, reply.status
        size = sum(map(len, reply.parts))
        cycle.keep_alive = cycle.keep_alive and "connection" not in reply.headers
        is_empty = self.status == HTTPStatus.NO_CONTENT
        headers = {} if is_empty else {"content-type": JSON, "content-length": str(size)}
        headers |= {**reply.headers, REQUEST_ID: self.request_id}
        headers |= {} if cycle.keep_alive else {"connection": "close"}
        fields = list(cycle.default_headers)
        fields += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        start = [STATUS_LINE[self.status], *(b"%s: %s\r\n" % field for field in fields), b"\r\n"]
        is_small = size <= LARGE_BYTES
        if is_small and self.scope["method"] != "HEAD":
            start += reply.parts
        cycle.response_started, cycle.chunked_encoding = True, False
        cycle.expected_content_length = 0 if is_small else size
        if not cycle.disconnected:
            cycle.transport.write(b"".join(start))
        for piece in () if is_small else _pieces(reply.parts):
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        if cycle.disconnected:
            raise ClientDisconnect


def _pieces(parts: Iterable[bytes]) -> Iterator[memoryview]:
    for part in parts:
        for at in range(0, len(part), PIECE_BYTES):
            yield memoryview(part)[at : at + PIECE_BYTES]


async def run(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time by a size: inline if it is small, otherwise on another thread."""
    return function() if size <= LARGE_BYTES else await asyncio.to_thread(function)
