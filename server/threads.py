"""Threads: the names that the operating system shows, and work that is done again and again."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def publish_name() -> None:
    """Gives the calling thread the name of its `threading.Thread`, of which the system keeps 15 characters.

    Python does this by itself from 3.14 on. Linux only; elsewhere it does nothing.
    """
    with suppress(OSError):
        own = Path("/proc/self/task", str(threading.get_native_id()), "comm")
        own.write_text(threading.current_thread().name, encoding="utf-8")


class PeriodicThread:
    """Calls a function every so many seconds until it is closed. An error is logged and ends nothing."""

    def __init__(self, name: str, work: Callable[[], object], seconds: float | Callable[[], float]) -> None:
        """The thread starts with `start`.

        Args:
            name: Name of the thread, of which the system shows 15 characters.
            work: What is called.
            seconds: How long to wait before each call; or a function that is asked each time.
        """
        self._work = work
        self._seconds = seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after a call that is under way. Does nothing if it was not started."""
        self._closed.set()
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        publish_name()
        while not self._closed.wait(self._seconds() if callable(self._seconds) else self._seconds):
            try:
                self._work()
            except Exception:  # the thread must survive
                log.exception("periodic work failed", extra={"task": self._thread.name})
