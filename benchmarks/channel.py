"""A gRPC channel for one thread, on grpcio's own core: the only file of the generator that knows cygrpc.

The public interface of grpcio gives each call a condition variable, a future and callbacks on a second
thread. Measured on two busy cores against one echo server, 32 calls in flight: this
channel 8,100 requests/s at 6 x 64 floats and 6,200-8,500 at 6 x 768; the public interface 4,500 and
5,400-6,800; its asyncio variant 6,300 and 5,900; Triton's C++ load generator 8,200 at 6 x 64.
"""

import time
from collections.abc import Iterable
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Each measurement has a connection of its own.
    ("grpc.use_local_subchannel_pool", 1),
)
DEADLINE_SECONDS = 120.0
NO_FLAGS = 0
MESSAGE, STATUS = 4, 5  # places in the operations of a unary call


class CallFailedError(Exception):
    """A call ended without an answer; the message holds its status."""


class Channel:
    """A connection whose calls all report to `next_event`."""

    def __init__(self, target: str) -> None:
        self._channel = cygrpc.Channel(target.encode(), OPTIONS, None)

    def call(self, method: bytes, request: bytes, tag: object) -> None:
        """Starts a unary call; its end is an event with that tag."""
        operations = (
            cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
            cygrpc.SendMessageOperation(request, NO_FLAGS),
            cygrpc.SendCloseFromClientOperation(NO_FLAGS),
            cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),
            cygrpc.ReceiveMessageOperation(NO_FLAGS),
            cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
        )
        self._open(method, ((operations, tag),))

    def open_stream(self, method: bytes, opened: object, ended: object) -> "Stream":
        """Starts a bidirectional call; the tags are those of its first metadata and of its status."""
        first = (
            cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
            cygrpc.ReceiveStatusOnClientOperation(NO_FLAGS),
        )
        second = (cygrpc.ReceiveInitialMetadataOperation(NO_FLAGS),)
        return Stream(self._open(method, ((first, ended), (second, opened))))

    def _open(self, method: bytes, batches: tuple[tuple[Iterable[Any], object], ...]) -> Any:
        flags = cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS
        deadline = time.time() + DEADLINE_SECONDS
        return self._channel.integrated_call(flags, method, None, deadline, None, None, batches, None)

    def next_event(self) -> Any:
        """Waits for the next event: its `tag`, and the results in its `batch_operations`."""
        while True:
            event = self._channel.next_call_event()
            if event.completion_type != cygrpc.CompletionType.queue_timeout:
                return event

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close(cygrpc.StatusCode.cancelled, "done")


class Stream:
    """One bidirectional call: one message out and one in may be on their way at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def send(self, message: bytes, tag: object) -> None:
        """Starts to send a message."""
        self._call.operate((cygrpc.SendMessageOperation(message, NO_FLAGS),), tag)

    def receive(self, tag: object) -> None:
        """Starts to receive a message."""
        self._call.operate((cygrpc.ReceiveMessageOperation(NO_FLAGS),), tag)

    def close(self, tag: object) -> None:
        """Says that no message follows."""
        self._call.operate((cygrpc.SendCloseFromClientOperation(NO_FLAGS),), tag)


def answer(event: Any) -> bytes:
    """The answer of a unary call that ended.

    Raises:
        CallFailedError: It ended with another status than OK.
    """
    operations = event.batch_operations
    if operations[STATUS].code() != cygrpc.StatusCode.ok:
        raise CallFailedError(status(operations[STATUS]))
    message: bytes = operations[MESSAGE].message()
    return message


def succeeded(event: Any) -> bool:
    """Whether a unary call that ended has an answer."""
    return bool(event.batch_operations[STATUS].code() == cygrpc.StatusCode.ok)


def status(operation: Any) -> str:
    """Code and details of a status that was received."""
    return f"status {operation.code()}: {operation.details()}"
