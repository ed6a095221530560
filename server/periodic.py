"""A thread that does the same again and again."""

import logging
import threading
from collections.abc import Callable

from attention_serving.server import thread_names

log = logging.getLogger(__name__)


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
        thread_names.publish()
        while not self._closed.wait(self._seconds() if callable(self._seconds) else self._seconds):
            try:
                self._work()
            except Exception:  # the thread must survive
                log.exception("periodic work failed", extra={"task": self._thread.name})
