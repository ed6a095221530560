"""The gRPC server behind the HTTP process: connections to it, and the memory and places of all requests."""

from collections import Counter
from collections.abc import Sequence

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from attention_serving.server.engine.budget import MemoryBudget
from attention_serving.server.security.peers import SEPARATOR
from attention_serving.server.settings import Settings

READY = grpc.ChannelConnectivity.READY
OPTIONS = (
    # Sizes are limited by this process and by the gRPC server.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A stopped process of the server is noticed: its calls end, and it gets no more. The server allows a ping
    # every 10 s. gRPC's core waits a minute for the answer to a ping, whatever the timeout of keepalive is.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that starts again is found within a second. One attempt may take longer on a busy machine.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Backend:
    """What all requests of one process share. Belongs to one event loop.

    Attributes:
        settings: Settings of the server.
        budget: Memory of all requests in progress.
        max_requests: Inference requests that may be in progress.
        places: Those that may begin now.
        refusals: What this process itself refused since it last reported them, by reason.
        calls: Calls in progress on each connection to the gRPC server; the least recently used one is first.
        is_draining: Whether connections are closed after their requests.
    """

    def __init__(self, settings: Settings, targets: Sequence[str]) -> None:
        """Connects to the gRPC server with the first call.

        Args:
            settings: Settings of the server.
            targets: The private socket of each of its processes, as unix:PATH.
        """
        self.settings = settings
        self.budget = MemoryBudget(settings.memory_for_requests)
        self.places = self.max_requests = settings.max_concurrent_calls * settings.workers
        self.refusals: Counter[str] = Counter()
        local = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
        self.calls = {grpc.aio.secure_channel(target, local, OPTIONS): 0 for target in targets}
        self.is_draining = False

    def channel(self) -> grpc.aio.Channel:
        """The connection with the fewest calls; of equal ones, each in turn.

        One that is not connected is left out while another is: its process may be starting again.
        """
        ready = [channel for channel in self.calls if channel.get_state(try_to_connect=True) is READY]
        channel = min(ready or self.calls, key=self.calls.__getitem__)
        self.calls[channel] = self.calls.pop(channel)  # it is the last one now
        return channel

    async def close(self) -> None:
        """Closes the connections. Open calls are cancelled."""
        for channel in self.calls:
            await channel.close()


def access_question(method: str, model: str) -> bytes:
    """The message that asks whether a method may be called, for a model if the name is not empty."""
    return bytes(StringValue(value=f"{method}{SEPARATOR}{model}").SerializeToString())
