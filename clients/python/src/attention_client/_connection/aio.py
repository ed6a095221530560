"""The asynchronous client's connection and its streams, on the channels of grpc.aio and on tasks."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import aclosing, contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
from grpc import aio

from attention_client._connection.base import BaseConnection, Readiness
from attention_client._connection.settings import ConnectionSettings
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
    iterator_of,
)
from attention_client._connection.tls import RenewingChannel, TlsFiles
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import StreamItem
from attention_client.errors import AttentionClientError, CallCancelledError, from_rpc_error

_ResultT = TypeVar("_ResultT")
# If a write meets the end of its call, grpc.aio replaces the call's status by this one, before or after the
# server's status is known. The server's status is lost unless it is recorded when it arrives.
_PLACEHOLDER = "Internal error from Core"
# Seconds. The server's status usually follows the placeholder at once; this bounds the wait for it.
_LONGEST_WAIT = 1.0
StreamCall: TypeAlias = aio.StreamStreamCall[pb.AttendStreamRequest, pb.AttendStreamResponse]


class AsyncRenewingChannel(RenewingChannel[aio.Channel]):
    """A renewing channel of grpc.aio, on one event loop."""

    def __init__(
        self, files: TlsFiles, open_channel: Callable[[grpc.ChannelCredentials], aio.Channel]
    ) -> None:
        """As of `RenewingChannel`."""
        super().__init__(files, open_channel)
        self._closing: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Closes every channel. Calls in progress are cancelled."""
        await asyncio.gather(*(channel.close() for channel in self._channels()), *self._closing)

    def _when_ended(self, call: Any, release: Callable[[], None]) -> None:
        call.add_done_callback(lambda _: release())

    def _close_soon(self, channel: aio.Channel) -> None:
        task = asyncio.ensure_future(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class AsyncConnection(BaseConnection):
    """A connection whose calls are awaited on the event loop that runs when it is created."""

    _grpc = aio
    _renewing_channel = AsyncRenewingChannel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Calls in progress and later calls raise ClientClosedError."""
        self._closed = True
        await self._channel.close()

    def _open_channel(self, settings: ConnectionSettings) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            message = (
                "AsyncAttentionClient must be created inside a running event loop, such as in asyncio.run"
            )
            raise AttentionClientError(message) from error
        return super()._open_channel(settings)

    def _run(self, steps: Coroutine[Any, Any, _ResultT]) -> Any:
        return steps

    async def _send(self, method: Any, request: Any, **options: Any) -> Any:
        with cancellation_told_apart():
            return await method(request, **options)

    async def _is_reported(self, watch: Any, readiness: Readiness) -> bool:
        with cancellation_told_apart():
            async for response in watch:
                if readiness.is_ready(response):
                    return True
        return False

    async def _pause(self, duration: float) -> None:
        await asyncio.sleep(duration)

    def _end_with(self, call: Any, span: CallSpan) -> None:
        call.add_done_callback(lambda done: span.end(ready(done.code())))

    async def _stream(
        self, items: AsyncIterator[StreamItem], settings: StreamSettings
    ) -> AsyncGenerator[Outcome, None]:
        try:
            async with aclosing(_attend_stream(self._open, items, settings)) as outcomes:
                async for outcome in outcomes:
                    yield outcome
        except AttentionClientError as error:
            raise await self._refined(error, settings.timeout) from error.__cause__


# One task reads the caller's iterable and sends its requests; the caller's task receives the responses. Queue
# items (see streams.py) pass from the first to the second, and free slots of `max_in_flight` back.


async def _attend_stream(
    open_call: Callable[[float | None], StreamCall],
    items: AsyncIterator[StreamItem],
    settings: StreamSettings,
) -> AsyncGenerator[Outcome, None]:
    """Runs one stream; closing the generator cancels the call and stops reading."""
    call = open_call(settings.timeout)
    sender, end = _Sender(call, items, settings), CallStatus(call)
    call.add_done_callback(lambda _: sender.queue_items.put_nowait(StreamEnd.CALL_ENDED))
    task = asyncio.create_task(sender.run())
    try:
        while (queue_item := await sender.queue_items.get()) is not StreamEnd.INPUT_ENDED:
            outcome = await _outcome(queue_item, sender, end, settings)
            sender.slots.release()
            if isinstance(outcome, AttentionClientError) and not settings.return_exceptions:
                raise outcome
            yield outcome
        await _finish(call, settings.idle_timeout)
        if sender.failure is not None:
            raise sender.failure
    finally:
        call.cancel()
        task.cancel()
        await asyncio.wait([task])


def async_iterator_of(
    requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
) -> AsyncIterator[StreamItem]:
    """Converts both kinds of iterable to an asynchronous iterator.

    Raises:
        InvalidArgumentError: The requests are not iterable.
    """
    if isinstance(requests, AsyncIterable):
        return aiter(requests)
    return _without_waiting(iterator_of(requests))


async def _without_waiting(items: Iterator[StreamItem]) -> AsyncIterator[StreamItem]:
    for item in items:
        yield item


@contextmanager
def cancellation_told_apart() -> Iterator[None]:
    """Distinguishes a cancelled call from a cancelled task.

    grpc.aio raises asyncio.CancelledError for both. For a cancelled call the caller would take it for the
    cancellation of its own task.
    """
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallCancelledError("the call was cancelled by the server, or the client was closed") from None


async def _outcome(
    queue_item: QueueItem, sender: "_Sender", end: "CallStatus", settings: StreamSettings
) -> Outcome:
    if isinstance(queue_item, AttentionClientError):
        return queue_item
    try:
        return await _receive(queue_item, sender.call, settings.idle_timeout)
    except AttentionClientError as error:
        broken = await end.true_error(error)
    # An exception of the caller's iterable takes precedence over the error of the call that it broke.
    raise sender.failure or broken


async def _receive(queue_item: SentRequest | StreamEnd, call: StreamCall, limit: float | None) -> Outcome:
    """Waits for one response. If the call has ended, gRPC raises the reason."""
    response = await _read(call, limit)
    if not isinstance(response, pb.AttendStreamResponse) or isinstance(queue_item, StreamEnd):
        raise ended_early()
    return decode_response(response, queue_item)


async def _read(call: StreamCall, limit: float | None) -> object:
    """The next response, or gRPC's end-of-stream value."""
    try:
        async with asyncio.timeout(limit) as clock:
            with cancellation_told_apart():
                return await call.read()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except TimeoutError:
        if clock.expired():
            raise idle_too_long(limit) from None
        raise


async def _finish(call: StreamCall, limit: float | None) -> None:
    """Lets the server end the call; all responses have arrived, so a failure now changes nothing."""
    with suppress(AttentionClientError):
        await _read(call, limit)


class _Sender:
    """Reads the caller's iterable as slots become free, and sends its requests.

    Attributes:
        call: The call that carries them.
        queue_items: The queue items, in order.
        failure: The exception of the caller's iterable.
        slots: Released by the receiver, once for each response.
    """

    def __init__(self, call: StreamCall, items: AsyncIterator[StreamItem], settings: StreamSettings) -> None:
        self.queue_items: asyncio.Queue[QueueItem] = asyncio.Queue()
        self.failure: Exception | None = None
        self.slots = asyncio.Semaphore(settings.max_in_flight)
        self.call, self._items, self._options = call, items, settings.options
        self._index = 0

    async def run(self) -> None:
        """Sends until the items end or the call does; the receiver learns of the call's end from the call."""
        try:
            while (request := await self._next_request()) is not None:
                await self.call.write(request)
            await self.call.done_writing()
        except (grpc.RpcError, aio.BaseError, asyncio.InvalidStateError):
            pass
        finally:
            self.queue_items.put_nowait(StreamEnd.INPUT_ENDED)

    async def _next_request(self) -> pb.AttendStreamRequest | None:
        while True:
            await self.slots.acquire()
            try:
                item = await anext(self._items)
                queue_item, request = encode_item(self._index, item, self._options)
            except StopAsyncIteration:
                return None
            except Exception as error:  # raised again, in the caller's task
                self.failure = error
                return None
            self._index += 1
            self.queue_items.put_nowait(queue_item)
            if request is not None:
                return request


class CallStatus:
    """Records the status of one call when it arrives."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def true_error(self, error: AttentionClientError) -> AttentionClientError:
        """The error of the server's status if the given one is the placeholder."""
        if error.message != _PLACEHOLDER:
            return error
        with suppress(TimeoutError):
            await asyncio.wait_for(self._known.wait(), _LONGEST_WAIT)
        if self._status is None or self._status.code() is grpc.StatusCode.OK:
            return ended_early()
        return from_rpc_error(self._status)

    def _note(self, call: aio.Call) -> None:
        """Called at every change of status; the values that it reads are available without waiting."""
        code, details = ready(call.code()), ready(call.details())
        if code is None or details == _PLACEHOLDER:
            return
        metadata = ready(call.trailing_metadata())
        self._status = aio.AioRpcError(code, trailing_metadata=metadata, details=details)
        self._known.set()


def ready(value: Coroutine[Any, Any, _ResultT]) -> _ResultT | None:
    """The value of a coroutine that does not wait; None if it would."""
    try:
        value.send(None)
    except StopIteration as stop:
        result: _ResultT = stop.value
        return result
    value.close()
    return None
