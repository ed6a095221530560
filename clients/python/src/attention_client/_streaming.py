"""What both clients do with each item of a stream: changes with the stream's messages.

Both keep one queue of entries in the order of the items. An entry is an item that was sent and awaits its
answer, an item that was refused before it was sent, or one of two marks: the input's end, the call's end.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from attention_client._connection import seconds
from attention_client._decoding import decode_result
from attention_client._encoding import EncodedCall, Layout, encode_texts, encode_tokens, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import Ask, AttendInputs, Result, StreamItem, TextInputs, TokenInputs
from attention_client.errors import (
    AttentionClientError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    from_stream_error,
    invalid,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """How a stream goes.

    Attributes:
        ask: What each request says beside its inputs.
        return_exceptions: Whether a refused item is yielded as its error, rather than raised.
        max_in_flight: Most items read and not yet answered.
        timeout: Seconds for the whole stream; None for no such limit.
        idle_timeout: Seconds to wait for one answer; None for no such limit.
    """

    ask: Ask
    return_exceptions: bool
    max_in_flight: int
    timeout: float | None
    idle_timeout: float | None

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise invalid("max_in_flight", "1 or more", self.max_in_flight)


def plan_stream(
    ask: Ask, *, return_exceptions: bool, max_in_flight: int, timeout: float | None, default: float
) -> StreamPlan:
    """Plans a stream: `timeout` bounds all of it; without one, the client's default bounds each wait.

    Raises:
        InvalidArgumentError: `max_in_flight` or `timeout` is not positive.
    """
    return StreamPlan(
        ask=ask,
        return_exceptions=return_exceptions,
        max_in_flight=max_in_flight,
        timeout=None if timeout is None else seconds(timeout),
        idle_timeout=default if timeout is None else None,
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """An item that awaits its answer."""

    id: str
    layout: Layout


class Mark(Enum):
    """What stands among the entries beside the items."""

    INPUT_ENDED = "the caller's iterable is exhausted, or raised"
    CALL_ENDED = "the server ended the call, or the connection is lost"


Entry: TypeAlias = Sent | AttentionClientError | Mark
Outcome: TypeAlias = Result | AttentionClientError


def encode_item(index: int, item: StreamItem, ask: Ask) -> tuple[Entry, pb.AttendStreamRequest | None]:
    """Encodes one item; one that the client refuses has an error for an entry and no request."""
    try:
        call = _encode(item, ask)
    except InvalidArgumentError as error:
        return error, None
    entry = Sent(str(index), call.layout)
    return entry, pb.AttendStreamRequest(id=entry.id, request=call.request)


def _encode(item: StreamItem, ask: Ask) -> EncodedCall:
    match item:
        case TextInputs():
            return encode_texts(ask, item.text, mask=item.mask)
        case TokenInputs():
            return encode_tokens(ask, item.token_ids, mask=item.mask, lengths=item.lengths)
        case AttendInputs():
            return encode_vectors(ask, item)
    return encode_vectors(ask, AttendInputs(item))


def decode_answer(answer: pb.AttendStreamResponse, sent: Sent) -> Outcome:
    """Reads the answer to one item: its result, or why there is none.

    Raises:
        InternalError: The answer is another item's, so that none after it can be trusted.
    """
    if answer.id != sent.id:
        raise InternalError(f"the server answered request {answer.id!r} in the place of {sent.id!r}")
    if answer.WhichOneof("result") == "error":
        return from_stream_error(answer.error)
    try:
        return decode_result(answer.response, sent.layout)
    except InternalError as error:
        return error


def ended_early() -> UnavailableError:
    """The error of a call that the server ended, without one of its own, while answers were due."""
    return UnavailableError("the server ended the stream before all requests were answered")


def idle_too_long(seconds: float | None) -> DeadlineExceededError:
    """The error of a stream whose next answer did not come."""
    return DeadlineExceededError(f"no answer came within {seconds} s while requests were outstanding")
