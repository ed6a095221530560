"""What the connections of both clients share: everything but the awaiting.

Each step is a coroutine. Those of the synchronous client never wait: what they await has blocked before, so
that `finish` runs them to their end. Those of the asynchronous client are awaited by the caller.
"""

import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_client._calls.arrays import DATA_TYPES
from attention_client._calls.attention import EncodedCall
from attention_client._connection.settings import (
    COMPRESSIONS,
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    MAX_RETRIES,
    ChannelOptions,
    Compression,
    Metadata,
    Targets,
    one_of,
    read_metadata,
    read_options,
    read_targets,
    resolve,
    seconds,
)
from attention_client._connection.spans import CallSpan, Pairs, start_span
from attention_client._connection.streams import Exchange, Outcome, StreamSettings, outcomes
from attention_client._connection.tls import TlsFiles
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client._values import (
    RequestOptions,
    ReturnWeights,
    Version,
    Wire,
    request_options,
    type_name,
    whole_number,
)
from attention_client.errors import (
    AttentionClientError,
    CallCancelledError,
    ClientClosedError,
    DeadlineExceededError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
    invalid,
)

_ResultT = TypeVar("_ResultT")
# Seconds that a call may exceed its timeout to find out why the channel is not connected. The reason is
# known at once if the last attempt to connect failed.
_PROBE_SECONDS = 0.05
# How gRPC's core ends a call whose last attempt was not answered in time; the status is CANCELLED.
_ATTEMPT_ENDED = "perAttemptRecvTimeout"
# How gRPC's core reports that a server with TLS closed an unencrypted connection before its first frame, and
# that a server answered a TLS handshake without TLS.
_CLOSED_AT_ONCE = re.compile(r"last error: .*(?:Socket closed|Connection reset by peer)")
_NOT_TLS = "WRONG_VERSION_NUMBER"
HEALTH_REQUEST = health_pb2.HealthCheckRequest(service="")
_SERVING = health_pb2.HealthCheckResponse.SERVING
# More than the memory of any machine holds.
_MAX_IN_FLIGHT = 1_000_000
# The statuses of a server that is starting or restarting; for any other, waiting does not help.
_PASSING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds
# What gRPC raises, and an error that was found to be a cancelled call. A closed channel raises ValueError or
# an error of grpc.aio.
FAILURES = (grpc.RpcError, ValueError, aio.BaseError, AttentionClientError)


def finish(steps: Coroutine[Any, Any, _ResultT]) -> _ResultT:
    """The result of a coroutine that does not wait."""
    try:
        steps.send(None)
    except StopIteration as stop:
        result: _ResultT = stop.value
        return result
    steps.close()
    raise RuntimeError("a call of the synchronous client has waited")


def _cause(error: Exception) -> BaseException | None:
    """What an error of the client is raised from."""
    return error.__cause__ if isinstance(error, AttentionClientError) else error


