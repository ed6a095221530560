"""How a channel is set up and how long a call may take: changes with transport settings."""

import math

from attention_client.errors import invalid

DEFAULT_TARGET = "127.0.0.1:8001"
DEFAULT_TIMEOUT = 30.0
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# grpc waits from one second up to two minutes before it tries a lost server again; a restarted one is
# back much sooner.
_FIRST_RECONNECT_BACKOFF_MS, _MAX_RECONNECT_BACKOFF_MS = 100, 2_000


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """The channel's settings; grpc by itself receives no message above 4 MiB.

    Raises:
        InvalidArgumentError: The limit is not positive.
    """
    if max_message_bytes < 1:
        raise invalid("max_message_bytes", "1 or more", max_message_bytes)
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ]


def seconds(timeout: float | None, *, default: float = DEFAULT_TIMEOUT) -> float:
    """A call's time in seconds; None means the default, never forever.

    Raises:
        InvalidArgumentError: The timeout is not a positive, finite number.
    """
    if timeout is None:
        return default
    if not (timeout > 0 and math.isfinite(timeout)):
        raise invalid("timeout", "a positive, finite number of seconds", timeout)
    return float(timeout)
