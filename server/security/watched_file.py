"""Reloads a file when it changes. A bad file keeps what was read before."""

import logging
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from attention_serving.server.periodic import PeriodicThread
from attention_serving.server.security.errors import SecurityFileError

T = TypeVar("T")
log = logging.getLogger(__name__)
# How often a file is looked at. Not by notifications: mounted secrets are replaced by renaming a folder.
LOOK_SECONDS = 1.0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class SecurityObserver(Protocol):
    """Receives reports of files and keys that were read again. Called on any thread."""

    def reloaded(self, what: str, *, success: bool) -> None:
        """A file or a set of keys was read again, or could not be: what was read before stays in use."""


class NullSecurityObserver:
    """Ignores all reports."""

    def reloaded(self, what: str, *, success: bool) -> None:
        """Does nothing."""


class WatchedFile(Generic[T]):
    """The content of a file, which a thread reads again when the file changes.

    Attributes:
        value: What was read last without an error. Replaced as a whole, so that readers need no lock.
    """

    def __init__(
        self,
        what: str,
        path: Path,
        read: Callable[[Path], T],
        observer: SecurityObserver,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Reads the file and starts the thread.

        Args:
            what: Name of the content, for the log and for metrics.
            path: The file.
            read: Reads and checks it; raises SecurityFileError.
            observer: Receives a report of every later reading.
            look_seconds: How often the file is looked at.

        Raises:
            SecurityFileError: The file cannot be used.
        """
        self._what = what
        self._path = path
        self._read = read
        self._observer = observer
        self._seen = _signature(path)
        self.value = read(path)
        self._check_mode()
        self._thread = PeriodicThread("security-file", self._look, look_seconds)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._thread.close()

    def _look(self) -> None:
        # Before the file is read: a change while it is read is seen the next time.
        signature = _signature(self._path)
        if signature != self._seen:
            self._seen = signature
            self._reload()

    def _reload(self) -> None:
        fields = {"what": self._what, "file": self._path}
        try:
            self.value = self._read(self._path)
        except SecurityFileError as error:
            log.warning("file not reloaded", extra={**fields, "reason": str(error)})
            self._observer.reloaded(self._what, success=False)
        except Exception:  # reported as any other failure
            log.exception("file not reloaded", extra=fields)
            self._observer.reloaded(self._what, success=False)
        else:
            log.info("file reloaded", extra=fields)
            self._check_mode()
            self._observer.reloaded(self._what, success=True)

    def _check_mode(self) -> None:
        try:
            mode = self._path.stat().st_mode
        except OSError:  # it was removed at this moment
            return
        if mode & WRITABLE_BY_OTHERS:
            log.warning("other users may change the file", extra={"what": self._what, "file": self._path})


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever a file is replaced or written; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
