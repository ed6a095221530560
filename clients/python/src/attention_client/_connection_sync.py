"""The synchronous client's connection, on grpcio's channels."""

import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from attention_client._base_connection import BaseConnection, Readiness, finish
from attention_client._call_spans import CallSpan
from attention_client._renewing import SyncRenewingChannel
from attention_client.errors import AttentionClientError

_YieldT = TypeVar("_YieldT")


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

    def _outcomes(
        self, outcomes: Generator[_YieldT, None, None], timeout: float | None
    ) -> Generator[_YieldT, None, None]:
        """The outcomes of a stream, with the error that ends it refined."""
        try:
            yield from outcomes
        except AttentionClientError as error:
            raise finish(self._refined(error, timeout)) from error.__cause__
