"""Waits for a server by the health protocol, grpc.health.v1."""

import asyncio
import time
from collections.abc import Sequence
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_client.errors import AttentionClientError, DeadlineExceededError, from_rpc_error

_Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
HEALTH_REQUEST = health_pb2.HealthCheckRequest(service="")
# The statuses of a server that is starting or restarting; for any other, waiting does not help.
_PASSING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether the server reports that it is ready."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


class Readiness:
    """The state of one wait: the time left, the last status, and the pause before the next attempt."""

    def __init__(self, target: str, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self._end = time.monotonic() + timeout
        self._last = "no connection"
        self._pause = _FIRST_PAUSE

    @property
    def remaining(self) -> float:
        """Seconds left; negative after the timeout."""
        return self._end - time.monotonic()

    def is_ready(self, response: health_pb2.HealthCheckResponse) -> bool:
        """Records the status that the server reports; True if it is SERVING."""
        self._last = f"status {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"
        self._pause = _FIRST_PAUSE
        return is_serving(response)

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
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return max(0.0, min(pause, self.remaining))

    def failure(self) -> AttentionClientError:
        """The error of a wait that reached its timeout."""
        message = f"{self._target} was not ready within {self._timeout:g} s; last status: {self._last}"
        return DeadlineExceededError(message, reason="DEADLINE_EXCEEDED")


def wait_until_ready(stub: health_pb2_grpc.HealthStub, readiness: Readiness, metadata: _Metadata) -> None:
    """Watches the server's health until it is SERVING.

    Raises:
        AttentionClientError: The timeout passed, or waiting does not help.
    """
    while readiness.remaining > 0:
        watch = stub.Watch(HEALTH_REQUEST, timeout=readiness.remaining, metadata=metadata)
        try:
            if any(readiness.is_ready(response) for response in watch):
                return
        except grpc.RpcError as error:
            readiness.note(error)
        finally:
            watch.cancel()
        time.sleep(readiness.pause())
    raise readiness.failure()


async def wait_until_ready_async(
    stub: health_pb2_grpc.HealthStub, readiness: Readiness, metadata: _Metadata
) -> None:
    """As `wait_until_ready`."""
    while readiness.remaining > 0:
        watch = stub.Watch(HEALTH_REQUEST, timeout=readiness.remaining, metadata=metadata)
        try:
            async for response in watch:
                if readiness.is_ready(response):
                    return
        except grpc.RpcError as error:
            readiness.note(error)
        finally:
            watch.cancel()
        await asyncio.sleep(readiness.pause())
    raise readiness.failure()
