"""A route: everything that the server knows of one method."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError, OverloadedError
from attention_serving.server.rpc.calls.deferred import DeferredReply
from attention_serving.server.rpc.calls.intake import LARGE_BYTES, Intake
from attention_serving.server.rpc.transport.seam import Call
from attention_serving.server.security.rights import Right

Q = TypeVar("Q")
A = TypeVar("A")
K = TypeVar("K")
# Sends one message of a server stream. Any thread may call it; it does nothing once the call has ended.
Send: TypeAlias = Callable[[A], None]


class CallKind(Enum):
    """How many requests and replies a call has."""

    UNARY = "one request, one reply"
    ORDERED_STREAM = "one reply for each request, in the order of the requests"
    SERVER_STREAMING = "one request, any number of replies"


def _never(_request: object) -> bool:
    return False


def _nothing(_data: bytes) -> None:
    return None


@dataclass(frozen=True, eq=False)
class Route:
    """How calls of one method are handled. Made by `unary`, `ordered_stream` or `server_streaming`.

    Attributes:
        kind: How many requests and replies a call has.
        read: Parses a request; raises DecodeError.
        handle: Answers a request.
        write: Serializes a reply that is not serialized yet.
        counted: Whether calls are reported to the metrics. Those of gRPC's own services are not.
        takes_place: Whether calls take a place of inference: see `server.rpc.admission`. Those that only tell
            what the server is and does take none: a busy server is live and ready.
        intake: For requests that carry tensors: they may be as large as the transport permits, their memory
            is reserved, and `handle` is given the reservation too. None for requests of a few names.
        is_slow: Whether a request takes long to decode although it is not large.
        recall: A request that is known by its bytes and need not be parsed, however large it is; None for
            any other. `handle` takes both.
        refuse: Replies to a message of a stream for which there is no memory; None ends the call.
        right: What a caller needs, where callers have to say who they are; None opens the method to everyone.
            A method that states nothing is one for administrators.
    """

    kind: CallKind
    read: Callable[[bytes], Any]
    handle: Callable[..., Any]
    write: Callable[[Any], bytes]
    counted: bool = True
    takes_place: bool = True
    intake: Intake | None = None
    is_slow: Callable[[Any], bool] = _never
    recall: Callable[[bytes], Any] = _nothing
    refuse: Callable[[bytes, OverloadedError], Any] | None = None
    right: Right | None = Right.ADMIN

    def parse(self, data: bytes) -> Any:
        """Parses a request.

        Raises:
            InvalidRequestError: The bytes are not a message of the method's type.
            LimitExceededError: The message is larger than a request of names.
        """
        if self.intake is None and len(data) > LARGE_BYTES:
            raise LimitExceededError(
                "message", f"has {len(data)} bytes; the limit of this method is {LARGE_BYTES}"
            )
        try:
            return self.read(data)
        except DecodeError as error:
            raise InvalidRequestError("message", f"is not a request of this method: {error}") from error

    def serialize(self, reply: Any) -> bytes:
        """Serializes a reply, unless it is serialized already."""
        return reply if isinstance(reply, bytes) else self.write(reply)


def unary(
    read: Callable[[bytes], Q],
    handle: Callable[[Q, Call], A | bytes | DeferredReply],
    write: Callable[[A], bytes],
    *,
    counted: bool = True,
    takes_place: bool = True,
    right: Right | None = Right.ADMIN,
) -> Route:
    """A route of one request and one reply."""
    return Route(CallKind.UNARY, read, handle, write, counted, takes_place, right=right)


def tensors(
    kind: CallKind,
    read: Callable[[bytes], Q],
    handle: Callable[[Q | K, Call, Reservation], A | bytes | DeferredReply],
    write: Callable[[A], bytes],
    intake: Intake,
    *,
    recall: Callable[[bytes], K | None] = _nothing,
    is_slow: Callable[[Q], bool] = _never,
    refuse: Callable[[bytes, OverloadedError], A] | None = None,
) -> Route:
    """A route of requests that carry tensors, texts or numbers, for callers that may infer."""
    return Route(
        kind,
        read,
        handle,
        write,
        intake=intake,
        is_slow=is_slow,
        recall=recall,
        refuse=refuse,
        right=Right.INFER,
    )


def ordered_stream(
    read: Callable[[bytes], Q],
    handle: Callable[[Q, Call], A | bytes | DeferredReply],
    write: Callable[[A], bytes],
    *,
    counted: bool = True,
    takes_place: bool = True,
    right: Right | None = Right.ADMIN,
) -> Route:
    """A route of many requests; `handle` is called with each and makes one reply to each."""
    return Route(CallKind.ORDERED_STREAM, read, handle, write, counted, takes_place, right=right)


def server_streaming(
    read: Callable[[bytes], Q],
    handle: Callable[[Q, Call, Send[A]], None],
    write: Callable[[A], bytes],
    *,
    counted: bool = True,
    takes_place: bool = True,
    right: Right | None = Right.ADMIN,
) -> Route:
    """A route of one request; `handle` is given a function that sends replies until the call ends."""
    return Route(CallKind.SERVER_STREAMING, read, handle, write, counted, takes_place, right=right)
