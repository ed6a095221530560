"""What all endpoints share: the gRPC server, the limits, and how a request ends."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from attention_serving.server import request_ids
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, OverloadedError
from attention_serving.server.http import errors
from attention_serving.server.http.authorization import Authorization, is_large
from attention_serving.server.http.backend import Backend, Metadata
from attention_serving.server.http.body import Body
from attention_serving.server.http.connection import PEER_IDENTITIES
from attention_serving.server.http.errors import ClientDisconnectedError, HttpError
from attention_serving.server.http.observation import Observer
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.http.record import HttpRecord
from attention_serving.server.tls import forwarding
from attention_serving.server.transport.options import METADATA_BYTES

T = TypeVar("T")
log = logging.getLogger(__name__)

# Headers that are passed on to the gRPC server: rights are its business. So are traces, the headers after the
# first, unless this process makes spans of its own.
FORWARDED = ("authorization", "traceparent", "tracestate")
# The gRPC server refuses larger ones, and asks to try again. The rest is for the headers of gRPC itself.
MAX_FORWARDED_BYTES = METADATA_BYTES - 512
# What a header counts for beside its name and value. Source: RFC 9113, section 6.5.2.
HEADER_BYTES = 32
CLIENT_LEFT = 499
# Where a request keeps its record.
RECORD = "attention.record"
# More than this takes noticeable time to parse or encode, which is then done on another thread.
INLINE_BYTES = 1 << 16
SHUTTING_DOWN = "the server is shutting down; retry on another server"
UNEXPECTED = "the server failed unexpectedly; its log has the details"


class Context:
    """Shared by the endpoints of one process.

    Attributes:
        options: What the process does.
        backend: The gRPC server.
        budget: Memory of all requests in progress.
        authorization: Refuses callers before a large body is read.
        observer: Notes requests.
    """

    def __init__(self, options: HttpOptions, backend: Backend, observer: Observer) -> None:
        self.options, self.backend, self.observer = options, backend, observer
        self.authorization = Authorization(backend) if options.authorize else None
        self.budget = MemoryBudget(options.max_in_flight_bytes)
        self._places = options.max_concurrent_requests
        self._taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds one of the places of inference.

        Raises:
            OverloadedError: All are taken.
        """
        if self._taken >= self._places:
            raise OverloadedError(
                f"{self._places} requests are in progress, which is this server's limit; try again later"
            )
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def authorize(self, request: Request, rpc: str) -> None:
        """Checks that the client may call a method, if its body is worth a question.

        Args:
            request: The request.
            rpc: Name of the method in the service.

        Raises:
            BackendError: It may not.
        """
        if self.authorization is not None and is_large(request.headers):
            model = request.path_params.get("model", "")
            await self.authorization.check(metadata_of(request), rpc, model)

    def body(self, request: Request) -> Body:
        """The body of a request, which has not been read."""
        return Body(request, self.options.max_message_bytes, self.options.receive_timeout_seconds)


class Exchange(ABC):
    """One request and its answer, as an ASGI application: errors become answers, and nothing escapes."""

    def __init__(self, context: Context, path: str) -> None:
        """Creates the endpoint of a path, in which names of parameters are in braces."""
        self.context, self._path = context, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive, send)
        scope[RECORD] = record = self.context.observer.begin(scope, self._path)
        answered = _Recorder(send, record.request_id)
        try:
            await self._answer(request, receive, answered)
        finally:
            self.context.observer.ended(record, answered.status)

    async def _answer(self, request: Request, receive: Receive, send: "_Recorder") -> None:
        body, scope = self.context.body(request), request.scope
        try:
            await self.answer(request, body, send)
        except ClientDisconnectedError:
            send.status = CLIENT_LEFT
        except asyncio.CancelledError:  # the grace has ended
            await self._refuse(
                HttpError(503, SHUTTING_DOWN, {"retry-after": "1"}), body, scope, receive, send
            )
        except HttpError as error:
            await self._refuse(error, body, scope, receive, send)
        except EngineError as error:
            await self._refuse(errors.of_engine(error), body, scope, receive, send)
        except Exception:
            log.exception("request failed", extra={"path": scope["path"]})
            await self._refuse(HttpError(500, UNEXPECTED), body, scope, receive, send)

    @abstractmethod
    async def answer(self, request: Request, body: Body, send: Send) -> None:
        """Sends the answer to a request, or raises an error that becomes one."""

    def page(self, error: HttpError, *, close: bool) -> Response:
        """The answer to a request that is refused."""
        return errors.page(error, close=close)

    async def _refuse(
        self, error: HttpError, body: Body, scope: Scope, receive: Receive, send: "_Recorder"
    ) -> None:
        if send.status:  # an answer has begun; the connection ends without its end
            raise error
        if not body.complete and error.status != HTTPStatus.REQUEST_TIMEOUT:
            await body.discard()
        response = self.page(error, close=not body.complete)
        await response(scope, receive, send)


class _Recorder:
    """Sends, adds the identifier of the request, and notes the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (request_ids.KEY.encode(), request_id.encode())
        self.status = 0

    async def __call__(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = int(str(message["status"]))
            message = {**message, "headers": [*message.get("headers", ()), self._header]}
        await self._send(dict(message))


def metadata_of(request: Request) -> Metadata:
    """The headers that are passed on to the gRPC server.

    Raises:
        InvalidRequestError: A header contains what gRPC's metadata cannot.
        HttpError: The headers are larger than the gRPC server takes.
    """
    record: HttpRecord = request.scope[RECORD]
    metadata: list[tuple[str, str | bytes]] = [*record.metadata()]
    for name in FORWARDED if record.trace is None else FORWARDED[:1]:
        for value in request.headers.getlist(name):
            if not (value.isascii() and value.isprintable()):
                raise InvalidRequestError(name, "contains characters other than printable ASCII")
            metadata.append((name, value))
    if identities := request.scope.get("state", {}).get(PEER_IDENTITIES):
        metadata.append(forwarding.encode(identities))
    if request.client is not None:
        metadata.append((forwarding.CLIENT, f"{request.client.host}:{request.client.port}"))
    size = sum(len(name) + len(value) + HEADER_BYTES for name, value in metadata)
    if size > MAX_FORWARDED_BYTES:
        raise HttpError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the headers that are passed on take {size} bytes; the limit is {MAX_FORWARDED_BYTES}",
        )
    return metadata


async def run(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time by a size: inline if it is small, otherwise on another thread."""
    return function() if size <= INLINE_BYTES else await asyncio.to_thread(function)
