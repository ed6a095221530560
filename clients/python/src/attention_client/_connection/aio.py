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
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Self, TypeVar

import grpc
from grpc import aio

from attention_client._connection.base import BaseConnection, Channel, finish
from attention_client._connection.streams import (
    Entry,
    Outcome,
    StreamEnd,
    StreamItem,
    StreamSettings,
    encode_item,
    ended_early,
    idle_too_long,
    iterator_of,
)
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import RequestOptions
from attention_client.errors import AttentionClientError, CallCancelledError, from_rpc_error

_ResultT = TypeVar("_ResultT")
_OTHER_LOOP = (
    "this AsyncAttentionClient belongs to the event loop that ran when it was created, and another one runs: "
    "create a client in each asyncio.run, and use it there only"
)
# If a write meets the end of its call, grpc.aio replaces the call's status by this one, before or after the
# server's status is known. The server's status is lost unless it is recorded when it arrives.
_PLACEHOLDER = "Internal error from Core"
# Seconds. The server's status usually follows the placeholder at once; this bounds the wait for it.
_LONGEST_WAIT = 1.0


async def async_iterator_of(
    requests: Iterable[StreamItem] | AsyncIterable[StreamItem],
) -> AsyncIterator[StreamItem]:
    """The requests of either kind of iterable.

    Raises:
        InvalidArgumentError: They are not iterable.
    """
    if isinstance(requests, AsyncIterable):
        async for item in requests:
            yield item
    else:
        for item in iterator_of(requests):
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

    def __init__(
        self, open_call: Callable[[], Any], items: AsyncIterator[StreamItem], settings: StreamSettings
    ) -> None:
        self._call = open_call()
        self.failure: BaseException | None = None
        self._entries: asyncio.Queue[Entry] = asyncio.Queue()
        # The error of the server's status, when that has arrived.
        self._status: asyncio.Future[aio.AioRpcError] = asyncio.get_running_loop().create_future()
        self.slots = asyncio.Semaphore(settings.max_in_flight)
        self._limit = settings.idle_timeout
        self._call.add_done_callback(self._record_status)
        self._call.add_done_callback(lambda _: self._entries.put_nowait(StreamEnd.CALL_ENDED))
        self._sender = asyncio.create_task(self._send(items, settings.options))

    async def _send(self, items: AsyncIterator[StreamItem], options: RequestOptions) -> None:
        """Sends until the items end or the call does; the receiver learns of the call's end from the call."""
        try:
            for index in itertools.count():
                await self.slots.acquire()
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
            raise await self._true_error(error) from None
        except TimeoutError:
            if clock.expired():
                raise idle_too_long(self._limit) from None
            raise
        # At the end of the stream, gRPC returns a value of another type.
        return response if isinstance(response, pb.AttendStreamResponse) else None

    async def stop(self) -> None:
        """See Exchange."""
        self._call.cancel()
        self._sender.cancel()
        await asyncio.wait([self._sender])

    async def _true_error(self, error: grpc.RpcError) -> AttentionClientError:
        """The error of the call, or of the server's status if that of the call is the placeholder."""
        if error.details() == _PLACEHOLDER:
            with suppress(TimeoutError):
                error = await asyncio.wait_for(self._status, _LONGEST_WAIT)
        if error.details() == _PLACEHOLDER or error.code() is grpc.StatusCode.OK:
            return ended_early()
        return from_rpc_error(error)

    def _record_status(self, call: aio.Call) -> None:
        """Called at every change of status; the values that it reads are available without waiting."""
        details = finish(call.details())
        if details != _PLACEHOLDER and not self._status.done():
            code, metadata = finish(call.code()), finish(call.trailing_metadata())
            self._status.set_result(aio.AioRpcError(code, trailing_metadata=metadata, details=details))


class AsyncConnection(BaseConnection):
    """A connection whose calls are awaited on the event loop that runs when it is created."""

    _grpc = aio
    _exchange = AsyncExchange
    _new_lock = asyncio.Lock
    _sleep = staticmethod(asyncio.sleep)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection. Calls in progress and later calls raise ClientClosedError."""
        await self._close_channels()

    def _open_channel(self, credentials: grpc.ChannelCredentials | None) -> Channel:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            message = "AsyncAttentionClient must be created while an event loop runs, as in asyncio.run"
            raise AttentionClientError(message) from None
        return super()._open_channel(credentials)

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        if asyncio.get_running_loop() is not self._loop:
            raise AttentionClientError(_OTHER_LOOP)
        async with super()._channel() as channel:
            yield channel

    def _run(self, steps: Coroutine[Any, Any, _ResultT]) -> Any:
        return steps

    async def _wait(self, result: Any) -> Any:
        with cancellation_told_apart():
            return await result

    def _stream(self, requests: Any, settings: StreamSettings) -> AsyncGenerator[Outcome, None]:
        return self._outcomes(async_iterator_of(requests), settings)
