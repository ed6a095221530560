"""A wait for a server by the health protocol, grpc.health.v1."""

import time

import grpc
from grpc_health.v1 import health_pb2

from attention_client.errors import AttentionClientError, DeadlineExceededError, from_rpc_error

HEALTH_REQUEST = health_pb2.HealthCheckRequest(service="")
# The statuses of a server that is starting or restarting; for any other, waiting does not help.
_PASSING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds


class Readiness:
    """The state of one wait: the time left, the last status, and the pause before the next attempt."""

    def __init__(self, target: str, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self._end = time.monotonic() + timeout
        self._last = "no connection"
        self._next_pause = _FIRST_PAUSE

    @property
    def remaining(self) -> float:
        """Seconds left; negative after the timeout."""
        return self._end - time.monotonic()

    def is_ready(self, response: health_pb2.HealthCheckResponse) -> bool:
        """Records the status that the server reports; True if it is SERVING."""
        self._last = f"status {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"
        self._next_pause = _FIRST_PAUSE
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def note(self, error: grpc.RpcError) -> None:
        """Records why a health call ended.

        Raises:
            AttentionClientError: Waiting does not help, as for UNAUTHENTICATED.
        """
        if error.code() not in _PASSING:
            raise from_rpc_error(error) from error
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # the end of this wait itself
            self._last = f"{error.code().name} {error.details() or ''}".strip()

    def pause(self) -> float:
        """Seconds until the next attempt; doubles from one to the next."""
        pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        return max(0.0, min(pause, self.remaining))

    def failure(self) -> AttentionClientError:
        """The error of a wait that reached its timeout."""
        message = f"{self._target} was not ready within {self._timeout:g} s; last status: {self._last}"
        return DeadlineExceededError(message, reason="DEADLINE_EXCEEDED")
