"""The synchronous client's connection and its streams, on grpcio's channels and on threads."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import grpc

from attention_client._connection.base import BaseConnection, Readiness, finish
from attention_client._connection.spans import CallSpan
from attention_client._connection.streams import (
    Outcome,
    QueueItem,
    SentRequest,
    StreamEnd,
    StreamSettings,
    decode_response,
    encode_item,
    ended_early,
    idle_too_long,
)
from attention_client._connection.tls import RenewingChannel
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import StreamItem
from attention_client.errors import AttentionClientError, from_rpc_error


class SyncRenewingChannel(RenewingChannel[grpc.Channel]):
    """A renewing channel of grpcio."""

    def close(self) -> None:
        """Closes every channel. Calls in progress are cancelled."""
        for channel in self._channels():
            channel.close()

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        # A unary call has ended: it returned its response.
        if not (isinstance(call, grpc.RpcContext) and call.add_callback(release)):
            release()

    def _close_soon(self, channel: grpc.Channel) -> None:
        """Closes a channel on another thread: the last call may have ended on the channel's own thread."""
        threading.Thread(target=channel.close, name="close", daemon=True).start()


class Connection(BaseConnection):
    """A connection whose calls block."""

    _grpc = grpc
    _renewing_channel = SyncRenewingChannel
    _run = staticmethod(finish)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection. Calls in progress and later calls raise ClientClosedError."""
        self._closed = True
        self._channel.close()

    async def _send(self, method: Any, request: Any, **options: Any) -> Any:
        return method(request, **options)

    async def _is_reported(self, watch: Any, readiness: Readiness) -> bool:
        return any(readiness.is_ready(response) for response in watch)

    async def _pause(self, duration: float) -> None:
        time.sleep(duration)

    def _end_with(self, call: Any, span: CallSpan) -> None:
        def end() -> None:
            span.end(call.code())

        if not call.add_callback(end):  # it has ended
            end()

    def _stream(
        self, items: Iterator[StreamItem], settings: StreamSettings
    ) -> Generator[Outcome, None, None]:
        try:
            yield from _attend_stream(self._open, items, settings)
        except AttentionClientError as error:
            raise finish(self._refined(error, settings.timeout)) from error.__cause__


# A thread of gRPC reads the caller's iterable and sends its requests; the caller's thread receives the
# responses. Queue items (see streams.py) pass from the first to the second, and free slots of `max_in_flight`
# back.


def _attend_stream(
    open_call: Callable[..., Any], items: Iterator[StreamItem], settings: StreamSettings
) -> Generator[Outcome, None, None]:
    """Runs one stream; closing the generator cancels the call and stops reading."""
    requests = _Requests(items, settings)
    call = open_call(settings.timeout, requests)
    idle = _IdleWatch(call, settings.idle_timeout)
    if not call.add_callback(requests.call_ended):
        requests.call_ended()
    try:
        yield from _outcomes(requests, call, idle, settings)
        _finish(call, idle)
        if requests.failure is not None:
            raise requests.failure
    finally:
        requests.stop()
        idle.stop()
        call.cancel()


def _outcomes(
    requests: "_Requests", call: Any, idle: "_IdleWatch", settings: StreamSettings
) -> Generator[Outcome, None, None]:
    while (queue_item := requests.queue_items.get()) is not StreamEnd.INPUT_ENDED:
        outcome = (
            queue_item
            if isinstance(queue_item, AttentionClientError)
            else _receive(queue_item, requests, call, idle)
        )
        requests.free_slot()
        if isinstance(outcome, AttentionClientError) and not settings.return_exceptions:
            raise outcome
        yield outcome


def _receive(
    queue_item: SentRequest | StreamEnd, requests: "_Requests", call: Any, idle: "_IdleWatch"
) -> Outcome:
    """Waits for one response. If the call has ended, gRPC raises the reason."""
    try:
        with idle.waiting():
            response = next(call)
    except (grpc.RpcError, StopIteration) as error:
        broken = idle.failure or _call_error(error)
    else:
        if isinstance(queue_item, StreamEnd):
            raise ended_early()
        return decode_response(response, queue_item)
    # An exception of the caller's iterable takes precedence over the error of the call that it broke.
    raise requests.failure or broken


def _finish(call: Any, idle: "_IdleWatch") -> None:
    """Lets the server end the call; all responses have arrived, so a failure now changes nothing."""
    with suppress(grpc.RpcError, StopIteration), idle.waiting():
        next(call)


def _call_error(error: Exception) -> AttentionClientError:
    return from_rpc_error(error) if isinstance(error, grpc.RpcError) else ended_early()


class _Requests(Iterator[pb.AttendStreamRequest]):
    """The requests of a stream, encoded from the caller's iterable as slots become free.

    Attributes:
        queue_items: The queue items, in order.
        failure: The exception of the caller's iterable.
    """

    def __init__(self, items: Iterator[StreamItem], settings: StreamSettings) -> None:
        self.queue_items: queue.SimpleQueue[QueueItem] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._items = zip(itertools.count(), items, strict=False)
        self._options = settings.options
        self._slots = threading.Semaphore(settings.max_in_flight)
        self._stopped = False

    def __next__(self) -> pb.AttendStreamRequest:
        while True:
            self._slots.acquire()
            queue_item, request = self._read()
            self.queue_items.put(queue_item)
            if request is not None:
                return request
            if queue_item is StreamEnd.INPUT_ENDED:
                raise StopIteration

    def _read(self) -> tuple[QueueItem, pb.AttendStreamRequest | None]:
        if self._stopped:
            return StreamEnd.INPUT_ENDED, None
        try:
            index, item = next(self._items)
            return encode_item(index, item, self._options)
        except StopIteration:
            return StreamEnd.INPUT_ENDED, None
        except BaseException as error:  # raised again, in the caller's thread
            self.failure = error
            return StreamEnd.INPUT_ENDED, None

    def free_slot(self) -> None:
        """Allows one more request to be read."""
        self._slots.release()

    def call_ended(self) -> None:
        """Wakes a receiver that waits for the next request of a slow iterable."""
        self.queue_items.put(StreamEnd.CALL_ENDED)

    def stop(self) -> None:
        """Stops reading; an iterable that is blocked now is read up to its next item."""
        self._stopped = True
        self._slots.release()


class _IdleWatch:
    """Cancels a call whose next response takes too long; gRPC does not have such a limit.

    Attributes:
        failure: The error to raise after it cancelled the call.
    """

    def __init__(self, call: Any, limit: float | None) -> None:
        self.failure: AttentionClientError | None = None
        self._call, self._limit = call, limit
        self._since: float | None = None
        self._stopped = threading.Event()
        if limit is not None:
            threading.Thread(target=self._run, args=(limit,), name="attention-idle", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the block as a wait for one response."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _run(self, limit: float) -> None:
        left = limit
        while not self._stopped.wait(left):  # wakes once per limit while responses arrive
            since = self._since
            left = limit if since is None else since + limit - time.monotonic()
            if left <= 0:
                self.failure = idle_too_long(limit)
                self._call.cancel()
                return
