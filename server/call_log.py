"""Logs every call, on the way to another observer."""

import logging

from server.rpc.dispatcher import CallObserver

log = logging.getLogger(__name__)


class CallLog:
    """Logs every call at level DEBUG, and notifies another observer."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    def called(self, method: str, code: str, seconds: float) -> None:
        """One call ended with a status code."""
        self._observer.called(method, code, seconds)
        fields = {"method": method, "code": code, "milliseconds": round(1000 * seconds, 3)}
        log.debug("call ended", extra=fields)
