"""One of several server processes; the supervisor runs `python -m server.process.worker DESCRIPTOR`."""

import logging
import os
import shutil
import threading
from contextlib import closing, suppress
from typing import Any

from attention_serving.server.observe import logs
from attention_serving.server.observe.prometheus import write_metrics_to
from attention_serving.server.process.application import Application
from attention_serving.server.process.shutdown import Inbox, StopRequest, handle_signals
from attention_serving.server.process.supervision import HEARTBEAT_SECONDS, SERVES, run_child
from attention_serving.server.process.workers import Assignment
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)


def serve(connection: Any, assignment: Assignment) -> None:
    """Serves until a signal asks to stop, or until the pipe closes.

    Args:
        connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more than
            the class.
        assignment: What the worker does.

    Raises:
        ServerError: The worker cannot serve.
    """
    worker, settings, cores, folder, sockets = assignment
    # Before the first metric, and the first thread of the runtime, which would keep its cores.
    logs.configure(settings.log_level, settings.log_format, worker=worker)
    write_metrics_to(folder, worker)
    with suppress(OSError):  # the cores available to the container have changed since the service started
        os.sched_setaffinity(0, cores)
    inbox = Inbox()
    handle_signals(inbox.put)

    def wait_for_supervisor() -> None:
        with suppress(EOFError, OSError):
            connection.recv()  # it sends nothing more: it was killed
        shutil.rmtree(folder, ignore_errors=True)
        inbox.put(StopRequest({"reason": "the supervisor has ended"}))

    def beat() -> None:
        application.metrics.refresh()
        if application.server.is_responsive():
            with suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
                connection.send(SERVES)

    with closing(Application(settings)) as application:
        threading.Thread(target=wait_for_supervisor, name="supervisor", daemon=True).start()
        if not application.load(inbox):
            return
        # The port is not bound earlier: the system would distribute connections to it at once.
        port = application.server.bind(sockets)
        log.info("listening", extra={"port": port, **application.start()})
        connection.send(SERVES)
        PeriodicThread("heartbeat", beat, HEARTBEAT_SECONDS).start()
        application.drain(inbox)
    log.info("stopped")


if __name__ == "__main__":
    run_child(serve)
