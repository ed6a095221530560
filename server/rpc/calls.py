"""The time and the life of one call: its deadline, and the wait for its result."""

import math
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import grpc

from server.engine.errors import DeadlineExceededError
from server.engine.values import Result

# Without a deadline gRPC reports centuries, which locks refuse to wait.
FOREVER_SECONDS = 365 * 24 * 3600.0


def deadline(context: grpc.ServicerContext) -> float:
    """When the caller stops waiting, on `time.monotonic`'s clock; infinite where it did not say."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else after(remaining)


def after(seconds: float) -> float:
    """The moment so many seconds from now, on `time.monotonic`'s clock; infinite for ages."""
    return math.inf if seconds > FOREVER_SECONDS else time.monotonic() + seconds


def cancel_when_left(future: Future[Result], context: grpc.ServicerContext) -> None:
    """Gives a result up when its caller cancels or its connection breaks."""
    context.add_callback(future.cancel)  # type: ignore[arg-type]  # what it returns is not read


def wait(future: Future[Result], until: float) -> Result:
    """Waits for a result; gives it up when the deadline passes.

    Raises:
        EngineError: There is no result.
        CancelledError: The future was cancelled because the caller left.
    """
    try:
        return future.result(None if until == math.inf else until - time.monotonic())
    except (FutureTimeoutError, CancelledError) as error:
        # A call whose deadline passes is cancelled by gRPC as well, at the same moment.
        if isinstance(error, CancelledError) and time.monotonic() < until:
            raise
        future.cancel()
        raise DeadlineExceededError("the deadline passed before the result was there") from None
