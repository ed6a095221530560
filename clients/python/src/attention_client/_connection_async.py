"""The asynchronous client's connection: its channel, and what every call on it has in common."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from attention_client._call_spans import Pairs, start_span
from attention_client._call_status import ready
from attention_client._connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    MAX_RETRIES,
    ChannelOptions,
    Compression,
    ConnectionSettings,
    Metadata,
    connection_settings,
    seconds,
)
from attention_client._failures import (
    PROBE_SECONDS,
    as_client_error,
    deadline_error,
    failure_of,
    is_local_deadline,
    with_hint,
)
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client._readiness import HEALTH_REQUEST, Readiness, is_serving, wait_until_ready_async
from attention_client._renewing_async import AsyncRenewingChannel
from attention_client._stream_async import translated_async
from attention_client._targets import Targets
from attention_client._tls import TlsFiles
from attention_client._values import Wire
from attention_client.errors import AttentionClientError, invalid

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")
_YieldT = TypeVar("_YieldT")


class AsyncConnection:
    """As `Connection`, on the event loop that runs when it is created."""

    def __init__(  # noqa: PLR0913 - one parameter is one setting
        self,
        target: Targets = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | TlsFiles | None = None,
        token: str | None = None,
        metadata: Metadata | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = MAX_RETRIES,
        attempt_timeout: float | None = None,
        wait_for_ready: bool = True,
        compression: Compression | None = None,
        wire: Wire = "fp32",
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        channel_options: ChannelOptions | None = None,
    ) -> None:
        _require_event_loop()
        self._closed = False
        self._settings = connection_settings(
            target,
            credentials=credentials,
            token=token,
            metadata=metadata,
            timeout=timeout,
            max_retries=max_retries,
            attempt_timeout=attempt_timeout,
            wait_for_ready=wait_for_ready,
            compression=compression,
            wire=wire,
            max_message_bytes=max_message_bytes,
            channel_options=channel_options,
        )
        self._channel = _open_channel(self._settings)
        self._stub = AttentionServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

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

    async def is_ready(self, *, timeout: float | None = None) -> bool:
        """As `AttentionClient.is_ready`."""
        limit = seconds(timeout, default=self._settings.timeout)
        return is_serving(await self._invoke(self._health.Check, HEALTH_REQUEST, limit, wait_for_ready=False))

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """As `AttentionClient.wait_until_ready`."""
        readiness = Readiness(self._settings.name, seconds(timeout, default=self._settings.timeout))
        try:
            with translated_async():
                await wait_until_ready_async(self._health, readiness, self._settings.metadata)
        except (AttentionClientError, aio.BaseError) as error:
            raise await self._refined(error) from error.__cause__

    async def _call(
        self,
        method: aio.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
        timeout: float | None,
    ) -> _ResponseT:
        limit = seconds(timeout, default=self._settings.timeout)
        wait = self._settings.wait_for_ready
        span = start_span(type(request).__name__, self._settings.targets)
        if span is None:
            return await self._invoke(method, request, limit, wait_for_ready=wait)
        with span:
            return await self._invoke(method, request, limit, wait_for_ready=wait, added=span.metadata)

    async def _invoke(
        self,
        method: aio.UnaryUnaryMultiCallable[_RequestT, _ResponseT],
        request: _RequestT,
        limit: float,
        *,
        wait_for_ready: bool,
        added: Pairs = (),
    ) -> _ResponseT:
        metadata = (*self._settings.metadata, *added) if added else self._settings.metadata
        try:
            with translated_async():
                return await method(request, timeout=limit, metadata=metadata, wait_for_ready=wait_for_ready)
        except (AttentionClientError, aio.BaseError) as error:
            raise await self._refined(error, limit) from error.__cause__

    def _open(
        self, method: "aio.StreamStreamMultiCallable[_RequestT, _ResponseT]", timeout: float | None
    ) -> aio.StreamStreamCall[_RequestT, _ResponseT]:
        span = start_span("AttendStreamRequest", self._settings.targets)
        try:
            call = method(
                timeout=timeout,
                metadata=(*self._settings.metadata, *span.metadata) if span else self._settings.metadata,
                wait_for_ready=self._settings.wait_for_ready,
            )
        except aio.BaseError as error:
            raise as_client_error(error, closed=self._closed) from error
        if span is not None:
            ended = span
            call.add_done_callback(lambda done: ended.end(ready(done.code())))
        return call

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

    async def _refined(self, error: Exception, timeout: float | None = None) -> AttentionClientError:
        """The error to raise, with what the connection knows and the call's status does not."""
        found = as_client_error(error, closed=self._closed)
        if is_local_deadline(found):
            failure = await self._connection_failure()
            found = deadline_error(found, self._settings.name, timeout, failure)
        return with_hint(found, self._settings)

    async def _connection_failure(self) -> str:
        """The reason if the channel is not connected; otherwise empty. A waiting call does not report it."""
        try:
            await self._health.Check(
                HEALTH_REQUEST, timeout=PROBE_SECONDS, metadata=self._settings.metadata, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return failure_of(error)
        except aio.BaseError:  # the client was closed meanwhile
            pass
        return ""


def _require_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        message = "AsyncAttentionClient must be created inside a running event loop, such as in asyncio.run"
        raise AttentionClientError(message) from error


def _open_channel(settings: ConnectionSettings) -> aio.Channel:
    def secure(credentials: grpc.ChannelCredentials) -> aio.Channel:
        return aio.secure_channel(target, credentials, settings.options, settings.compression)

    target = settings.target
    try:
        if settings.credentials is None:
            return aio.insecure_channel(target, settings.options, settings.compression)
        if isinstance(settings.credentials, TlsFiles):
            return AsyncRenewingChannel(settings.credentials, secure)
        return secure(settings.credentials)
    except AttentionClientError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid("channel_options", "options that gRPC takes", error) from error
