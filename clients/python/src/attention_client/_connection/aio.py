"""The asynchronous client's connection and its streams, on the channels of grpc.aio and on tasks."""

import asyncio
import itertools
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
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

import grpc
from grpc import aio

from attention_client._connection.base import BaseConnection
from attention_client._connection.spans import CallSpan
from attention_client._connection.streams import (
    Entry,
    Outcome,
    StreamEnd,
    StreamSettings,
    encode_item,
    ended_early,
    idle_too_long,
    iterator_of,
)
from attention_client._connection.tls import RenewingChannel, TlsFiles
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions, StreamItem
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

    def _open_channel(self, credentials: grpc.ChannelCredentials | TlsFiles | None, *settings: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            message = (
                "AsyncAttentionClient must be created inside a running event loop, such as in asyncio.run"
            )
            raise AttentionClientError(message) from error
        return super()._open_channel(credentials, *settings)

    def _run(self, steps: Coroutine[Any, Any, _ResultT]) -> Any:
        return steps

    async def _send(self, method: Any, request: Any, **options: Any) -> Any:
        with cancellation_told_apart():
            return await method(request, **options)

    async def _pause(self, duration: float) -> None:
        await asyncio.sleep(duration)

    def _end_with(self, call: Any, span: CallSpan) -> None:
        call.add_done_callback(lambda done: span.end(ready(done.code())))

    def _exchange(self, items: AsyncIterator[StreamItem], settings: StreamSettings) -> "AsyncExchange":
        return AsyncExchange(self._open(settings.timeout), items, settings)

    def _stream(self, requests: Any, settings: StreamSettings) -> AsyncGenerator[Outcome, None]:
        return self._outcomes(async_iterator_of(requests), settings)


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


class AsyncExchange:
    """A stream whose requests a task reads and sends."""

    def __init__(self, call: StreamCall, items: AsyncIterator[StreamItem], settings: StreamSettings) -> None:
        self.failure: BaseException | None = None
        self._entries: asyncio.Queue[Entry] = asyncio.Queue()
        self._call, self._status = call, CallStatus(call)
        self._slots = asyncio.Semaphore(settings.max_in_flight)
        self._limit = settings.idle_timeout
        call.add_done_callback(lambda _: self._entries.put_nowait(StreamEnd.CALL_ENDED))
        self._sender = asyncio.create_task(self._send(items, settings.options))

    async def _send(self, items: AsyncIterator[StreamItem], options: RequestOptions) -> None:
        """Sends until the items end or the call does; the receiver learns of the call's end from the call."""
        try:
            for index in itertools.count():
                await self._slots.acquire()
                try:
                    entry, request = encode_item(index, await anext(items), options)
                except StopAsyncIteration:
                    break
                except Exception as error:  # raised again, in the caller's task
                    self.failure = error
                    break
                self._entries.put_nowait(entry)
                if request is not None:
                    await self._call.write(request)
            await self._call.done_writing()
        except (grpc.RpcError, aio.BaseError, asyncio.InvalidStateError):
            pass
        finally:
            self._entries.put_nowait(StreamEnd.INPUT_ENDED)

    async def next_entry(self) -> Entry:
        """See Exchange."""
        return await self._entries.get()

    async def read(self) -> pb.AttendStreamResponse | None:
        """See Exchange."""
        try:
            async with asyncio.timeout(self._limit) as clock:
                with cancellation_told_apart():
                    response = await self._call.read()
        except grpc.RpcError as error:
            raise await self._status.true_error(error) from error
        except TimeoutError:
            if clock.expired():
                raise idle_too_long(self._limit) from None
            raise
        # At the end of the stream, gRPC returns a value of another type.
        return response if isinstance(response, pb.AttendStreamResponse) else None

    def free_slot(self) -> None:
        """See Exchange."""
        self._slots.release()

    async def stop(self) -> None:
        """See Exchange."""
        self._call.cancel()
        self._sender.cancel()
        await asyncio.wait([self._sender])


class CallStatus:
    """Records the status of one call when it arrives."""

    def __init__(self, call: aio.Call) -> None:
        self._status: aio.AioRpcError | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    async def true_error(self, error: grpc.RpcError) -> AttentionClientError:
        """The error of the call, or of the server's status if that of the call is the placeholder."""
        if error.details() != _PLACEHOLDER:
            return from_rpc_error(error)
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
