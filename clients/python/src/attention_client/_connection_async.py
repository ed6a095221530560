"""The asynchronous client's connection, on the channels of grpc.aio."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

from grpc import aio

from attention_client._base_connection import BaseConnection, Readiness
from attention_client._call_spans import CallSpan
from attention_client._connection import ConnectionSettings
from attention_client._renewing import AsyncRenewingChannel
from attention_client._stream_async import cancellation_told_apart, ready
from attention_client.errors import AttentionClientError

_ResultT = TypeVar("_ResultT")
_YieldT = TypeVar("_YieldT")


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

    async def _outcomes(
        self, outcomes: AsyncGenerator[_YieldT, None], timeout: float | None
    ) -> AsyncGenerator[_YieldT, None]:
        """The outcomes of a stream, with the error that ends it refined."""
        try:
            async with aclosing(outcomes):
                async for outcome in outcomes:
                    yield outcome
        except AttentionClientError as error:
            raise await self._refined(error, timeout) from error.__cause__
