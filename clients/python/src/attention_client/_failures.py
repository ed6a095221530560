"""What a connection adds to a failed call's status: a closed client, a missing connection, hints."""

import re

import grpc

from attention_client._connection import ConnectionSettings
from attention_client.errors import (
    AttentionClientError,
    CallCancelledError,
    ClientClosedError,
    DeadlineExceededError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
)

# Seconds that a call may exceed its timeout to find out why the channel is not connected. The reason is
# known at once if the last attempt to connect failed.
PROBE_SECONDS = 0.05
# How gRPC's core ends a call whose last attempt was not answered in time; the status is CANCELLED.
_ATTEMPT_ENDED = "perAttemptRecvTimeout"
# How gRPC's core reports that a server with TLS closed an unencrypted connection before its first frame, and
# that a server answered a TLS handshake without TLS.
_CLOSED_AT_ONCE = re.compile(r"last error: .*(?:Socket closed|Connection reset by peer)")
_NOT_TLS = "WRONG_VERSION_NUMBER"


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


def with_hint(error: AttentionClientError, settings: ConnectionSettings) -> AttentionClientError:
    """The error; its message says how to pass a token or credentials if that may be why the call failed."""
    if hint := _hint(error, settings):
        error.message = f"{error.message}; {hint}"
        error.args = (error.message,)
    return error


def _hint(error: AttentionClientError, settings: ConnectionSettings) -> str:
    if isinstance(error, UnauthenticatedError):
        if any(key == "authorization" for key, _ in settings.metadata):
            return ""
        return "pass token= to the client (--token or ATTENTION_TOKEN on the command line)"
    if settings.credentials is not None:
        if _NOT_TLS in error.message:
            return "the server does not use TLS: omit credentials (--tls, --ca, --certificate)"
    elif _CLOSED_AT_ONCE.search(error.message):
        return "if the server uses TLS, pass credentials=TlsFiles(ca=FILE) (--tls or --ca FILE)"
    return ""


def failure_of(error: grpc.RpcError) -> str:
    """Why a call that does not wait for a connection failed; empty if there was a connection."""
    return error.details() or "" if error.code() is grpc.StatusCode.UNAVAILABLE else ""
