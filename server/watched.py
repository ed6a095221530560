"""Follows files while the server runs: certificates, tokens, keys."""

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from attention_serving.server.errors import ServerError
from attention_serving.server.threads import PeriodicThread

C = TypeVar("C")
T = TypeVar("T")
log = logging.getLogger(__name__)
# How often files are read.
LOOK_SECONDS = 1.0


class Watched(Generic[C, T]):
    """What files say, which a thread reads again and again. Contents that cannot be used change nothing.

    Contents are compared, not times: files are often replaced by a change of symbolic links. Those that
    cannot be used are reported if they stay as they are until the next look: until then they may be half
    written, or the key of a pair may follow.

    Attributes:
        value: What was read last without an error. Replaced as a whole, so that readers need no lock.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], C],
        parse: Callable[[C], T],
        changed: Callable[[T | None], object] | None = None,
    ) -> None:
        """Reads for the first time. The thread starts with `start`.

        Args:
            name: What is read, for the log, and the name of the thread.
            read: Reads the contents.
            parse: Checks them. Both raise a ServerError if they cannot be used.
            changed: Called on the thread with the value of changed contents; None if they cannot be used.

        Raises:
            ServerError: The contents cannot be used.
        """
        self._name = name
        self._read, self._parse = read, parse
        self._changed = changed or (lambda _: None)
        self._contents = read()
        self.value = parse(self._contents)
        # What could not be used at the last look, and whether that was reported.
        self._refused: object = None
        self._is_reported = False
        self._thread = PeriodicThread(name, self.look, LOOK_SECONDS)

    def current(self) -> T:
        """The value, for those who ask each time. For any thread."""
        return self.value

    def start(self) -> None:
        """Starts to look by itself."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, without waiting for a look in progress."""
        self._thread.close(wait=False)

    def look(self) -> None:
        """Reads once, and takes what has changed if it can be used."""
        contents: object = None
        try:
            contents = found = self._read()
            if found == self._contents:
                self._refused = None
                return
            value = self._parse(found)
        except Exception as error:  # whatever it is, what is in use stays
            self._refuse(contents or str(error), error)
            return
        self._contents, self.value, self._refused = found, value, None
        log.info("reloaded", extra={"what": self._name})
        self._changed(value)

    def _refuse(self, contents: object, error: Exception) -> None:
        if contents != self._refused:
            self._refused, self._is_reported = contents, False
        elif not self._is_reported:
            self._is_reported = True
            unexpected = not isinstance(error, ServerError)
            fields = {"what": self._name, "reason": str(error)}
            log.warning("not reloaded; what is in use is kept", extra=fields, exc_info=unexpected)
            self._changed(None)
