"""What the connections of both clients share: everything but the awaiting.

Each step is a coroutine. Those of the synchronous client never wait: what they await has blocked before, so
that `finish` runs them to their end. Those of the asynchronous client are awaited by the caller.
"""

import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_client import errors
from attention_client._calls.arrays import DATA_TYPES
from attention_client._calls.attention import EncodedCall, ModelDigests
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
    proxy_variable,
    read_metadata,
    read_options,
    read_service_config,
    read_targets,
    resolve,
    seconds,
)
from attention_client._connection.spans import Pairs, span_of
from attention_client._connection.streams import Exchange, Outcome, StreamSettings, receive_all
from attention_client._connection.tls import RenewedCredentials, TlsFiles
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client._values import (
    RequestOptions,
    ReturnWeights,
    Version,
    Wire,
    request_options,
    type_name,
)
from attention_client.errors import AttentionClientError, from_rpc_error, invalid

_ResultT = TypeVar("_ResultT")
# Seconds that a call may exceed its timeout to find out why the channel is not connected. The reason is
# known at once if the last attempt to connect failed.
_PROBE_SECONDS = 0.05
# How gRPC's core ends a call whose last attempt was not answered in time; the status is CANCELLED.
_ATTEMPT_ENDED = "perAttemptRecvTimeout"
# What the core reports if a server with TLS closes an unencrypted connection, and if a server has no TLS.
_CLOSED_AT_ONCE = re.compile(r"last error: .*(?:Socket closed|Connection reset by peer)")
_NOT_TLS = "WRONG_VERSION_NUMBER"
_REFUSED = "Connection refused"
HEALTH_REQUEST = health_pb2.HealthCheckRequest(service="")
_SERVING = health_pb2.HealthCheckResponse.SERVING
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


