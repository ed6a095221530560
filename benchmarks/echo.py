"""The transport ceiling: a gRPC server on one thread that answers each request with its own bytes.

It neither parses nor copies what it is sent, so nothing above the transport is in its figures.
`python -m benchmarks.echo` writes its port and serves until it is ended.
"""

import sys
from collections.abc import Callable
from typing import Any

from grpc._cython import cygrpc

from benchmarks.wire import ECHO_HALF

NO_FLAGS = 0
NEW_CALL = "new call"
CALLS_AHEAD = 8
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


def serve(host: str, announce: Callable[[int], None]) -> None:
    """Answers calls of any method on a port of the system's choice."""
    server = cygrpc.Server(OPTIONS, False)  # noqa: FBT003 - xDS, by position only
    queue = cygrpc.CompletionQueue()
    server.register_completion_queue(queue)
    port = server.add_http2_port(f"{host}:0".encode())
    server.start()
    for _ in range(CALLS_AHEAD):
        server.request_call(queue, queue, NEW_CALL)
    announce(port)
    while True:
        event = queue.poll(None)
        if event.completion_type == cygrpc.CompletionType.queue_timeout:
            continue
        if event.tag == NEW_CALL:
            server.request_call(queue, queue, NEW_CALL)
            _accept(event)
        else:
            event.tag(event)


def _accept(event: Any) -> None:
    """Asks for the call's message; what comes is sent back."""
    call, half = event.call, event.call_details.method == ECHO_HALF

    def received(event: Any) -> None:
        message = event.batch_operations[0].message()
        if message is None:  # the caller left
            return
        operations = (
            cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
            cygrpc.SendMessageOperation(message[: len(message) // 2] if half else message, NO_FLAGS),
            cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", NO_FLAGS),
        )
        call.start_server_batch(operations, _ignore)

    call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS),), _ignore)
    call.start_server_batch((cygrpc.ReceiveMessageOperation(NO_FLAGS),), received)


def _ignore(_event: Any) -> None:
    """Nothing follows."""


def _announce(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve("127.0.0.1", _announce)