class BaseConnection:
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
        self._targets = read_targets(target)
        self._name = ", ".join(self._targets)
        if not isinstance(credentials, grpc.ChannelCredentials | TlsFiles | None):
            expected = "grpc.ChannelCredentials, TlsFiles or None"
            raise invalid("credentials", expected, type_name(credentials))
        self._encrypts = credentials is not None
        self._metadata = read_metadata(metadata, token, self._targets, credentials)
        self._timeout = seconds(timeout)
        self._wait_for_ready = wait_for_ready
        self._wire = one_of("wire", wire, DATA_TYPES)
        options = read_options(
            self._targets,
            max_message_bytes=max_message_bytes,
            max_retries=max_retries,
            attempt_timeout=attempt_timeout,
            channel_options=channel_options,
        )
        compressed = COMPRESSIONS[one_of("compression", compression, COMPRESSIONS)]
        self._channel: Any = self._open_channel(credentials, options, compressed)
        self._stub = AttentionServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def _open_channel(self, credentials: grpc.ChannelCredentials | TlsFiles | None, *settings: Any) -> Any:
        target = self._targets[0] if len(self._targets) == 1 else resolve(self._targets)

        def secure(given: grpc.ChannelCredentials) -> Any:
            return self._grpc.secure_channel(target, given, *settings)

        try:
            if credentials is None:
                return self._grpc.insecure_channel(target, *settings)
            if isinstance(credentials, TlsFiles):
                return self._renewing_channel(credentials, secure)
            return secure(credentials)
        except AttentionClientError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise invalid("channel_options", "options that gRPC takes", error) from error

    # What differs between the clients: the module that opens channels, and how they wait.
    _grpc: Any
    _renewing_channel: Any

    def _run(self, steps: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        """The result of steps; of the asynchronous client, the steps, which the caller awaits."""
        raise NotImplementedError

    async def _send(self, method: Any, request: Any, **options: Any) -> Any:
        """Makes a unary call."""
        raise NotImplementedError

    async def _pause(self, duration: float) -> None:
        raise NotImplementedError

    def _end_with(self, call: Any, span: CallSpan) -> None:
        """Ends a span when a stream ends."""
        raise NotImplementedError

    def _exchange(self, items: Any, settings: StreamSettings) -> Exchange:
        """Opens a stream."""
        raise NotImplementedError

    def _options(self, model: str, version: Version, return_weights: ReturnWeights) -> RequestOptions:
        return request_options(model, version, return_weights=return_weights, wire=self._wire)

    def _stream_settings(
        self,
        options: RequestOptions,
        *,
        return_exceptions: bool,
        max_in_flight: int,
        timeout: float | None,
    ) -> StreamSettings:
        """A stream's settings: `timeout` bounds all of it; without one, the client's bounds each wait."""
        return StreamSettings(
            options=options,
            return_exceptions=return_exceptions,
            max_in_flight=whole_number("max_in_flight", max_in_flight, 1, _MAX_IN_FLIGHT),
            timeout=None if timeout is None else seconds(timeout),
            idle_timeout=self._timeout if timeout is None else None,
        )

    async def _outcomes(self, items: Any, settings: StreamSettings) -> AsyncGenerator[Outcome, None]:
        """Opens a stream and runs it."""
        try:
            found = outcomes(self._exchange(items, settings), return_exceptions=settings.return_exceptions)
            async with aclosing(found):
                async for outcome in found:
                    yield outcome
        except AttentionClientError as error:
            raise await self._refined(error, settings.timeout) from error.__cause__

    def _answer(self, call: EncodedCall[_ResultT], timeout: float | None) -> _ResultT:
        return self._run(self._ask(self._stub.Attend, call.requests, call.decode, timeout))

    async def _ask(
        self,
        method: Any,
        requests: Sequence[Any],
        decode: Callable[[list[Any]], _ResultT],
        timeout: float | None,
    ) -> _ResultT:
        """Calls a method, once for each request, and decodes its responses."""
        limit = seconds(timeout, default=self._timeout)
        wait, responses = self._wait_for_ready, []
        for request in requests:
            span = start_span(type(request).__name__, self._targets)
            with span or nullcontext():
                added = span.metadata if span else ()
                response = await self._invoke(method, request, limit, wait_for_ready=wait, added=added)
            responses.append(response)
        return decode(responses)

    async def _is_ready(self, timeout: float | None) -> bool:
        limit = seconds(timeout, default=self._timeout)
        response = await self._invoke(self._health.Check, HEALTH_REQUEST, limit, wait_for_ready=False)
        return bool(response.status == _SERVING)

    async def _wait_until_ready(self, timeout: float | None) -> None:
        limit = seconds(timeout, default=self._timeout)
        end, pause, status = time.monotonic() + limit, _FIRST_PAUSE, "no connection"
        while (left := end - time.monotonic()) > 0:
            options = {"timeout": left, "metadata": self._metadata, "wait_for_ready": False}
            try:
                response = await self._send(self._health.Check, HEALTH_REQUEST, **options)
                if response.status == _SERVING:
                    return
                status = f"status {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"
            except FAILURES as error:
                found = self._as_client_error(error)
                if found.code not in _PASSING or isinstance(found, ClientClosedError):
                    raise await self._refined(found) from _cause(error)
                if found.code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the end of this wait itself
                    status = f"{found.code.name} {found.message}"
            await self._pause(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        message = f"{self._name} was not ready within {limit:g} s; last status: {status}"
        raise await self._refined(DeadlineExceededError(message, reason="DEADLINE_EXCEEDED"))

    async def _invoke(
        self, method: Any, request: Any, limit: float, *, wait_for_ready: bool, added: Pairs = ()
    ) -> Any:
        metadata = (*self._metadata, *added) if added else self._metadata
        try:
            return await self._send(
                method, request, timeout=limit, metadata=metadata, wait_for_ready=wait_for_ready
            )
        except FAILURES as error:
            raise await self._refined(error, limit) from _cause(error)

    def _open(self, timeout: float | None, *requests: Any) -> Any:
        """Begins a stream."""
        span = start_span("AttendStreamRequest", self._targets)
        metadata = (*self._metadata, *span.metadata) if span else self._metadata
        wait = self._wait_for_ready
        try:
            call = self._stub.AttendStream(*requests, timeout=timeout, metadata=metadata, wait_for_ready=wait)
        except (ValueError, aio.BaseError) as error:
            raise self._as_client_error(error) from error
        if span is not None:
            self._end_with(call, span)
        return call

    async def _refined(self, error: Exception, timeout: float | None = None) -> AttentionClientError:
        """The error to raise, with what the connection knows and the call's status does not."""
        found = self._as_client_error(error)
        # The timeout passed before the server sent a status, which would state a reason.
        if isinstance(found, DeadlineExceededError) and not found.reason:
            within = "before the timeout" if timeout is None else f"within {timeout:g} s"
            if failure := await self._connection_failure():
                found = UnavailableError(f"no connection to {self._name} {within}: {failure}")
            else:
                message = found.message
                if timeout is not None:
                    message = f"{self._name} did not answer {within}"
                request_id = found.request_id
                found = DeadlineExceededError(message, reason="DEADLINE_EXCEEDED", request_id=request_id)
        if hint := self._hint(found):
            found.message = f"{found.message}; {hint}"
            found.args = (found.message,)
        return found

    def _as_client_error(self, error: Exception) -> AttentionClientError:
        """Converts what gRPC raises; a closed channel makes it raise exceptions other than RpcError."""
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        is_client_error = isinstance(error, AttentionClientError)
        if self._closed and (isinstance(error, CallCancelledError) or not is_client_error):
            return ClientClosedError("the client is closed; create another to make further calls")
        if isinstance(error, CallCancelledError) and _ATTEMPT_ENDED in error.message:
            message = "none of the call's attempts was answered within attempt_timeout"
            return DeadlineExceededError(message, reason="DEADLINE_EXCEEDED")
        return error if isinstance(error, AttentionClientError) else AttentionClientError(str(error))

    async def _connection_failure(self) -> str:
        """The reason if the channel is not connected; otherwise empty. A waiting call does not report it."""
        options = {"timeout": _PROBE_SECONDS, "metadata": self._metadata, "wait_for_ready": False}
        try:
            await self._send(self._health.Check, HEALTH_REQUEST, **options)
        except grpc.RpcError as error:
            return error.details() or "" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        except FAILURES:  # the client was closed meanwhile
            pass
        return ""

    def _hint(self, error: AttentionClientError) -> str:
        """How to pass a token or credentials, if that may be why the call failed."""
        if isinstance(error, UnauthenticatedError):
            if any(key == "authorization" for key, _ in self._metadata):
                return ""
            return "pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
        if self._encrypts:
            if _NOT_TLS in error.message:
                return "the server does not use TLS: omit credentials (--tls, --ca, --certificate)"
        elif _CLOSED_AT_ONCE.search(error.message):
            return "if the server uses TLS, pass credentials=TlsFiles(ca=FILE) (--tls or --ca FILE)"
        return ""
