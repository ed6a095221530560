"""One request and its answer; and what all requests share: the gRPC server, memory and places.

Of a request, here are its body, within limits of size, memory and time, its call, and what is sent.
"""

import asyncio
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any, NamedTuple, Self, TypeVar

import grpc
import orjson
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, OverloadedError
from attention_serving.server.http import schemas
from attention_serving.server.http.child import HttpOptions
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.observe.records import PARENT, REQUEST_ID, STATE
from attention_serving.server.security import peers
from attention_serving.server.transport.options import METADATA_BYTES

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
# Where the state of a scope has the connection, as a proxy: requests do not keep it alive.
CONNECTION = "connection"
# Headers that are passed on to the gRPC server: rights are its business. So are traces, the headers after the
# first, unless this process makes spans of its own.
FORWARDED = (b"authorization", PARENT.encode(), STATE.encode())
# The gRPC server refuses larger ones, and asks to try again. The rest is for the headers of gRPC itself.
MAX_FORWARDED_BYTES = METADATA_BYTES - 512
# What a header counts for beside its name and value. Source: RFC 9113, section 6.5.2.
HEADER_BYTES = 32
Metadata = Sequence[tuple[str, str | bytes]]
READY = grpc.ChannelConnectivity.READY
OPTIONS = (
    # Sizes are limited by this process and by the gRPC server.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each channel is a connection of its own, so that several reach several workers.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment is not between two processes of one service.
    ("grpc.enable_http_proxy", 0),
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
# An approval is cached for this time, for so many callers.
APPROVED_SECONDS = 1.0
MAX_APPROVALS = 1024
# Everything but inference, and loading of models, is answered at once.
TIMEOUT_SECONDS = 10.0
# Metadata that say who calls. Others, such as identifiers of requests and traces, differ from call to call.
CREDENTIALS = ("authorization", peers.FORWARDED)


class Service:
    """What all requests of one process share. Belongs to one event loop.

    Attributes:
        options: What the process does.
        recorder: Records requests.
        budget: Memory of all requests in progress.
        max_requests: Inference requests that may be in progress.
        places: Those that may begin now.
    """

    def __init__(self, options: HttpOptions) -> None:
        """Connects to the gRPC server with the first call. Each call takes the channel with the fewest calls.

        Args:
            options: Where the server is.
        """
        settings = self.settings = options.settings
        self.options = options
        host, port = settings.host, settings.http_port or 0
        self.recorder = Recorder(settings.log_requests, host=host, port=port, role="http")
        self.budget = MemoryBudget(settings.memory_for_requests)
        self.places = self.max_requests = settings.max_concurrent_calls * settings.workers
        local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        self._channels = [
            grpc.aio.secure_channel(target, local, OPTIONS)
            if options.is_private
            else grpc.aio.insecure_channel(target, OPTIONS)
            for target in options.targets
        ]
        # For each channel, its calls in progress, and its methods by name.
        self._calls = [0] * len(self._channels)
        self._methods: list[Any] = [cache(channel.unary_unary) for channel in self._channels]
        self._turn = count()
        # Until when an approval holds, in the order of the approvals.
        self._approved: dict[bytes, float] = {}

    async def call(
        self, method: str, message: bytes, metadata: Metadata, timeout: float | None, client: Any = None
    ) -> bytes:
        """Calls a method with a serialized message, and returns the serialized reply.

        Args:
            method: Full name of the method, such as /inference.GRPCInferenceService/ServerLive.
            message: The message.
            metadata: Metadata of the call.
            timeout: Seconds until the deadline; None sets none.
            client: The connection of the client. If it is lost, the call is cancelled.

        Raises:
            HTTPException: The call ended with a status other than OK.
            ClientDisconnect: The client left.
        """
        if client is not None and client.is_lost:
            raise ClientDisconnect
        index = self._next()
        call = self._methods[index](method)(message, metadata=metadata, timeout=timeout)
        self._calls[index] += 1
        if client is not None:
            client.on_lost = call.cancel
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise refusal(error) from error
        except asyncio.CancelledError:
            if client is not None and client.is_lost:
                raise ClientDisconnect from None
            raise
        finally:
            self._calls[index] -= 1
            if client is not None:
                client.on_lost = None
        return reply

    async def authorize(self, method: str, model: str, metadata: Metadata) -> None:
        """Asks whether a caller may call a method, unless the same was approved within the last second.

        This process knows no tokens: the gRPC server decides, as it would for the call itself.

        Args:
            method: Full name of the method.
            model: Name of the model; empty if there is none.
            metadata: What the call would be made with.

        Raises:
            HTTPException: It may not.
        """
        credentials = [pair for pair in metadata if pair[0] in CREDENTIALS]
        # Credentials are not kept, only their hash.
        key = hashlib.sha256(repr((credentials, method, model)).encode()).digest()
        now = time.monotonic()
        if self._approved.get(key, 0.0) > now:
            return
        await self.call(peers.ACCESS_CHECK, access_question(method, model), metadata, TIMEOUT_SECONDS)
        self._approved.pop(key, None)
        if len(self._approved) >= MAX_APPROVALS:
            del self._approved[next(iter(self._approved))]
        self._approved[key] = now + APPROVED_SECONDS

    async def close(self) -> None:
        """Closes the connections. Open calls are cancelled."""
        for channel in self._channels:
            await channel.close()
        await asyncio.to_thread(self.recorder.close)

    def _next(self) -> int:
        """The channel with the fewest calls; of equal ones, each in turn.

        One that is not connected is left out while another is: its process may be starting again.
        """
        first, number = next(self._turn), len(self._channels)
        if number == 1:
            return 0
        ready = [channel.get_state(try_to_connect=True) is READY for channel in self._channels]
        turns = [(first + step) % number for step in range(number)]
        return min([turn for turn in turns if ready[turn]] or turns, key=self._calls.__getitem__)


def refusal(error: grpc.aio.AioRpcError | EngineError) -> HTTPException:
    """The answer to a request whose call failed, or that this process refuses itself."""
    if isinstance(error, OverloadedError):
        return _refusal(503, error.message, error.retry_after)
    if isinstance(error, EngineError):
        return _refusal(STATUSES.get(error.code.name, 500), error.message, 1)
    status = STATUSES.get(error.code().name, 500)
    return _refusal(status, error.details() or error.code().name, _retry_seconds(error))


def _refusal(status: int, message: str, retry_seconds: float) -> HTTPException:
    retry = {"retry-after": str(max(1, math.ceil(retry_seconds)))}
    headers = {401: {"www-authenticate": "Bearer"}, 429: retry, 503: retry}
    return HTTPException(status, message, headers.get(status))


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
        parameters: The parameters of the path.
        headers: The headers; of several with one name, the first.
        record: What is noted of the request.
        memory: The memory of the request and its answer.
        body_complete: Whether all of the body has been read, or there is none.
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
        self.record = service.recorder.http_request(scope, route)
        self.parameters: dict[str, str] = scope.get("path_params", {})
        # Of a header that is sent twice, the first counts.
        sent = reversed(scope["headers"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in sent}
        self.memory = Reservation(service.budget)
        self.status = 0
        self._connection = scope["state"][CONNECTION]
        self._has_place = False
        self._begun = False
        self._announced = int(self.headers.get("content-length", 0))
        # Nothing is waited for if the request has no body: the refusal of a GET is sent at once.
        self.body_complete = "transfer-encoding" not in self.headers and not self._announced

    def close(self) -> None:
        """Frees what the request holds, and notes its end."""
        self.memory.release()
        self.service.places += self._has_place
        self.service.recorder.http_ended(self.record, self.status)

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

    async def authorize(self, method: str) -> None:
        """Asks the gRPC server whether the client may call a method, if the body is or may be large.

        A small body is read and sent on, and refused there.

        Raises:
            HTTPException: It may not.
        """
        if not self.service.options.authorize:
            return
        unknown = "transfer-encoding" in self.headers or "content-encoding" in self.headers
        if unknown or self._announced > LARGE_BYTES:
            await self.service.authorize(method, self.parameters.get("model", ""), self.metadata())

    async def call(self, method: str, message: bytes, timeout: float | None = TIMEOUT_SECONDS) -> bytes:
        """Calls a method of the gRPC server on behalf of the client; see `Service.call`."""
        return await self.service.call(method, message, self.metadata(), timeout, self._connection)

    async def decoded(self, data: bytearray, json_size: int, decode: Callable[[bytearray], T]) -> T:
        """Decodes a body whose first bytes are JSON, for which memory is reserved meanwhile.

        Raises:
            HTTPException: The JSON could take more memory than there is.
            OverloadedError: The memory is not available.
        """
        scratch = Reservation(self.service.budget)

        def work() -> T:
            schemas.reserve(data, json_size, self.service.budget.limit_bytes, scratch)
            return decode(data)

        try:
            return await run(len(data), work)
        finally:
            scratch.release()

    async def read(self) -> bytearray:
        """The body, decompressed.

        Raises:
            HTTPException: The body is too large, too slow, or compressed in an unknown way.
            InvalidRequestError: It cannot be decompressed.
            OverloadedError: The memory is not available.
            ClientDisconnect: The client left.
        """
        settings, data = self.service.settings, bytearray()
        decoder = self._decoder()
        if self._announced > settings.max_message_bytes:
            raise self._too_large()
        began, seconds = time.monotonic(), settings.message_timeout_seconds
        while not self.body_complete:
            chunk = await self._chunk()  # empty now and then, so that it is noticed that none arrive
            if seconds and not self.body_complete and time.monotonic() - began > seconds:
                raise HTTPException(408, f"the body did not arrive within {seconds:g} seconds")
            if decoder is None:
                self._add(data, chunk)
            elif chunk:
                await asyncio.to_thread(self._inflate, decoder, data, chunk)
        if decoder is not None and not decoder.eof and (data or self._announced or self._begun):
            raise InvalidRequestError("Content-Encoding", "the compressed body ends too early")
        return data

    async def discard(self) -> None:
        """Reads and drops the rest of a refused body, for a bounded time and size."""
        if not self._begun and self.headers.get("expect", "").lower() == "100-continue":
            return  # the client waits to be asked for the body
        left: int = self.service.settings.max_message_bytes
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DISCARD_SECONDS):
                while not self.body_complete and left > 0:
                    left -= len(await self._chunk())

    async def reply(self, reply: Reply) -> None:
        """Sends the answer. A small one is written with its head, which uvicorn would write by itself."""
        cycle, self.status = self._cycle, int(reply.status)
        size = sum(map(len, reply.parts))
        cycle.keep_alive = cycle.keep_alive and "connection" not in reply.headers
        named = {"content-type": JSON, **reply.headers, REQUEST_ID: self.record.request_id}
        named |= {} if cycle.keep_alive else {"connection": "close"}
        fields = [(b"content-length", b"%d" % size), *cycle.default_headers]
        fields += [(name.encode(), value.encode("latin-1")) for name, value in named.items()]
        start = [STATUS_LINE[self.status], *(b"%s: %s\r\n" % field for field in fields), b"\r\n"]
        is_small = size <= LARGE_BYTES
        if is_small and self.scope["method"] != "HEAD":
            start += reply.parts
        cycle.response_started, cycle.chunked_encoding = True, False
        cycle.expected_content_length = 0 if is_small else size
        if not cycle.disconnected:
            cycle.transport.write(b"".join(start))
        for part in () if is_small else reply.parts:
            for at in range(0, len(part), PIECE_BYTES):
                piece = memoryview(part)[at : at + PIECE_BYTES]
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        # Returns once the client has read most of it.
        await self._send({"type": "http.response.body", "body": b""})

    def metadata(self) -> Metadata:
        """What the gRPC server is told of the client and by it.

        Raises:
            InvalidRequestError: A header contains what gRPC's metadata cannot.
            HTTPException: The headers are larger than the gRPC server takes.
        """
        metadata: list[tuple[str, str | bytes]] = [(REQUEST_ID, self.record.request_id), *self.record.traced]
        forwarded = FORWARDED[:1] if self.record.traced else FORWARDED
        for name, value in self.scope["headers"]:
            if name in forwarded:
                text, known = value.decode("latin-1"), name.decode()
                if not (text.isascii() and text.isprintable()):
                    raise InvalidRequestError(known, "contains characters other than printable ASCII")
                metadata.append((known, text))
        if self._connection.peer_identities:
            metadata.append(peers.forward(self._connection.peer_identities))
        if self.service.options.is_private and self.scope["client"]:  # on others, it is not believed
            host, port = self.scope["client"]
            metadata.append((peers.CLIENT, f"{host}:{port}"))
        size = sum(len(name) + len(value) + HEADER_BYTES for name, value in metadata)
        if size > MAX_FORWARDED_BYTES:
            message = f"the headers that are passed on take {size} bytes; the limit is {MAX_FORWARDED_BYTES}"
            raise HTTPException(431, message)
        return metadata

    async def _chunk(self) -> bytes:
        self._begun = True
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.body_complete = not message["more_body"]
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


async def run(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time by a size: inline if it is small, otherwise on another thread."""
    return function() if size <= LARGE_BYTES else await asyncio.to_thread(function)
