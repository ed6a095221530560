"""One of several server processes; the supervisor runs `python -m server.worker DESCRIPTOR`."""

import logging
import os
import threading
from contextlib import closing, suppress
from typing import Any

from attention_serving.server import machine
from attention_serving.server.application import Application
from attention_serving.server.observe import logs
from attention_serving.server.shutdown import Inbox, StopRequest, handle_signals
from attention_serving.server.supervision import PING, Heartbeat, State, run_child
from attention_serving.server.workers import Assignment, write_metrics_to

log = logging.getLogger(__name__)


class Worker:
    """A server that listens and stops when the supervisor orders it to.

    It stops too if the pipe closes, so that no worker outlives the supervisor. A thread of its own answers
    the supervisor's pings.
    """

    def __init__(self, connection: Any, assignment: Assignment) -> None:
        """Loads nothing yet.

        Args:
            connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more
                than the class.
            assignment: What the worker does.
        """
        self._connection, self._assignment = connection, assignment
        self._inbox, self._is_serving = Inbox(), False
        handle_signals(self._inbox.put)
        # The main thread and the one that answers pings both send.
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serves until the supervisor or a signal asks to stop.

        Raises:
            ServerError: The worker cannot serve.
        """
        with closing(Application(self._assignment.settings)) as application:
            threading.Thread(
                target=self._receive, args=(application,), name="supervisor", daemon=True
            ).start()
            application.load(self._inbox)
            # The port is not bound earlier: the system would distribute connections to it at once.
            self._send(State.READY)
            if isinstance(message := self._inbox.get(), StopRequest):
                log.info("draining", extra=message.fields)
                return
            port = application.server.bind(self._assignment.private_sockets)
            log.info("listening", extra={"port": port, **application.start()})
            self._is_serving = True
            self._send(State.SERVING)
            application.drain(self._inbox)
        log.info("stopped")

    def _receive(self, application: Application) -> None:
        """Body of the thread."""
        message: object = None
        while message is not State.DRAINING:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):  # the supervisor was killed
                machine.remove_folder(self._assignment.folder)
                break
            if message == PING:
                application.metrics.refresh()
                self._send(Heartbeat(not self._is_serving or application.server.is_responsive()))
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
    Worker(connection, assignment).run()


if __name__ == "__main__":
    run_child(serve)
