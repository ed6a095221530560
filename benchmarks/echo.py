"""The transport ceiling: a server on gRPC's core that returns each request's own bytes without parsing them.

One thread handles all events of one completion queue. This file uses `grpc._cython`, the private core of
grpcio, on purpose: grpcio's public servers cost more than the service's own transport, so they are not a
ceiling for it. `python -m benchmarks.echo` prints its port, and serves on loopback until it is stopped.
"""

from functools import partial
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not in the stubs

OPTIONS = ((b"grpc.max_receive_message_length", -1), (b"grpc.max_send_message_length", -1))
# Calls that the core may accept before the previous ones are handled.
ACCEPT_AHEAD = 32
NO_FLAGS = 0
WITHOUT_XDS = False


class EchoServer:
    """Serves every method: returns the request. The system chooses its port."""

    def __init__(self) -> None:
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(OPTIONS, WITHOUT_XDS)
        self._server.register_completion_queue(self._queue)
        self._port = self._server.add_http2_port(b"127.0.0.1:0")

    def serve(self) -> None:
        """Handles events until the process is stopped."""
        self._server.start()
        print(self._port, flush=True)  # noqa: T201
        for _ in range(ACCEPT_AHEAD):
            self._accept_next()
        while True:
            event = self._queue.poll()
            event.tag(event)
            del event  # holds the call, which must be released before the next poll

    def _accept_next(self) -> None:
        self._server.request_call(self._queue, self._queue, self._accepted)

    def _accepted(self, event: Any) -> None:
        self._accept_next()
        operation = cygrpc.ReceiveMessageOperation(NO_FLAGS)
        event.call.start_server_batch((operation,), partial(_reply, event.call, operation))


def _reply(call: Any, operation: Any, _event: Any) -> None:
    message = operation.message()
    if message is None:  # the caller cancelled
        return
    operations = (
        cygrpc.SendInitialMetadataOperation(None, NO_FLAGS),
        cygrpc.SendMessageOperation(message, NO_FLAGS),
        cygrpc.SendStatusFromServerOperation((), cygrpc.StatusCode.ok, b"", NO_FLAGS),
        cygrpc.ReceiveCloseOnServerOperation(NO_FLAGS),
    )
    call.start_server_batch(operations, lambda _event: None)  # nothing remains to be done


if __name__ == "__main__":
    EchoServer().serve()
