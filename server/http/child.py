"""The HTTP process beside a server, which runs `python -m server.http.child DESCRIPTOR`.

Over the pipe it receives its options and the descriptors of its sockets, once. Then its event loop answers
pings, until a message asks it to stop. The end of the pipe does so too: it does not outlive the server.
"""

import asyncio
import logging
import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from attention_serving.server import logs
from attention_serving.server.child_process import Heartbeat, Ping, State
from attention_serving.server.errors import TlsError
from attention_serving.server.http.options import HttpOptions
from attention_serving.server.http.server import Stop, serve
from attention_serving.server.shutdown import StopRequest, handle_signals

log = logging.getLogger(__name__)


def main() -> int:
    """Serves as the parent orders; returns the exit status."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword
    try:
        options, descriptors = connection.recv()
    except EOFError:
        return 0
    try:
        _serve(connection, options, [socket.socket(fileno=descriptor) for descriptor in descriptors])
    except TlsError as error:
        log.error("cannot serve", extra={"reason": str(error)})
        return 1
    return 0


def _serve(connection: Any, options: HttpOptions, sockets: list[socket.socket]) -> None:
    logs.configure(options.log_level, options.log_format, process="http")

    def begin(stop: Stop) -> None:
        def stop_at_signal(request: StopRequest) -> None:
            log.info("draining", extra=request.fields)
            stop()

        handle_signals(stop_at_signal)
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()

        def receive() -> None:
            with suppress(EOFError, OSError):  # the end of the pipe asks to stop too
                if isinstance(connection.recv(), Ping):
                    connection.send(Heartbeat())
                    return
            loop.remove_reader(descriptor)
            stop()

        loop.add_reader(descriptor, receive)
        with suppress(OSError):  # the parent has ended
            connection.send(State.SERVING)

    serve(options, sockets, begin)
    connection.close()  # the parent need not wait for the end of the interpreter


if __name__ == "__main__":
    sys.exit(main())
