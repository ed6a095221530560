"""The synchronous client's connection: changes with how grpc's channels are made and asked."""

from types import TracebackType
from typing import Self, TypeVar

import grpc

from attention_client._connection import (
    DEFAULT_MAX_MESSAGE_BYTES,
    DEFAULT_TARGET,
    DEFAULT_TIMEOUT,
    channel_options,
    seconds,
)
from attention_client._generated.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_client._readiness import Readiness, wait_until_ready
from attention_client.errors import translated

_RequestT = TypeVar("_RequestT")
_ResponseT = TypeVar("_ResponseT")


class Connection:
    """A channel to one server; what every call of the synchronous client needs."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._target, self._timeout = target, seconds(timeout)
        options = channel_options(max_message_bytes)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options)
        self._stub = AttentionServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; calls under way raise CallCancelledError."""
        self._channel.close()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Returns once the server says that it is ready; a refused connection is tried again.

        Raises:
            DeadlineExceededError: It did not within `timeout` seconds; the message says what was seen last.
            AttentionClientError: The server refuses the question, which waiting does not cure.
        """
        readiness = Readiness(self._target, seconds(timeout, default=self._timeout))
        wait_until_ready(self._channel, readiness)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_RequestT, _ResponseT]",
        request: _RequestT,
        timeout: float | None,
    ) -> _ResponseT:
        with translated():
            return method(request, timeout=seconds(timeout, default=self._timeout))
