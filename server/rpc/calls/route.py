"""A route: everything that the server knows of one method."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import DecodeError

from server.engine.errors import InvalidRequestError
from server.rpc.calls.deferred import DeferredReply
from server.rpc.transport.seam import Call

Q = TypeVar("Q")
A = TypeVar("A")
# Sends one message of a server stream. Any thread may call it; it does nothing once the call has ended.
Send: TypeAlias = Callable[[A], None]


class CallKind(Enum):
    """How many requests and replies a call has."""

    UNARY = "one request, one reply"
    ORDERED_STREAM = "one reply for each request, in the order of the requests"
    SERVER_STREAMING = "one request, any number of replies"


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
    """

    kind: CallKind
    read: Callable[[bytes], Any]
    handle: Callable[..., Any]
    write: Callable[[Any], bytes]
    counted: bool = True
    takes_place: bool = True

    def parse(self, data: bytes) -> Any:
        """Parses a request.

        Raises:
            InvalidRequestError: The bytes are not a message of the method's type.
        """
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
) -> Route:
    """A route of one request and one reply."""
    return Route(CallKind.UNARY, read, handle, write, counted, takes_place)


def ordered_stream(
    read: Callable[[bytes], Q],
    handle: Callable[[Q, Call], A | bytes | DeferredReply],
    write: Callable[[A], bytes],
    *,
    counted: bool = True,
    takes_place: bool = True,
) -> Route:
    """A route of many requests; `handle` is called with each and makes one reply to each."""
    return Route(CallKind.ORDERED_STREAM, read, handle, write, counted, takes_place)


def server_streaming(
    read: Callable[[bytes], Q],
    handle: Callable[[Q, Call, Send[A]], None],
    write: Callable[[A], bytes],
    *,
    counted: bool = True,
    takes_place: bool = True,
) -> Route:
    """A route of one request; `handle` is given a function that sends replies until the call ends."""
    return Route(CallKind.SERVER_STREAMING, read, handle, write, counted, takes_place)
