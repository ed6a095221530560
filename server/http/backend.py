"""The channels to the gRPC server, and calls that end when their clients leave."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import grpc
from starlette.types import Receive

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from attention_serving.server.http import errors
from attention_serving.server.http.errors import ClientDisconnectedError
from attention_serving.server.http.options import HttpOptions

T = TypeVar("T")
SERVICE = DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
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


class Backend:
    """The gRPC server as this process calls it. Belongs to one event loop."""

    def __init__(self, options: HttpOptions) -> None:
        """Connects with the first call.

        Args:
            options: Where the server is, and how many connections to make. Each call takes the one with the
                fewest calls.
        """
        self._channels = [_private_channel(target) for target in options.private_sockets] or [
            grpc.aio.insecure_channel(options.target, OPTIONS) for _ in range(options.connections)
        ]
        self._calls = [0] * len(self._channels)
        self._turn = count()

    async def call(self, method: str, request: bytes, metadata: Metadata, timeout: float | None) -> bytes:
        """Calls a method with a serialized message, and returns the serialized reply.

        Args:
            method: Name of the method in the service.
            request: The message.
            metadata: Metadata of the call.
            timeout: Seconds until the deadline; None sets none.

        Raises:
            BackendError: The call ended with a status other than OK.
        """
        return await self.call_path(f"/{SERVICE}/{method}", request, metadata, timeout)

    async def call_path(self, path: str, request: bytes, metadata: Metadata, timeout: float | None) -> bytes:
        """As `call`, for a method of any service.

        Args:
            path: Full name of the method.
            request: The message.
            metadata: Metadata of the call.
            timeout: Seconds until the deadline; None sets none.

        Raises:
            BackendError: The call ended with a status other than OK.
        """
        index = self._next()
        call: Any = self._channels[index].unary_unary(path)
        self._calls[index] += 1
        try:
            reply: bytes = await call(request, metadata=metadata, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise errors.of_call(error) from error
        finally:
            self._calls[index] -= 1
        return reply

    async def close(self) -> None:
        """Closes the connections. Open calls are cancelled."""
        for channel in self._channels:
            await channel.close()

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


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Waits for work on behalf of a client whose body has been read; cancels it if the client leaves.

    Raises:
        ClientDisconnectedError: The client left.
    """
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
