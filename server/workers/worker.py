"""One of several server processes; the supervisor runs `python -m server.workers.worker DESCRIPTOR`."""

import logging
import os
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from attention_serving.server import application, logs, providers
from attention_serving.server.child_process import Failure, Heartbeat, Ping, State
from attention_serving.server.errors import ServerError
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.metrics import Metrics
from attention_serving.server.shutdown import Inbox, StopRequest, end, handle_signals
from attention_serving.server.workers import folder
from attention_serving.server.workers import metrics as multiprocess_metrics
from attention_serving.server.workers.assignment import Assignment

log = logging.getLogger(__name__)


class WorkerLifecycle:
    """Life of a server that listens when the supervisor orders it to, and stops when the pipe closes.

    The supervisor closes the pipe to drain the worker. The pipe also closes if the supervisor dies, so that
    no worker outlives it. A thread of its own answers the supervisor's pings.
    """

    def __init__(
        self,
        connection: Any,
        inbox: Inbox,
        folder: Path,
        private_socket: Path | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more
                than the class.
            inbox: Messages to the main thread.
            folder: The service's temporary folder.
            private_socket: Where it listens for the HTTP process alone, if that needs it.
        """
        self._connection = connection
        self._inbox = inbox
        self._folder = folder
        self._private_socket = private_socket
        self._port = 0
        self._is_serving = False
        # The main thread and the one that answers pings both send.
        self._sending = threading.Lock()

    def before_loading(self, server: RpcServer, metrics: Metrics) -> None:
        """Starts to receive: the supervisor holds the port, and serves the metrics."""
        arguments = (server, metrics)
        threading.Thread(target=self._receive, args=arguments, name="supervisor", daemon=True).start()

    def before_serving(self, server: RpcServer, inbox: Inbox) -> bool:
        """Reports that the models are ready, waits for the order to listen, and binds the port.

        The port is not bound earlier: the system would distribute connections to it at once.

        Raises:
            BindError: The address cannot be listened on.
        """
        self._send(State.READY)
        message = inbox.get()
        if isinstance(message, StopRequest):
            log.info("draining", extra=message.fields)
            return False
        self._port = server.bind(self._private_socket)
        return True

    def serving(self, *, ready: int, failed: int) -> None:
        """Notifies the supervisor."""
        log.info("listening", extra={"port": self._port, "models": ready, "failed": failed})
        self._is_serving = True
        self._send(State.SERVING)

    def draining(self) -> None:
        """Does nothing: the supervisor has drained the HTTP process."""

    def close(self) -> None:
        """Does nothing: the supervisor closes what is shared."""

    def _receive(self, server: RpcServer, metrics: Metrics) -> None:
        """Body of the thread. It ends when the pipe closes."""
        message: object = None
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Ping):
                metrics.refresh()
                self._send(Heartbeat(not self._is_serving or server.is_responsive()))
            elif message is not State.DRAINING:
                self._inbox.put(message)
        if message is not State.DRAINING:  # the supervisor was killed
            folder.remove(self._folder)
        self._inbox.put(StopRequest({"reason": "the supervisor closed the pipe"}))

    def _send(self, message: object) -> None:
        with self._sending, suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
            self._connection.send(message)


def main() -> int:
    """Serves as the supervisor orders; returns the exit status."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - takes no keyword
    try:
        assignment: Assignment = connection.recv()
    except EOFError:
        return 0
    _prepare_process(assignment)
    inbox = Inbox()
    handle_signals(inbox.put)
    lifecycle = WorkerLifecycle(connection, inbox, assignment.metrics, assignment.private_socket)
    try:
        application.run(providers.resolve(assignment.settings), lifecycle, inbox)
    except ServerError as error:
        with suppress(OSError):
            connection.send(Failure(str(error)))
        return 1
    except Exception:
        log.exception("failed")
        return 1
    return 0


def _prepare_process(assignment: Assignment) -> None:
    """Precedes the first metric, and the first thread of the runtime, which would keep its cores."""
    logs.configure(assignment.settings.log_level, assignment.settings.log_format, worker=assignment.worker)
    multiprocess_metrics.write_to(assignment.metrics, assignment.worker)
    try:
        os.sched_setaffinity(0, assignment.cores)
    except OSError as error:  # the cores available to the container have changed since the service started
        log.warning("cores not assigned", extra={"reason": error.strerror})


if __name__ == "__main__":
    end(main())