@dataclass(slots=True, eq=False)
class Channel:
    """A channel of gRPC.

    Attributes:
        channel: The channel.
        methods: What calls each method of the server, by its name.
        calls: The number of calls in progress.
    """

    channel: Any
    methods: Mapping[str, Any]
    calls: int = 0


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
        # A single server may replace a version between calls; several must have the same artifacts.
        self._digests = ModelDigests() if len(self._targets) > 1 else None
        if not isinstance(credentials, grpc.ChannelCredentials | TlsFiles | None):
            expected = "grpc.ChannelCredentials, TlsFiles or None"
            raise invalid("credentials", expected, type_name(credentials))
        self._metadata = read_metadata(metadata, token, self._targets, credentials)
        self._encrypts = credentials is not None
        self._timeout = seconds(timeout)
        self._wait_for_ready = wait_for_ready
        self._wire = one_of("wire", wire, DATA_TYPES)
        service_config = read_service_config(max_retries, attempt_timeout)
        options = read_options(self._targets, max_message_bytes, service_config, channel_options)
        self._settings = (options, COMPRESSIONS[one_of("compression", compression, COMPRESSIONS)])
        self._address = self._targets[0] if len(self._targets) == 1 else resolve(self._targets)
        self._renewed = RenewedCredentials(credentials) if isinstance(credentials, TlsFiles) else None
        # The last one is used; earlier ones have other certificates and close after their last call.
        self._channels = [self._open_channel(self._renewed.first if self._renewed else credentials)]
        self._lock = threading.Lock()

    def _open_channel(self, credentials: Any) -> Channel:
        try:
            if credentials is None:
                channel = self._grpc.insecure_channel(self._address, *self._settings)
            else:
                channel = self._grpc.secure_channel(self._address, credentials, *self._settings)
        except (TypeError, ValueError, OverflowError) as error:
            raise invalid("channel_options", "options that gRPC takes", error) from None
        check = health_pb2_grpc.HealthStub(channel).Check
        return Channel(channel, {**vars(AttentionServiceStub(channel)), "Check": check})

    @asynccontextmanager
    async def _channel(self) -> AsyncIterator[Channel]:
        """The channel of one call."""
        with self._lock:
            if self._renewed and not self._closed and (credentials := self._renewed.renewed()):
                self._channels.append(self._open_channel(credentials))
            channel = self._channels[-1]
            channel.calls += 1
        try:
            yield channel
        finally:
            with self._lock:
                channel.calls -= 1
                unused = [old for old in self._channels[:-1] if not old.calls]
                self._channels = [other for other in self._channels if other not in unused]
            for old in unused:
                await self._wait(old.channel.close())

    async def _close_channels(self) -> None:
        """Closes all channels, which cancels the calls in progress, and opens no more."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            await self._wait(channel.channel.close())

    # What differs between the clients: the module that opens channels, and how they wait.
    _grpc: Any
    _exchange: Callable[[Callable[..., Any], Any, StreamSettings], Exchange]
    _new_lock: Callable[[], AbstractAsyncContextManager[Any]]
    _sleep: Callable[[float], Any]

    def _run(self, steps: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        """The result of steps; of the asynchronous client, the steps, which the caller awaits."""
        raise NotImplementedError

    async def _wait(self, result: Any) -> Any:
        """What gRPC or `_sleep` returned; of the asynchronous client, what it is when it has been awaited."""
        raise NotImplementedError

    def _options(self, model: str, version: Version, *, weights: ReturnWeights = False) -> RequestOptions:
        return request_options(model, version, return_weights=weights, wire=self._wire)

    async def _outcomes(self, items: Any, settings: StreamSettings) -> AsyncGenerator[Outcome, None]:
        """Opens a stream and runs it. It ends with an error if the model changes."""
        with span_of("AttendStream", self._targets) as added:
            try:
                async with self._channel() as channel:
                    open_call = partial(self._begin, channel, settings.timeout, added)
                    exchange = self._exchange(open_call, items, settings)
                    digests = self._digests or ModelDigests()
                    async with aclosing(receive_all(exchange, settings)) as outcomes:
                        async for outcome in outcomes:
                            if not isinstance(outcome, AttentionClientError):
                                digests.check(outcome)
                            yield outcome
            except AttentionClientError as error:
                raise await self._refine(error, settings.timeout) from None

    def _begin(self, channel: Channel, timeout: float | None, added: Pairs, *requests: Any) -> Any:
        """Begins the call of a stream."""
        options = {"timeout": timeout, "metadata": (*self._metadata, *added)}
        try:
            return channel.methods["AttendStream"](*requests, wait_for_ready=self._wait_for_ready, **options)
        except (ValueError, aio.BaseError) as error:
            raise self._as_client_error(error) from None

    def _answer(self, call: EncodedCall[_ResultT], timeout: float | None) -> _ResultT:
        return self._run(self._attend(call, timeout))

    async def _attend(self, call: EncodedCall[_ResultT], timeout: float | None) -> _ResultT:
        """Sends the requests of a call, and decodes the responses, which are those of one model."""
        responses: list[pb.AttendResponse] = []
        digests = self._digests or ModelDigests()
        try:
            for request in call.requests:
                if responses:
                    request.model_version = responses[0].model_version
                responses.append(await self._ask("Attend", request, lambda response: response, timeout))
                digests.check(responses[-1])
        except errors.NotFoundError as error:
            if call.context is None:
                raise
            result: _ResultT = await call.context._recover(call, error, timeout)
            return result
        return call.decode(responses)

    async def _ask(
        self, method: str, request: Any, decode: Callable[[Any], _ResultT], timeout: float | None
    ) -> _ResultT:
        """Makes a call, and decodes its response."""
        limit = seconds(timeout, default=self._timeout)
        with span_of(method, self._targets) as added:
            response = await self._invoke(method, request, limit, wait=self._wait_for_ready, added=added)
        return decode(response)

    async def _invoke(self, method: str, request: Any, limit: float, *, wait: bool, added: Pairs = ()) -> Any:
        options = {"timeout": limit, "metadata": (*self._metadata, *added), "wait_for_ready": wait}
        try:
            async with self._channel() as channel:
                return await self._wait(channel.methods[method](request, **options))
        except FAILURES as error:
            raise await self._refine(error, limit) from None

    async def _is_ready(self, timeout: float | None) -> bool:
        limit = seconds(timeout, default=self._timeout)
        response = await self._invoke("Check", HEALTH_REQUEST, limit, wait=False)
        return bool(response.status == _SERVING)

    async def _wait_until_ready(self, timeout: float | None) -> None:
        limit = seconds(timeout, default=self._timeout)
        end, pause, status = time.monotonic() + limit, _FIRST_PAUSE, "no connection"
        while (remaining := end - time.monotonic()) > 0:
            try:
                if await self._is_ready(remaining):
                    return
                status = "not serving"
            except AttentionClientError as error:
                if error.code not in _PASSING or isinstance(error, errors.ClientClosedError):
                    raise
                if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the end of this wait itself
                    status = f"{error.code.name} {error.message}"
            await self._wait(self._sleep(min(pause, max(0.0, end - time.monotonic()))))
            pause = min(2 * pause, _LONGEST_PAUSE)
        message = f"{self._name} was not ready within {limit:g} s; last status: {status}"
        raise errors.DeadlineExceededError(message, reason="DEADLINE_EXCEEDED")

    async def _refine(self, error: Exception, timeout: float | None) -> AttentionClientError:
        """The error to raise, with what the connection knows and the call's status does not."""
        refined = self._as_client_error(error)
        if isinstance(refined, errors.DeadlineExceededError) and not refined.reason:
            # The timeout passed before the server sent a status, which would state a reason.
            within = "before the timeout" if timeout is None else f"within {timeout:g} s"
            if failure := await self._connection_failure():
                refined = errors.UnavailableError(f"no connection to {self._name} {within}: {failure}")
            else:
                refined.reason = "DEADLINE_EXCEEDED"
                if timeout is not None:
                    refined.message = f"{self._name} did not answer {within}"
        refined.message = "; ".join([refined.message, *self._hints(refined)])
        refined.args = (refined.message,)
        return refined

    def _hints(self, error: AttentionClientError) -> Iterator[str]:
        """What to change if the token, the credentials or a proxy may be why a call failed."""
        has_token = any(key == "authorization" for key, _ in self._metadata)
        is_closed = _CLOSED_AT_ONCE.search(error.message)
        if isinstance(error, errors.UnauthenticatedError) and not has_token:
            yield "pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
        elif self._encrypts and _NOT_TLS in error.message:
            yield "the server does not use TLS: omit credentials (--tls, --ca, --certificate)"
        elif self._encrypts and is_closed:
            yield (
                "if the server asks for client certificates, pass one that it accepts: "
                "credentials=TlsFiles(certificate=FILE, key=FILE) (--certificate and --key)"
            )
        elif is_closed:
            yield "if the server uses TLS, pass credentials=TlsFiles(ca=FILE) (--tls or --ca FILE)"
        is_unreachable = isinstance(error, errors.UnavailableError) and not error.reason
        if is_unreachable and _REFUSED in error.message:
            yield "start a server there, or name another (--server or ATTENTION_SERVER on the command line)"
        if is_unreachable and (variable := proxy_variable(self._targets, self._settings[0])):
            yield f"gRPC connects through the proxy in {variable}; no_proxy may exempt the server's host"

    def _as_client_error(self, error: Exception) -> AttentionClientError:
        """Converts what gRPC raises; a closed channel makes it raise exceptions other than RpcError."""
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        is_client_error = isinstance(error, AttentionClientError)
        if self._closed and (isinstance(error, errors.CallCancelledError) or not is_client_error):
            return errors.ClientClosedError("the client is closed; create another to make further calls")
        if isinstance(error, errors.CallCancelledError) and _ATTEMPT_ENDED in error.message:
            message = "none of the call's attempts was answered within attempt_timeout"
            return errors.DeadlineExceededError(message, reason="DEADLINE_EXCEEDED")
        return error if isinstance(error, AttentionClientError) else AttentionClientError(str(error))

    async def _connection_failure(self) -> str:
        """The reason if the channel is not connected; otherwise empty. A waiting call does not report it."""
        options = {"timeout": _PROBE_SECONDS, "metadata": self._metadata, "wait_for_ready": False}
        try:
            await self._wait(self._channels[-1].methods["Check"](HEALTH_REQUEST, **options))
        except grpc.RpcError as error:
            return error.details() or "" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
        except FAILURES:  # the client was closed meanwhile
            pass
        return ""
