"""Calls of the gRPC server: channels, errors as answers of HTTP, and who may call."""

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import count
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.engine.errors import EngineError, OverloadedError
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.observe.logs import Recorder
from attention_serving.server.security.peers import ACCESS_CHECK, FORWARDED, SEPARATOR

SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"]
Metadata = Sequence[tuple[str, str | bytes]]
READY = grpc.ChannelConnectivity.READY
OPTIONS = (
    # Sizes are limited by this process and by the gRPC server.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each channel is a connection of its own, so that several reach several workers.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment is not between two processes of one service.
    ("grpc.enable_http_proxy", 0),
    # A stopped process of the server is noticed: its calls end, and it gets no more. The server allows a ping
    # every 10 s. gRPC's core waits a minute for the answer to a ping, whatever the timeout of keepalive is.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that starts again is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# gRPC codes, by the status that clients of HTTP know for the same. Source: google/rpc/code.proto.
STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 409,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
RETRIED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
# An approval is cached for this time, for so many callers.
APPROVED_SECONDS = 1.0
MAX_APPROVALS = 1024
# Everything but inference, and loading of models, is answered at once.
TIMEOUT_SECONDS = 10.0
# Metadata that say who calls. Others, such as identifiers of requests and traces, differ from call to call.
CREDENTIALS = ("authorization", FORWARDED)


class Service:
    """What all requests of one process share. Belongs to one event loop.

    Attributes:
        options: What the process does.
        recorder: Records requests.
        budget: Memory of all requests in progress.
        max_requests: Inference requests that may be in progress.
        places: Those that may begin now.
    """

    def __init__(self, options: HttpOptions) -> None:
        """Connects to the gRPC server with the first call. Each call takes the channel with the fewest calls.

        Args:
            options: Where the server is, and how many connections to make.
        """
        settings = self.settings = options.settings
        self.options = options
        host, port = settings.host, settings.http_port or 0
        self.recorder = Recorder(settings.log_requests, host=host, port=port, role="http")
        self.budget = MemoryBudget(settings.memory_for_requests)
        self.places = self.max_requests = settings.max_concurrent_calls * settings.workers
        self._channels = [_private_channel(target) for target in options.private_sockets] or [
            grpc.aio.insecure_channel(options.target, OPTIONS) for _ in range(options.connections)
        ]
        # For each channel, its calls in progress, and its methods by name.
        self._calls = [0] * len(self._channels)
        self._methods: list[dict[str, Any]] = [{} for _ in self._channels]
        self._turn = count()
        # Until when an approval holds, in the order of the approvals.
        self._approved: dict[bytes, float] = {}

    async def call(
        self, method: str, message: bytes, metadata: Metadata, timeout: float | None, client: Any = None
    ) -> bytes:
        """Calls a method with a serialized message, and returns the serialized reply.

        Args:
            method: Full name of the method, such as /inference.GRPCInferenceService/ServerLive.
            message: The message.
            metadata: Metadata of the call.
            timeout: Seconds until the deadline; None sets none.
            client: The connection of the client. If it is lost, the call is cancelled.

        Raises:
            HTTPException: The call ended with a status other than OK.
            ClientDisconnect: The client left.
        """
        if client is not None and client.is_lost:
            raise ClientDisconnect
        index = self._next()
        known = self._methods[index]
        if method not in known:
            known[method] = self._channels[index].unary_unary(method)
        call = known[method](message, metadata=metadata, timeout=timeout)
        self._calls[index] += 1
        if client is not None:
            client.on_lost = call.cancel
        try:
            reply: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise refusal(error) from error
        except asyncio.CancelledError:
            if client is not None and client.is_lost:
                raise ClientDisconnect from None
            raise
        finally:
            self._calls[index] -= 1
            if client is not None:
                client.on_lost = None
        return reply

    async def authorize(self, method: str, model: str, metadata: Metadata) -> None:
        """Asks whether a caller may call a method, unless the same was approved within the last second.

        This process knows no tokens: the gRPC server decides, as it would for the call itself.

        Args:
            method: Full name of the method.
            model: Name of the model; empty if there is none.
            metadata: What the call would be made with.

        Raises:
            HTTPException: It may not.
        """
        credentials = [pair for pair in metadata if pair[0] in CREDENTIALS]
        # Credentials are not kept, only their hash.
        key = hashlib.sha256(repr((credentials, method, model)).encode()).digest()
        now = time.monotonic()
        if self._approved.get(key, 0.0) > now:
            return
        await self.call(ACCESS_CHECK, access_question(method, model), metadata, TIMEOUT_SECONDS)
        self._approved.pop(key, None)
        if len(self._approved) >= MAX_APPROVALS:
            del self._approved[next(iter(self._approved))]
        self._approved[key] = now + APPROVED_SECONDS

    async def close(self) -> None:
        """Closes the connections. Open calls are cancelled."""
        for channel in self._channels:
            await channel.close()
        await asyncio.to_thread(self.recorder.close)

    def _next(self) -> int:
        """The channel with the fewest calls; of equal ones, each in turn.

        One that is not connected is left out while another is: its process may be starting again.
        """
        first, number = next(self._turn), len(self._channels)
        if number == 1:
            return 0
        ready = [channel.get_state(try_to_connect=True) is READY for channel in self._channels]
        turns = [(first + step) % number for step in range(number)]
        return min([turn for turn in turns if ready[turn]] or turns, key=self._calls.__getitem__)


def _private_channel(target: str) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(
        target, grpc.local_channel_credentials(grpc.LocalConnectionType.UDS), OPTIONS
    )


def refusal(error: grpc.aio.AioRpcError | EngineError) -> HTTPException:
    """The answer to a request whose call failed, or that this process refuses itself."""
    if isinstance(error, OverloadedError):
        return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, error.message, error.retry_after)
    if isinstance(error, EngineError):
        return _refusal(STATUSES.get(error.code.name, 500), error.message, 1)
    status = STATUSES.get(error.code().name, 500)
    return _refusal(status, error.details() or error.code().name, _retry_seconds(error))


def _refusal(status: int, message: str, retry_seconds: float) -> HTTPException:
    headers = {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if status in RETRIED:
        headers["retry-after"] = str(max(1, math.ceil(retry_seconds)))
    return HTTPException(status, message, headers)


def _retry_seconds(error: grpc.aio.AioRpcError) -> float:
    """The seconds of google.rpc.RetryInfo; 0 without it."""
    retry = error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (ValueError, DecodeError):  # the details contradict the status
        return 0
    for detail in status.details if status else ():
        detail.Unpack(retry)
    return float(retry.retry_delay.ToMicroseconds() / 1e6)


def access_question(method: str, model: str) -> bytes:
    """The message that asks whether a method may be called, for a model if the name is not empty."""
    data: bytes = StringValue(value=f"{method}{SEPARATOR}{model}").SerializeToString()
    return data
