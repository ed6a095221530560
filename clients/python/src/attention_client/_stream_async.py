"""A bidirectional stream on tasks.

One task reads the caller's iterable and sends its requests; the caller's task receives the responses. Queue
items (see _streaming.py) pass from the first to the second, and free slots of `max_in_flight` back.
"""

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
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import grpc
from grpc import aio

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._streaming import (
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
from attention_client._values import StreamItem
from attention_client.errors import AttentionClientError, CallCancelledError, from_rpc_error

# If a write meets the end of its call, grpc.aio replaces the call's status by this one, before or after the
# server's status is known. The server's status is lost unless it is recorded when it arrives.
_PLACEHOLDER = "Internal error from Core"
# Seconds. The server's status usually follows the placeholder at once; this bounds the wait for it.
_LONGEST_WAIT = 1.0
_ValueT = TypeVar("_ValueT")
StreamCall: TypeAlias = aio.StreamStreamCall[pb.AttendStreamRequest, pb.AttendStreamResponse]
OpenCall: TypeAlias = Callable[[float | None], StreamCall]


async def attend_stream(
    open_call: OpenCall, items: AsyncIterator[StreamItem], settings: StreamSettings
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


def ready(value: Coroutine[Any, Any, _ValueT]) -> _ValueT | None:
    """The value of a coroutine that does not wait; None if it would."""
    try:
        value.send(None)
    except StopIteration as stop:
        result: _ValueT = stop.value
        return result
    value.close()
    return None
