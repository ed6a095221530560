"""What all endpoints share: the gRPC server, the limits, and how a request ends."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.engine.budget import MemoryBudget
from server.engine.errors import EngineError, InvalidRequestError, OverloadedError
from server.http import errors
from server.http.backend import Backend, Metadata
from server.http.body import Body
from server.http.errors import ClientDisconnectedError, HttpError
from server.http.options import HttpOptions

T = TypeVar("T")
log = logging.getLogger(__name__)

# Headers that are passed on to the gRPC server: rights and traces are its business.
FORWARDED = ("authorization", "traceparent", "tracestate")
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
    """

    def __init__(self, options: HttpOptions, backend: Backend) -> None:
        self.options, self.backend = options, backend
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

    def body(self, request: Request) -> Body:
        """The body of a request, which has not been read."""
        return Body(request, self.options.max_message_bytes, self.options.receive_timeout_seconds)


class Exchange(ABC):
    """One request and its answer, as an ASGI application: errors become answers, and nothing escapes."""

    def __init__(self, context: Context) -> None:
        self.context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        started = time.monotonic()
        request = Request(scope, receive, send)
        body = self.context.body(request)
        answered = _Recorder(send)
        try:
            await self.answer(request, body, answered)
        except ClientDisconnectedError:
            answered.status = 499
        except asyncio.CancelledError:  # the grace has ended
            await self._refuse(
                HttpError(503, SHUTTING_DOWN, {"retry-after": "1"}), body, scope, receive, answered
            )
        except HttpError as error:
            await self._refuse(error, body, scope, receive, answered)
        except EngineError as error:
            await self._refuse(errors.of_engine(error), body, scope, receive, answered)
        except Exception:
            log.exception("request failed", extra={"path": scope["path"]})
            await self._refuse(HttpError(500, UNEXPECTED), body, scope, receive, answered)
        if log.isEnabledFor(logging.DEBUG):
            fields = {"method": scope["method"], "path": scope["path"], "status": answered.status}
            milliseconds = round(1000 * (time.monotonic() - started), 3)
            log.debug("request ended", extra={**fields, "milliseconds": milliseconds})

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
    """Sends, and notes the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Mapping[str, object]) -> None:
        if message["type"] == "http.response.start":
            self.status = int(str(message["status"]))
        await self._send(dict(message))


def metadata_of(request: Request) -> Metadata:
    """The headers that are passed on to the gRPC server.

    Raises:
        InvalidRequestError: A header contains what gRPC's metadata cannot.
    """
    metadata = []
    for name in FORWARDED:
        value = request.headers.get(name)
        if value is not None:
            if not (value.isascii() and value.isprintable()):
                raise InvalidRequestError(name, "contains characters other than printable ASCII")
            metadata.append((name, value))
    return metadata


async def run(size: int, function: Callable[[], T]) -> T:
    """Calls a function that takes time by a size: inline if it is small, otherwise on another thread."""
    return function() if size <= INLINE_BYTES else await asyncio.to_thread(function)
