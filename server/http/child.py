"""The HTTP process, as its parent sees it: a server, or the supervisor of several.

The process runs `server.http.server`. It receives its options and the descriptors of its sockets, reports
that it serves, and drains when it is asked to, or when its parent has ended: it does not outlive the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_serving.server.addresses import address_of, listen
from attention_serving.server.settings import Settings
from attention_serving.server.supervision import Child

LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses to replace
# Connections to each worker. The system distributes them at random, so that a few more find all workers.
CONNECTIONS_PER_WORKER, MAX_CONNECTIONS = 4, 1024
# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """What the HTTP process does.

    Attributes:
        settings: Settings of the server.
        targets: The gRPC server, as HOST:PORT or unix:PATH, once for each connection. One is enough for one
            process; workers share many, or each has a target of its own.
        is_private: Whether the targets are Unix domain sockets which only this user can connect to. What is
            said about the clients is believed on these only.
    """

    settings: Settings
    targets: tuple[str, ...]
    is_private: bool = False


def needs_private_sockets(settings: Settings) -> bool:
    """Whether the HTTP process reaches the gRPC server through sockets of its own.

    With TLS, it would otherwise need a certificate that the authorities of the clients have signed. With TLS
    or identities, the server could not tell its calls, which name the client that they are for, from others.
    """
    return settings.http_port is not None and (settings.tls_files is not None or settings.has_identities)


def options_of(settings: Settings, port: int, private_sockets: Sequence[Path] = ()) -> HttpOptions:
    """The options of the HTTP process beside a server with the given settings.

    Args:
        settings: Settings of the server.
        port: The port on which it listens for gRPC.
        private_sockets: The socket of each of its processes, if `needs_private_sockets`.
    """
    if private_sockets:
        targets = tuple(f"unix:{path}" for path in private_sockets)
    elif settings.unix_socket is not None:
        targets = (f"unix:{settings.unix_socket.absolute()}",)
    else:
        host = settings.host.strip("[]")
        connections = CONNECTIONS_PER_WORKER * settings.workers if settings.workers > 1 else 1
        targets = (address_of(LOOPBACK.get(host, host), port),) * min(connections, MAX_CONNECTIONS)
    return HttpOptions(settings=settings, targets=targets, is_private=bool(private_sockets))


class HttpProcess(Child):
    """The process and its port, which stays bound while a process is replaced. Neither exists if HTTP is off.

    Attributes:
        ports: The port as a field of the log; empty if HTTP is off.
    """

    def __init__(self, settings: Settings, port: int, private_sockets: Sequence[Path]) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            settings: Settings of the server.
            port: The port on which it listens for gRPC.
            private_sockets: The socket of each of its processes, if `needs_private_sockets`.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        self._sockets = [] if settings.http_port is None else listen(settings.host, settings.http_port)
        self.ports: dict[str, object] = {}
        if self._sockets:
            self.ports["http_port"] = self._sockets[0].getsockname()[1]
        descriptors = [each.fileno() for each in self._sockets]
        super().__init__(
            "http process",
            "attention_serving.server.http.server",
            (options_of(settings, port, private_sockets), descriptors),
            settings.worker_timeout_seconds,
            descriptors=descriptors,
        )

    def start(self) -> None:
        """Starts a process, and a further one whenever it ends or is silent, until `drain`."""
        if self._sockets:
            super().start()

    def drain(self) -> None:
        """Stops listening. The process answers what is in progress, and ends.

        Returns when it has answered, or when its requests have had the time to reach the gRPC server.
        """
        super().drain()
        for each in self._sockets:
            each.close()
        self.ended.wait(ARRIVING_SECONDS)
