"""One of several server processes; the supervisor runs `python -m server.worker DESCRIPTOR`."""

import logging
import os
import shutil
import threading
from contextlib import closing, suppress
from typing import Any

from attention_serving.server.application import Application
from attention_serving.server.observe import logs
from attention_serving.server.observe.prometheus import write_metrics_to
from attention_serving.server.shutdown import Inbox, StopRequest, handle_signals
from attention_serving.server.supervision import HEARTBEAT_SECONDS, Order, State, run_child
from attention_serving.server.threads import PeriodicThread
from attention_serving.server.workers import Assignment

log = logging.getLogger(__name__)


def serve(connection: Any, assignment: Assignment) -> None:
    """Serves as the supervisor orders, until it or a signal asks to stop, or until the pipe closes.

    Args:
        connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more than
            the class.
        assignment: What the worker does.

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
    inbox, sending = Inbox(), threading.Lock()
    handle_signals(inbox.put)

    def receive() -> None:
        try:
            while (order := connection.recv()) is not Order.DRAIN:
                inbox.put(order)
        except (EOFError, OSError):  # the supervisor was killed
            shutil.rmtree(assignment.folder, ignore_errors=True)
        inbox.put(StopRequest({"reason": "the supervisor stops"}))

    def announce(state: State) -> None:
        with sending, suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
            connection.send(state)

    def beat() -> None:
        application.metrics.refresh()
        if application.server.is_responsive():
            announce(State.SERVING)

    with closing(Application(assignment.settings)) as application:
        threading.Thread(target=receive, name="supervisor", daemon=True).start()
        application.load(inbox)
        # The port is not bound earlier: the system would distribute connections to it at once.
        announce(State.READY)
        if isinstance(message := inbox.get(), StopRequest):
            log.info("draining", extra=message.fields)
            return
        port = application.server.bind(assignment.sockets)
        log.info("listening", extra={"port": port, **application.start()})
        announce(State.SERVING)
        PeriodicThread("heartbeat", beat, HEARTBEAT_SECONDS).start()
        application.drain(inbox)
    log.info("stopped")


if __name__ == "__main__":
    run_child(serve)
