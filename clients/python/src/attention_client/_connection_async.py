"""The asynchronous client's connection: changes with how grpc.aio's channels are made and asked."""

import asyncio
from types import TracebackType
from typing import Self, TypeVar

import grpc
from grpc import aio

from attention_client._connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    channel_options,
    seconds,
)
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client._readiness import Readiness, wait_until_ready_async
from attention_client._stream_async import translated_async

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class AsyncConnection:
    """As `Connection`, on the event loop that runs when it is made."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        asyncio.get_running_loop()  # raises where there is none; grpc.aio would bind to one that never runs
        self._target, self._timeout = target, seconds(timeout)
        options = channel_options(max_message_bytes)
        if credentials is None:
            self._channel = aio.insecure_channel(target, options)
        else:
            self._channel = aio.secure_channel(target, credentials, options)
        self._stub = AttentionServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls under way raise CallCancelledError."""
        await self._channel.close()

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """As `AttentionClient.wait_until_ready`."""
        readiness = Readiness(self._target, seconds(timeout, default=self._timeout))
        await wait_until_ready_async(self._channel, readiness)

    async def _call(
        self,
        method: aio.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
        timeout: float | None,
    ) -> _ResponseT:
        with translated_async():
            return await method(request, timeout=seconds(timeout, default=self._timeout))
