"""Threads: work that is done again and again, and files that are followed."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Self, TypeAlias, TypeVar

from attention_serving.server.errors import ServerError

C = TypeVar("C")
T = TypeVar("T")
log = logging.getLogger(__name__)
# How often files are read.
POLL_SECONDS = 1.0
# Receives what was read, such as `certificates`, and its new value; None if that cannot be used.
Reloaded: TypeAlias = Callable[[str, object], object]


def unreported(_what: str, _value: object) -> None:
    """Reports nothing of what was reloaded."""


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
        ServerError: It cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ServerError(f"{path}: cannot be read: {error.strerror}") from error


class PeriodicThread:
    """Calls a function every so many seconds until it is closed. An error is logged and ends nothing.

    Attributes:
        seconds: How long to wait before the next call.
    """

    def __init__(self, name: str, work: Callable[[], object], seconds: float) -> None:
        """The thread starts with `start`.

        Args:
            name: Name of the thread.
            work: What is called.
            seconds: How long to wait before each call.
        """
        self._work, self.seconds = work, seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Starts the thread; returns this."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread after a call that is under way. Does nothing if it was not started."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.seconds):
            try:
                self._work()
            except Exception:  # the thread must survive
                log.exception("periodic work failed", extra={"task": self._thread.name})


class Watched(PeriodicThread, Generic[C, T]):
    """What files say, which a thread reads again and again. Contents that cannot be used change nothing.

    Contents are compared, not times: files are often replaced by a change of symbolic links. Those that
    cannot be used are reported if they stay as they are until the next poll: until then they may be half
    written, or the key of a pair may follow.

    Attributes:
        value: What was read last without an error. Replaced as a whole, so that readers need no lock.
    """

    def __init__(
        self, name: str, read: Callable[[], C], parse: Callable[[C], T], reloaded: Reloaded = unreported
    ) -> None:
        """Reads for the first time. The thread starts with `start`.

        Args:
            name: What is read, for the log, and the name of the thread.
            read: Reads the contents.
            parse: Checks them. Both raise a ServerError if they cannot be used.
            reloaded: Called on the thread when contents have changed.

        Raises:
            ServerError: The contents cannot be used.
        """
        self._name, self._read, self._parse, self._reloaded = name, read, parse, reloaded
        self._contents = read()
        self.value = parse(self._contents)
        # What could not be used at the last poll, and whether that was reported.
        self._refused: object = None
        self._is_reported = False
        super().__init__(name, self.poll_once, POLL_SECONDS)

    def poll_once(self) -> None:
        """Reads once, and takes what has changed if it can be used."""
        contents: C | None = None
        try:
            contents = self._read()
            if contents == self._contents:
                self._refused = None
                return
            value = self._parse(contents)
        except Exception as error:  # whatever it is, what is in use stays
            self._refuse(contents or str(error), error)
            return
        self._contents, self.value, self._refused = contents, value, None
        log.info("reloaded", extra={"what": self._name})
        self._reloaded(self._name, value)

    def _refuse(self, contents: object, error: Exception) -> None:
        if contents != self._refused:
            self._refused, self._is_reported = contents, False
        elif not self._is_reported:
            self._is_reported = True
            fields = {"what": self._name, "reason": str(error)}
            unexpected = not isinstance(error, ServerError)
            log.warning("not reloaded; what is in use is kept", extra=fields, exc_info=unexpected)
            self._reloaded(self._name, None)
