"""The transport ceiling: the service's own transport, answering each request with its own bytes.

It neither parses nor copies what it is sent, so nothing above the transport is in its figures.
`python -m benchmarks.echo` writes its port and serves until it is ended.
"""

import sys
import threading

from benchmarks.wire import ECHO_HALF
from server.rpc.transport.completion_queue import CompletionQueueTransport
from server.rpc.transport.seam import Call

ANY_SIZE = -1
OPTIONS = {"grpc.max_receive_message_length": ANY_SIZE, "grpc.max_send_message_length": ANY_SIZE}
HALF = ECHO_HALF.decode()


def echo(call: Call) -> None:
    """Asks for the call's message; what comes is sent back."""

    def received(message: bytes | None) -> None:
        if message is not None:  # else the caller left
            call.reply(message[: len(message) // 2] if call.method == HALF else message)

    call.receive(received)


def main() -> None:
    """Serves on loopback, on a port of the system's choice."""
    server = CompletionQueueTransport(OPTIONS)
    port = server.listen("127.0.0.1:0")
    server.start(accept=echo, run_inline=lambda: False)
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
