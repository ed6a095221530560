"""The HTTP process: as its parent sees it, which is a server or the supervisor of several, and its program.

The program, `python -m server.http.child DESCRIPTOR`, receives its options and the descriptors of its
sockets. Then its event loop answers pings, until a message asks it to stop. The end of the pipe does so too:
it does not outlive the server.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attention_serving.server.addresses import listen
from attention_serving.server.http.options import HttpOptions, options_of
from attention_serving.server.observe import logs
from attention_serving.server.settings import Settings
from attention_serving.server.shutdown import StopRequest, handle_signals
from attention_serving.server.supervision import PING, Child, Heartbeat, State, run_child

log = logging.getLogger(__name__)

# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0
# How long the process may take to send its answers once the gRPC server has stopped.
EXIT_SECONDS = 2.0


class HttpProcess(Child):
    """The process and its port, which stays bound while a process is replaced.

    Attributes:
        port: The port, chosen by the system for port 0.
    """

    def __init__(self, options: HttpOptions, host: str, port: int, *, timeout_seconds: float = 0.0) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            options: What the process does.
            host: Address or host name.
            port: 0 selects a free port.
            timeout_seconds: How long the process may leave pings unanswered before it is killed and replaced.
                0 sets no limit.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        self._sockets = listen(host, port)
        self.port: int = self._sockets[0].getsockname()[1]
        descriptors = [each.fileno() for each in self._sockets]
        module = "attention_serving.server.http.child"
        assignment = (options, descriptors)
        super().__init__("http process", module, assignment, timeout_seconds, descriptors=descriptors)

    def drain(self) -> None:
        """Stops listening. The process answers what is in progress, and ends.

        Returns when it has answered, or when its requests have had the time to reach the gRPC server.
        """
        super().drain()
        for each in self._sockets:
            each.close()
        self.join(ARRIVING_SECONDS)

    def close(self, seconds: float = EXIT_SECONDS) -> None:
        """Drains, and kills the process if it has not ended after a time."""
        super().close(seconds)


def http_process(settings: Settings, port: int, private_sockets: Sequence[Path]) -> HttpProcess | None:
    """The HTTP process beside a server, not started yet; None if there is to be none.

    Args:
        settings: Settings of the server.
        port: The port on which it listens for gRPC.
        private_sockets: The socket of each of its processes, if `needs_private_sockets`.

    Raises:
        BindError: The address is in use, or does not belong to this machine.
    """
    if settings.http_port is None:
        return None
    options = options_of(settings, port, private_sockets)
    timeout_seconds = settings.worker_timeout_seconds
    return HttpProcess(options, settings.host, settings.http_port, timeout_seconds=timeout_seconds)


def _serve(connection: Any, assignment: tuple[HttpOptions, list[int]]) -> None:
    # The parent needs neither uvicorn nor gRPC.
    from attention_serving.server.http.server import Stop, serve  # noqa: PLC0415

    options, descriptors = assignment
    logs.configure(options.log_level, options.log_format, process="http")

    def begin(stop: Stop) -> None:
        def stop_at_signal(request: StopRequest) -> None:
            log.info("draining", extra=request.fields)
            stop()

        handle_signals(stop_at_signal)
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()

        def receive() -> None:
            with suppress(EOFError, OSError):  # the end of the pipe asks to stop too
                if connection.recv() == PING:
                    connection.send(Heartbeat())
                    return
            loop.remove_reader(descriptor)
            stop()

        loop.add_reader(descriptor, receive)
        with suppress(OSError):  # the parent has ended
            connection.send(State.SERVING)

    serve(options, [socket.socket(fileno=each) for each in descriptors], begin)


if __name__ == "__main__":
    run_child(_serve)
