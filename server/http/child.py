"""The HTTP process: as its parent sees it, which is a server or the supervisor of several, and its program.

The program, `python -m server.http.child DESCRIPTOR`, receives its options and the descriptors of its
sockets. Then its event loop answers pings, until a message asks it to stop. The end of the pipe does so too:
it does not outlive the server.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attention_serving.server.addresses import listen
from attention_serving.server.http.options import HttpOptions, options_of
from attention_serving.server.observe import logs
from attention_serving.server.settings import Settings
from attention_serving.server.supervision import Child, run_child

# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0
# How long the process may take to send its answers once the gRPC server has stopped.
EXIT_SECONDS = 2.0


class HttpProcess(Child):
    """The process and its port, which stays bound while a process is replaced.

    Attributes:
        port: The port, chosen by the system for port 0.
    """

    def __init__(self, options: HttpOptions) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            options: What the process does. Its settings say where it listens, and how long it may leave pings
                unanswered.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        settings = options.settings
        self._sockets = listen(settings.host, settings.http_port or 0)
        self.port: int = self._sockets[0].getsockname()[1]
        descriptors = [each.fileno() for each in self._sockets]
        super().__init__(
            "http process",
            "attention_serving.server.http.child",
            (options, descriptors),
            settings.worker_timeout_seconds,
            descriptors=descriptors,
        )

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
    return None if settings.http_port is None else HttpProcess(options_of(settings, port, private_sockets))


def _serve(connection: Any, assignment: tuple[HttpOptions, list[int]]) -> None:
    # The parent needs neither uvicorn nor gRPC.
    from attention_serving.server.http.server import serve  # noqa: PLC0415

    options, descriptors = assignment
    logs.configure(options.settings.log_level, options.settings.log_format, process="http")
    serve(options, [socket.socket(fileno=each) for each in descriptors], connection)


if __name__ == "__main__":
    run_child(_serve)
