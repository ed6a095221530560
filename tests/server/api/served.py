"""Calls of a real server, as their callers make and see them."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from attention_client.errors import from_rpc_error
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.server.transport.call import Metadata
from tests.server.api.messages import attend_request
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import entry, write_tokens

ATTEND = "/attention.v1.AttentionService/Attend"
STREAM = "/attention.v1.AttentionService/AttendStream"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# The identities of `secured`.
ENTRIES = (
    entry("all", "all-token", "infer:*", "read", "admin"),
    entry("caller", "caller-token", "infer:tiny-*"),
    entry("other", "other-token", "infer:unknown-*"),
    entry("reader", "reader-token", "read:tiny-s*"),
    entry("old", "old-token", "infer:*", expires="2020-01-01T00:00:00Z"),
    entry("limited", "limited-token", "infer:*", max_calls=1),
)
ALIASES = "org/self=tiny-self,unknown-alias=tiny-self,org/later=tiny-later"


class Secured(NamedTuple):
    """A server that knows the identities, and its file of them."""

    served: Served
    file: Path

    def revoke(self, name: str) -> None:
        """Removes an identity from the file."""
        write_tokens(self.file, *(identity for identity in ENTRIES if identity["name"] != name))


def bearer(token: str | None) -> Metadata:
    return () if token is None else (("authorization", f"Bearer {token}"),)


def attend(channel: grpc.Channel, *lengths: int, caller: str | None = None) -> Any:
    """Starts a call, with sequences of some lengths or one of 2 rows.

    Args:
        channel: Connected to the server.
        lengths: Rows of each sequence.
        caller: The token of who calls.
    """
    message, metadata = attend_request([*lengths] or [2]), bearer(caller)
    return AttentionServiceStub(channel).Attend.future(message, metadata=metadata, timeout=PATIENCE_SECONDS)


def answer(call: Any) -> list[int]:
    """The lengths in the reply to a call."""
    return list(call.result(PATIENCE_SECONDS).context_vectors.lengths)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and reason of a call that has failed or will fail."""
    return call.code(), from_rpc_error(call).reason


def watch(channel: grpc.Channel, service: str = "") -> Any:
    """Watches the health of a service."""
    message = health_pb2.HealthCheckRequest(service=service)
    return health_pb2_grpc.HealthStub(channel).Watch(message, timeout=PATIENCE_SECONDS)


def health(channel: grpc.Channel, service: str = "") -> Any:
    """The health of a service, or the code of the refusal."""
    message = health_pb2.HealthCheckRequest(service=service)
    call = health_pb2_grpc.HealthStub(channel).Check.future(message, timeout=PATIENCE_SECONDS)
    return call.result().status if call.code() is grpc.StatusCode.OK else call.code()


class OpenStream:
    """A stream whose requests the test sends one by one."""

    def __init__(self, channel: grpc.Channel, caller: str | None = None) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub, requests = AttentionServiceStub(channel), iter(self._requests.get, None)
        self.replies: Any = stub.AttendStream(requests, metadata=bearer(caller), timeout=PATIENCE_SECONDS)

    def send(self, name: str = "", *lengths: int, model: str = "") -> None:
        request = attend_request([*lengths] or [2])
        request.model_name = model or request.model_name
        self._requests.put(pb.AttendStreamRequest(id=name, request=request))

    def ask(self, name: str = "", model: str = "") -> pb.AttendStreamResponse:
        self.send(name, model=model)
        reply: pb.AttendStreamResponse = next(self.replies)
        return reply

    def end(self) -> None:
        self._requests.put(None)


class Opened:
    """Calls on a connection of their own that send their headers, and nothing else until they are closed."""

    def __init__(self, served: Served, count: int, method: str = ATTEND, metadata: Metadata = ()) -> None:
        self._closed = threading.Event()
        self._channel = served.connect()
        grpc.channel_ready_future(self._channel).result(PATIENCE_SECONDS)
        opened: Any = self._channel.stream_unary(method)
        self.calls = [
            opened.future(self._messages(), metadata=metadata, timeout=PATIENCE_SECONDS) for _ in range(count)
        ]

    def _messages(self) -> Iterator[bytes]:
        self._closed.wait(PATIENCE_SECONDS)
        return
        yield b""

    def codes(self) -> set[grpc.StatusCode]:
        return {call.code() for call in self.calls}

    def close(self) -> None:
        self._closed.set()
        self._channel.close()


class Stopping:
    """Stops a server on another thread."""

    def __init__(self, served: Served, grace: float = PATIENCE_SECONDS) -> None:
        self._thread = threading.Thread(target=served.server.stop, args=[grace])
        self._thread.start()

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def wait(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Waits for the end, which comes in time."""
        self._thread.join(seconds)
        assert not self._thread.is_alive()
