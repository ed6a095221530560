"""The synchronous client's connection: its channel, and what every call on it has in common."""

from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from attention_client._call_spans import Pairs, start_span
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
from attention_client._readiness import HEALTH_REQUEST, Readiness, is_serving, wait_until_ready
from attention_client._renewing import RenewingChannel
from attention_client._targets import Targets
from attention_client._tls import TlsFiles
from attention_client._values import Wire
from attention_client.errors import AttentionClientError, invalid

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")
_YieldT = TypeVar("_YieldT")


class Connection:
    """A channel to one or several servers, with the settings that apply to every call."""

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

    def is_ready(self, *, timeout: float | None = None) -> bool:
        """Asks the server once, over grpc.health.v1, whether it is ready to answer.

        Args:
            timeout: Seconds; None means the client's timeout.

        Raises:
            UnavailableError: No server can be reached.
            AttentionClientError: The server refuses the call.
        """
        limit = seconds(timeout, default=self._settings.timeout)
        return is_serving(self._invoke(self._health.Check, HEALTH_REQUEST, limit, wait_for_ready=False))

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until the server reports that it is ready, over grpc.health.v1; reconnects while it starts.

        Args:
            timeout: Seconds; None means the client's timeout.

        Raises:
            DeadlineExceededError: The server was not ready in time; the message states its last status.
            AttentionClientError: The server refuses the call, and waiting does not help.
        """
        readiness = Readiness(self._settings.name, seconds(timeout, default=self._settings.timeout))
        try:
            wait_until_ready(self._health, readiness, self._settings.metadata)
        except AttentionClientError as error:
            raise self._refined(error) from error.__cause__
        except ValueError as error:
            raise self._refined(error) from error

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]",
        request: _RequestT,
        timeout: float | None,
    ) -> _ResponseT:
        limit = seconds(timeout, default=self._settings.timeout)
        wait = self._settings.wait_for_ready
        span = start_span(type(request).__name__, self._settings.targets)
        if span is None:
            return self._invoke(method, request, limit, wait_for_ready=wait)
        with span:
            return self._invoke(method, request, limit, wait_for_ready=wait, added=span.metadata)

    def _invoke(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]",
        request: _RequestT,
        limit: float,
        *,
        wait_for_ready: bool,
        added: Pairs = (),
    ) -> _ResponseT:
        metadata = (*self._settings.metadata, *added) if added else self._settings.metadata
        try:
            return method(request, timeout=limit, metadata=metadata, wait_for_ready=wait_for_ready)
        except (grpc.RpcError, ValueError) as error:
            raise self._refined(error, limit) from error

    def _open(
        self,
        method: "grpc.StreamStreamMultiCallable[_RequestT, _ResponseT]",
        requests: Iterator[_RequestT],
        timeout: float | None,
    ) -> Any:
        span = start_span("AttendStreamRequest", self._settings.targets)
        try:
            call = method(
                requests,
                timeout=timeout,
                metadata=(*self._settings.metadata, *span.metadata) if span else self._settings.metadata,
                wait_for_ready=self._settings.wait_for_ready,
            )
        except ValueError as error:
            raise self._refined(error) from error
        if span is not None:
            span.ends_with_call(call)
        return call

    def _outcomes(
        self, outcomes: Generator[_YieldT, None, None], timeout: float | None
    ) -> Generator[_YieldT, None, None]:
        """The outcomes of a stream, with the error that ends it refined."""
        try:
            yield from outcomes
        except AttentionClientError as error:
            raise self._refined(error, timeout) from error.__cause__

    def _refined(self, error: Exception, timeout: float | None = None) -> AttentionClientError:
        """The error to raise, with what the connection knows and the call's status does not."""
        found = as_client_error(error, closed=self._closed)
        if is_local_deadline(found):
            found = deadline_error(found, self._settings.name, timeout, self._connection_failure())
        return with_hint(found, self._settings)

    def _connection_failure(self) -> str:
        """The reason if the channel is not connected; otherwise empty. A waiting call does not report it."""
        try:
            self._health.Check(
                HEALTH_REQUEST, timeout=PROBE_SECONDS, metadata=self._settings.metadata, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return failure_of(error)
        except ValueError:  # the client was closed meanwhile
            pass
        return ""


def _open_channel(settings: ConnectionSettings) -> grpc.Channel:
    def secure(credentials: grpc.ChannelCredentials) -> grpc.Channel:
        return grpc.secure_channel(target, credentials, settings.options, settings.compression)

    target = settings.target
    try:
        if settings.credentials is None:
            return grpc.insecure_channel(target, settings.options, settings.compression)
        if isinstance(settings.credentials, TlsFiles):
            return RenewingChannel(settings.credentials, secure)
        return secure(settings.credentials)
    except AttentionClientError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise invalid("channel_options", "options that gRPC takes", error) from error
