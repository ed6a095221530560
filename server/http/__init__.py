"""The Open Inference Protocol over HTTP: a process that translates requests to calls of the gRPC server.

Requests become messages of protos/inference/open_inference.proto, and replies become JSON and binary tensors.
Models, limits, rights and metrics are those of the gRPC server.

server.py      listens, answers requests by the table, drains; the program of the process
connection.py  HTTP/1.1: connections, and requests with their bodies, calls and replies
service.py     what requests share: the gRPC server, memory, places
routes.py      the table of all routes, and its description
infer.py       bodies of inference and of contexts as messages, and replies as bodies
text_models.py endpoints of OpenAI, Cohere and TEI
schemas.py     pydantic models of JSON bodies, and JSON of messages

Here is the process as its parent sees it, a server or the supervisor of several. It receives its settings,
where it reaches the gRPC server, and the descriptors of its sockets, reports that it serves, and drains when
it is asked to, or when its parent has ended: it does not outlive the server.

It reaches the gRPC server through a Unix domain socket which only this user can connect to, one for each
worker: such calls need no certificate, and the server believes what they say about the client.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attention_serving.server.process.addresses import listen
from attention_serving.server.process.settings import Settings
from attention_serving.server.process.supervision import Child

# How long requests whose bodies are on their way may still reach the gRPC server before that drains too.
ARRIVING_SECONDS = 1.0


class HttpProcess(Child):
    """The process and its port, which stays bound while a process is replaced. Neither exists if HTTP is off.

    Attributes:
        ports: The port as a field of the log; empty if HTTP is off.
    """

    def __init__(
        self, settings: Settings, private_sockets: Sequence[Path], refusals: Callable[[str], Any]
    ) -> None:
        """Listens. Connections wait in the operating system's queue until `start`, and between processes.

        Args:
            settings: Settings of the server.
            private_sockets: The socket of the gRPC server, or of each worker.
            refusals: The counter of what the process refuses by itself, by reason.

        Raises:
            ServerError: The address is in use, or does not belong to this machine.
        """
        self._sockets = [] if settings.http_port is None else listen(settings.host, settings.http_port)
        self.ports: dict[str, object] = {}
        if self._sockets:
            self.ports["http_port"] = self._sockets[0].getsockname()[1]
        descriptors = [listener.fileno() for listener in self._sockets]
        super().__init__(
            "http process",
            "attention_serving.server.http.server",
            (settings, [f"unix:{path}" for path in private_sockets], descriptors),
            settings.worker_timeout_seconds,
            descriptors=descriptors,
            refusals=refusals,
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
        for listener in self._sockets:
            listener.close()
        self.ended.wait(ARRIVING_SECONDS)
