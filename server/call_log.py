"""Logs every call and refusal, on the way to another observer."""

import logging

from attention_serving.server.api.calls import CallObserver

log = logging.getLogger(__name__)


class CallLog:
    """Logs every call and refusal at level DEBUG, and notifies another observer."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """One call ended with a status code."""
        self._observer.call_ended(method, code, seconds)
        # The level may change while the server runs.
        if log.isEnabledFor(logging.DEBUG):
            fields = {"method": method, "code": code, "milliseconds": round(1000 * seconds, 3)}
            log.debug("call ended", extra=fields)

    def refused(self, method: str, reason: str) -> None:
        """One request was refused."""
        self._observer.refused(method, reason)
        log.debug("request refused", extra={"method": method, "reason": reason})

    def reader_cut(self, method: str) -> None:
        """One call ended because its caller did not read."""
        self._observer.reader_cut(method)
        log.debug("reader cut off", extra={"method": method})
