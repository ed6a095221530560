"""Sends the requests of a load over one connection, as unary calls or on one stream.

This file uses `grpc._cython`, the private core of grpcio, on purpose: a load generator must cost less than
the server that it measures. grpcio's public interface gives each call a condition variable, a future and
callbacks on a second thread. Requests per second against one echo server on two busy cores, with 32 calls in
flight: this channel 8,100 at 6 x 64 floats and 6,200-8,500 at 6 x 768; the public interface 4,500 and
5,400-6,800; its asyncio variant 6,300 and 5,900; Triton's C++ load generator 8,200 at 6 x 64.

Times are in nanoseconds of `time.perf_counter_ns`.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each measurement opens a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
)
DEADLINE_SECONDS = 60.0
NO_FLAGS = 0
MESSAGE, STATUS = 4, 5  # positions in the operations of a unary call

clock = time.perf_counter_ns


class CallFailedError(Exception):
    """A call ended without a response. The message holds its status code and details."""


@dataclass(frozen=True, eq=False)
class EncodedRequest:
    """The bytes of one request, and how many sequences and query rows it holds."""

    data: bytes
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request. `status` is the operation that received it, if the request was a call."""

    request: EncodedRequest
    started: int
    ended: int
    succeeded: bool
    status: Any = None


class _Channel:
    """A connection; the events of all its calls arrive in one queue."""

    def __init__(self, target: str) -> None:
        self._channel = cygrpc.Channel(target.encode(), OPTIONS, None)

    def _open(
        self,
        method: bytes,
        batches: tuple[tuple[Iterable[Any], object], ...],
        seconds: float = DEADLINE_SECONDS,
    ) -> Any:
        """Starts a call with batches of operations, each completed by an event that carries its tag."""
        flags = cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS
        deadline = time.time() + seconds
        return self._channel.integrated_call(flags, method, None, deadline, None, None, batches, None)

    def _next_event(self) -> Any:
        """Waits for the next event, with its `tag` and its `batch_operations`."""
        while True:
            event = self._channel.next_call_event()
            if event.completion_type != cygrpc.CompletionType.queue_timeout:
                return event

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close(cygrpc.StatusCode.cancelled, "done")


class UnaryCaller(_Channel):
    """Makes one unary call for each request. `start` and `finish` may run on two threads."""

    def __init__(
        self,
        target: str,
        method: bytes,
        requests: Sequence[EncodedRequest],
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        super().__init__(target)
        self._method = method
        self._requests = cycle(requests)
        self._deadline_seconds = deadline_seconds

    def start(self, since: int | None = None) -> None:
        """Starts the next request. Its deadline and its latency count from `since`; by default from now."""
        request = next(self._requests)
        operations = (
            cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
            cygrpc.SendMessageOperation(request.data, NO_FLAGS),
            cygrpc.SendCloseFromClientOperation(NO_FLAGS),
            cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),
            cygrpc.ReceiveMessageOperation(NO_FLAGS),
            cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
        )
        now = clock()
        started = now if since is None else since
        seconds = self._deadline_seconds - (now - started) / 1e9
        self._open(self._method, ((operations, (request, started)),), seconds)

    def finish(self) -> Completion:
        """Waits until a request completes. The response is not parsed."""
        event = self._next_event()
        ended = clock()
        request, started = event.tag
        status = event.batch_operations[STATUS]
        return Completion(request, started, ended, _is_ok(status), status)

    def receive(self) -> bytes:
        """Waits for a response and returns it.

        Raises:
            CallFailedError: The call ended with another status than OK.
        """
        operations = self._next_event().batch_operations
        if not _is_ok(operations[STATUS]):
            raise CallFailedError(_describe(operations[STATUS]))
        message: bytes = operations[MESSAGE].message()
        return message


OPENED, SENT, RECEIVED, ENDED = range(4)  # tags of the events of a stream


class StreamCaller(_Channel):
    """Sends all requests on one bidirectional stream. Responses keep their order."""

    def __init__(self, target: str, method: bytes, requests: Sequence[EncodedRequest]) -> None:
        super().__init__(target)
        self._requests = cycle(requests)
        self._unsent: deque[EncodedRequest] = deque()
        self._unanswered: deque[tuple[EncodedRequest, int]] = deque()
        self._sending = False
        self._pending_events = len((OPENED, ENDED))
        opening = (
            cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
            cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
        )
        metadata = (cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),)
        self._call = self._open(method, ((opening, ENDED), (metadata, OPENED)))
        self._request_message()

    def start(self, since: int | None = None) -> None:
        """Starts the next request. gRPC allows one message to be written at a time."""
        request = next(self._requests)
        self._unanswered.append((request, clock() if since is None else since))
        self._unsent.append(request)
        self._send()

    def finish(self) -> Completion:
        """Waits for the next response.

        Raises:
            CallFailedError: The stream ended.
        """
        self.receive()
        request, started = self._unanswered.popleft()
        return Completion(request, started, clock(), succeeded=True)

    def receive(self) -> bytes:
        """Waits for the next response and returns it.

        Raises:
            CallFailedError: The stream ended.
        """
        while True:
            event = self._next_event()
            if event.tag == ENDED:
                raise CallFailedError(_describe(event.batch_operations[1]))
            if event.tag == SENT:
                self._sending = False
                self._send()
            if event.tag == RECEIVED and (message := event.batch_operations[0].message()) is not None:
                self._request_message()
                response: bytes = message
                return response

    def close(self) -> None:
        """Ends the stream and closes the connection, which requires that all its events are fetched."""
        self._operate(cygrpc.SendCloseFromClientOperation(NO_FLAGS), SENT)
        while self._pending_events:
            self._next_event()
        super().close()

    def _send(self) -> None:
        if self._unsent and not self._sending:
            self._sending = True
            self._operate(cygrpc.SendMessageOperation(self._unsent.popleft().data, NO_FLAGS), SENT)

    def _request_message(self) -> None:
        self._operate(cygrpc.ReceiveMessageOperation(NO_FLAGS), RECEIVED)

    def _operate(self, operation: Any, tag: int) -> None:
        self._pending_events += 1
        self._call.operate((operation,), tag)

    def _next_event(self) -> Any:
        self._pending_events -= 1
        return super()._next_event()


Caller = UnaryCaller | StreamCaller


def _is_ok(operation: Any) -> bool:
    return bool(operation.code() == cygrpc.StatusCode.ok)


def _describe(operation: Any) -> str:
    return f"status {operation.code()}: {operation.details()}"
