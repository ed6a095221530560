"""One of several server processes; the supervisor runs `python -m server.process.worker DESCRIPTOR`."""

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from attention_serving.server import machine
from attention_serving.server.lifecycle import (
    HEARTBEAT_SECONDS,
    SERVES,
    Inbox,
    StopRequest,
    handle_signals,
    run_child,
)
from attention_serving.server.observe import logs
from attention_serving.server.observe.prometheus import write_metrics_to
from attention_serving.server.process.application import Application
from attention_serving.server.settings import Settings
from attention_serving.server.threads import PeriodicThread

log = logging.getLogger(__name__)


def share_of_machine(settings: Settings, worker: int) -> tuple[Sequence[int], int]:
    """The cores of a worker, and its share of the threads that the quota allows.

    The cores are divided by affinity, and only the number of threads by quota: a quota does not say which
    cores to use, and containers that all chose the first ones would compete for them.
    """
    allowed, threads = sorted(os.sched_getaffinity(0)), range(machine.available_cores())
    share = settings.threads or len(machine.share_of_cores(threads, settings.workers, worker))
    return machine.share_of_cores(allowed, settings.workers, worker), share


def serve(connection: Any, assignment: tuple[int, Settings, Path]) -> None:
    """Serves until a signal asks to stop, or until the pipe closes.

    Args:
        connection: The worker's end of the pipe; a `Connection`, whose stubs have two parameters more than
            the class.
        assignment: The number of the worker, from 0; the settings of the service, with the bound port; and
            its temporary folder, which has links to the files of its metrics.

    Raises:
        ServerError: The worker cannot serve.
    """
    worker, settings, folder = assignment
    # Before the first metric, and the first thread of the runtime, which would keep its cores.
    logs.configure(settings.log_level, settings.log_format, worker=worker)
    write_metrics_to(folder, worker)
    cores, threads = share_of_machine(settings, worker)
    with suppress(OSError):  # the cores available to the container have changed at this moment
        os.sched_setaffinity(0, cores)
    settings = settings.model_copy(update={"threads": threads})
    inbox = Inbox()
    handle_signals(inbox.put)

    def wait_for_supervisor() -> None:
        with suppress(EOFError, OSError):
            connection.recv()  # it sends nothing more: it was killed
        shutil.rmtree(folder, ignore_errors=True)
        inbox.put(StopRequest({"reason": "the supervisor has ended"}))

    def announce() -> None:
        application.refresh()
        if application.server.is_responsive():
            with suppress(OSError):  # the supervisor has ended; the closed pipe reports that too
                connection.send(SERVES)

    with closing(Application(settings, inbox)) as application:
        threading.Thread(target=wait_for_supervisor, name="supervisor", daemon=True).start()
        if not application.load():
            return
        # The port is not bound earlier: the system would distribute connections to it at once.
        port = application.bind(folder, worker)
        log.info("listening", extra={"port": port, **application.start()})
        connection.send(SERVES)
        PeriodicThread("heartbeat", announce, HEARTBEAT_SECONDS).start()
        application.drain()
    log.info("stopped")


if __name__ == "__main__":
    run_child(serve)
