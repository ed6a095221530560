"""What the calls of all transports share: their end, and the callbacks for it."""

import logging

import grpc

from server.rpc.transport.seam import Callback

log = logging.getLogger(__name__)


class BaseCall:
    """The end of a `Call`. All methods run on the transport's thread."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.ended_with: grpc.StatusCode | None = None
        # A dictionary is an ordered set from which a callback is removed in constant time.
        self._done_callbacks: dict[Callback, None] = {}

    def add_done_callback(self, callback: Callback) -> None:
        """See `Call`."""
        if self.ended_with is None:
            self._done_callbacks[callback] = None
        else:
            callback()

    def remove_done_callback(self, callback: Callback) -> None:
        """See `Call`."""
        self._done_callbacks.pop(callback, None)

    def _end(self, code: grpc.StatusCode) -> None:
        """Records the status of the call, once, and calls back."""
        if self.ended_with is not None:
            return
        self.ended_with = code
        callbacks, self._done_callbacks = self._done_callbacks, {}
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the failure of one callback must not prevent the others
                log.exception("done callback failed", extra={"method": self.method})
