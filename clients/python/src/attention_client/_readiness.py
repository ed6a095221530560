"""What waiting for a server means: changes with the health protocol (grpc.health.v1)."""

import asyncio
import time

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_client.errors import AttentionClientError, DeadlineExceededError, from_rpc_error

# The states of a server that is coming up or restarting; time cures no other.
_PASSING = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class Readiness:
    """One wait for the service "" to be SERVING: the time left, and what was seen last."""

    request = health_pb2.HealthCheckRequest(service="")

    def __init__(self, target: str, timeout: float) -> None:
        self._target, self._timeout = target, timeout
        self._end = time.monotonic() + timeout
        self._seen = "nothing, no connection was made"
        self._pause = _FIRST_PAUSE

    @property
    def remaining(self) -> float:
        """Seconds left; negative once the time is over."""
        return self._end - time.monotonic()

    def is_ready(self, response: health_pb2.HealthCheckResponse) -> bool:
        """Notes what the server says of itself, and whether that is SERVING."""
        self._seen = f"status {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"
        self._pause = _FIRST_PAUSE
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def note(self, error: grpc.RpcError) -> None:
        """Notes a failed watch.

        Raises:
            AttentionClientError: An error that waiting does not cure, such as UNAUTHENTICATED.
        """
        if error.code() not in _PASSING:
            raise from_rpc_error(error) from error
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # that is this wait's own end
            self._seen = f"{error.code().name} {error.details() or ''}".strip()

    def pause(self) -> float:
        """Seconds to wait after a watch ended; grows, so that a dead server is not hammered."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return max(0.0, min(pause, self.remaining))

    def failure(self) -> AttentionClientError:
        """The error of a wait whose time is over."""
        message = f"{self._target} was not ready within {self._timeout:g} s; last seen: {self._seen}"
        return DeadlineExceededError(message)


def wait_until_ready(channel: grpc.Channel, readiness: Readiness) -> None:
    """Follows the server's health to the first SERVING.

    Raises:
        AttentionClientError: The time is over, or waiting does not help.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    while readiness.remaining > 0:
        watch = stub.Watch(readiness.request, timeout=readiness.remaining)
        try:
            if any(readiness.is_ready(response) for response in watch):
                return
        except grpc.RpcError as error:
            readiness.note(error)
        finally:
            watch.cancel()
        time.sleep(readiness.pause())
    raise readiness.failure()


async def wait_until_ready_async(channel: aio.Channel, readiness: Readiness) -> None:
    """As `wait_until_ready`."""
    stub = health_pb2_grpc.HealthStub(channel)
    while readiness.remaining > 0:
        watch = stub.Watch(readiness.request, timeout=readiness.remaining)
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
