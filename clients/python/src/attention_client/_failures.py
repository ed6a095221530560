"""What a connection adds to a failed call's status: whether the client was closed or never connected."""

import grpc

from attention_client.errors import (
    AttentionClientError,
    CallCancelledError,
    ClientClosedError,
    DeadlineExceededError,
    UnavailableError,
    from_rpc_error,
)

# Seconds that a call may exceed its timeout to find out why the channel is not connected. The reason is
# known at once if the last attempt to connect failed.
PROBE_SECONDS = 0.05
# How gRPC's core ends a call whose last attempt was not answered in time; the status is CANCELLED.
_ATTEMPT_ENDED = "perAttemptRecvTimeout"


def as_client_error(error: Exception, *, closed: bool) -> AttentionClientError:
    """Converts what gRPC raises; a closed channel makes it raise exceptions other than RpcError."""
    if isinstance(error, grpc.RpcError):
        error = from_rpc_error(error)
    if closed and (isinstance(error, CallCancelledError) or not isinstance(error, AttentionClientError)):
        return ClientClosedError("the client is closed; create another to make further calls")
    if isinstance(error, CallCancelledError) and _ATTEMPT_ENDED in error.message:
        return DeadlineExceededError(
            "none of the call's attempts was answered within attempt_timeout", reason="DEADLINE_EXCEEDED"
        )
    return error if isinstance(error, AttentionClientError) else AttentionClientError(str(error))


def is_local_deadline(error: AttentionClientError) -> bool:
    """Whether the timeout passed before the server sent a status, which would state a reason."""
    return isinstance(error, DeadlineExceededError) and not error.reason


def deadline_error(
    error: AttentionClientError, name: str, timeout: float | None, failure: str
) -> AttentionClientError:
    """The error of a call that ran out of time.

    Args:
        error: As gRPC or the stream reported it.
        name: The servers' addresses.
        timeout: The call's timeout in seconds; None if the error states its own.
        failure: The reason if the channel is not connected; otherwise empty.
    """
    within = "before the timeout" if timeout is None else f"within {timeout:g} s"
    if failure:
        return UnavailableError(f"no connection to {name} {within}: {failure}")
    message = error.message if timeout is None else f"{name} did not answer {within}"
    return DeadlineExceededError(message, reason="DEADLINE_EXCEEDED", request_id=error.request_id)


def failure_of(error: grpc.RpcError) -> str:
    """Why a call that does not wait for a connection failed; empty if there was a connection."""
    return error.details() or "" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
