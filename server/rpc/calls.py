"""What every kind of call is made of: its method, an answer that comes later, and an error as its end."""

import logging
import math
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from server.engine.errors import Code, DeadlineExceededError, EngineError, InvalidRequestError
from server.engine.types import Result
from server.rpc.completion_queue import Call
from server.rpc.status import UNEXPECTED, code_of, status_of

log = logging.getLogger(__name__)
Encode = Callable[[Future[Result]], Message | bytes]
Behavior = TypeVar("Behavior", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Method:
    """One method of a service: what it is asked with, what it does, and what it answers with.

    Attributes:
        behavior: Takes a request and its `Call`; returns a message, its bytes, or a `Later`. For streams
            it is called once for each request.
        read: Makes a request of its bytes; raises DecodeError.
        serialize: Makes bytes of a message.
    """

    behavior: Callable[..., Any]
    read: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]

    def ask(self, data: bytes, call: Call) -> Any:
        """Calls the behavior.

        Raises:
            InvalidRequestError: The bytes are no request.
        """
        try:
            request = self.read(data)
        except DecodeError as error:
            raise InvalidRequestError("message", f"is not what the method takes: {error}") from error
        return self.behavior(request, call)

    def write(self, answer: Message | bytes) -> bytes:
        """The bytes of an answer."""
        return answer if isinstance(answer, bytes) else self.serialize(answer)


def reads(read: Callable[[bytes], Any]) -> Callable[[Behavior], Behavior]:
    """Lets a method of a service read its requests in a way of its own."""

    def mark(behavior: Behavior) -> Behavior:
        behavior.read = read  # type: ignore[attr-defined]
        return behavior

    return mark


@dataclass(frozen=True, eq=False)
class Later:
    """An answer that comes when its result does.

    Attributes:
        future: Resolves with the engine's result or an `EngineError`; cancelled where the caller leaves.
        encode: Makes the answer of the resolved future; raises what `Future.result` raises.
        until: When the caller stops waiting, where that is before the call's own deadline; on
            `time.monotonic`'s clock.
    """

    future: Future[Result]
    encode: Encode
    until: float = math.inf


def expire(future: Future[Result]) -> None:
    """Gives a result up because its time is over."""
    with suppress(InvalidStateError):
        future.set_exception(DeadlineExceededError("the deadline passed before the result was there"))


def receive_one(call: Call, then: Callable[[bytes], None]) -> None:
    """Receives the one request of a call; what fails, or is missing, ends this call and no other."""

    def received(message: bytes | None) -> None:
        if message is None:  # a call that the core ended already stays as it is
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "the call brought no message")
            return
        try:
            then(message)
        except Exception as error:
            end_with(call, error)

    call.receive(received)


def end_with(call: Call, error: BaseException) -> None:
    """Ends a call with the status of an error; one that nobody foresaw tells the log only."""
    match error:
        case EngineError():
            status = rpc_status.to_status(status_of(error))
            call.finish(code_of(error), error.message, tuple(status.trailing_metadata or ()))
        case CancelledError():
            call.finish(grpc.StatusCode.CANCELLED, "the caller left")
        case _:
            log.error("call failed", extra={"method": call.method}, exc_info=error)
            call.finish(grpc.StatusCode[Code.INTERNAL], UNEXPECTED)
