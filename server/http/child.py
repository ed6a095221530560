"""The HTTP process beside a server, which runs `python -m server.http.child DESCRIPTOR`.

Over the pipe it receives its options and the descriptors of its sockets, once. Then a message asks it to
stop; and so does the end of the pipe, so that it does not outlive the server.
"""

import asyncio
import logging
import os
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

from server import logs
from server.errors import TlsError
from server.http.options import HttpOptions
from server.http.serve import Stop, serve
from server.shutdown import StopRequest, handle_signals

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
        # Any message, and the end of the pipe, asks to stop.
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()

        def stop_once() -> None:
            loop.remove_reader(descriptor)
            stop()

        loop.add_reader(descriptor, stop_once)

    serve(options, sockets, begin)
    connection.close()  # the parent need not wait for the end of the interpreter


if __name__ == "__main__":
    sys.exit(main())
