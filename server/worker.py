"""One of several server processes; the supervisor runs `python -m server.worker DESCRIPTOR`."""

import logging
import os
import threading
from contextlib import suppress
from typing import Any

from attention_serving.server import application, machine, providers
from attention_serving.server.grpc_server import RpcServer
from attention_serving.server.observe import logs
from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.shutdown import Inbox, StopRequest, handle_signals
from attention_serving.server.supervision import PING, Heartbeat, State, run_child
from attention_serving.server.workers import Assignment, write_metrics_to

log = logging.getLogger(__name__)


class WorkerLifecycle:
    """Life of a server that listens and stops when the supervisor orders it to.

    It stops too if the pipe closes, so that no worker outlives the supervisor. A thread of its own answers
    the supervisor's pings.
    """

    def __init__(self, connection: Any, assignment: Assignment, inbox: Inbox) -> None:
        """Starts nothing yet.

        Args:
            connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more
                than the class.
            assignment: What the worker does.
            inbox: Messages to the main thread.
        """
        self._connection, self._assignment, self._inbox = connection, assignment, inbox
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
        self._port = server.bind(self._assignment.private_socket)
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
        """Body of the thread."""
        message: object = None
        while message is not State.DRAINING:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):  # the supervisor was killed
                machine.remove_folder(self._assignment.folder)
                break
            if message == PING:
                metrics.refresh()
                self._send(Heartbeat(not self._is_serving or server.is_responsive()))
            elif message is State.LISTENING:
                self._inbox.put(message)
        self._inbox.put(StopRequest({"reason": "the supervisor stops"}))

    def _send(self, message: object) -> None:
        with self._sending, suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
            self._connection.send(message)


def serve(connection: Any, assignment: Assignment) -> None:
    """Serves as the supervisor orders.

    Raises:
        ServerError: The worker cannot serve.
    """
    # Before the first metric, and the first thread of the runtime, which would keep its cores.
    logs.configure(assignment.settings.log_level, assignment.settings.log_format, worker=assignment.worker)
    write_metrics_to(assignment.folder, assignment.worker)
    try:
        os.sched_setaffinity(0, assignment.cores)
    except OSError as error:  # the cores available to the container have changed since the service started
        log.warning("cores not assigned", extra={"reason": error.strerror})
    inbox = Inbox()
    handle_signals(inbox.put)
    lifecycle = WorkerLifecycle(connection, assignment, inbox)
    application.run(providers.resolve(assignment.settings), lifecycle, inbox)


if __name__ == "__main__":
    run_child(serve)
