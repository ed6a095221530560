"""What the synchronous and the asynchronous stream share: their settings, and each request's way through.

Both keep one queue in the order of the requests. It holds a request that was sent and awaits its response,
the error of a request that was refused before it was sent, or the end of the input or of the call.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from attention_client._calls.attention import EncodedCall, encode_texts, encode_tokens, encode_vectors
from attention_client._calls.embeddings import encode_stream_item
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import (
    AnyResult,
    AttendInputs,
    EmbeddingInputs,
    RequestOptions,
    StreamItem,
    TextInputs,
    TokenInputs,
    type_name,
)
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
class StreamSettings:
    """The settings of one stream.

    Attributes:
        options: What each request states in addition to its inputs.
        return_exceptions: Whether the error of a refused request is yielded, rather than raised.
        max_in_flight: Largest number of requests read and not yet answered.
        timeout: Seconds for the whole stream; None means no limit.
        idle_timeout: Seconds to wait for one response; None means no limit.
    """

    options: RequestOptions
    return_exceptions: bool
    max_in_flight: int
    timeout: float | None
    idle_timeout: float | None


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that awaits its response."""

    id: str
    call: EncodedCall[AnyResult]


class StreamEnd(Enum):
    """The end of the input or of the call, among the requests of the queue."""

    INPUT_ENDED = "the caller's iterable is exhausted, or raised"
    CALL_ENDED = "the server ended the call, or the connection is lost"


QueueItem: TypeAlias = SentRequest | AttentionClientError | StreamEnd
Outcome: TypeAlias = AnyResult | AttentionClientError


def iterator_of(requests: Iterable[StreamItem]) -> Iterator[StreamItem]:
    """The requests of a stream.

    Raises:
        InvalidArgumentError: They are not iterable.
    """
    try:
        return iter(requests)
    except TypeError:
        raise invalid("requests", "an iterable of requests", type_name(requests)) from None


def encode_item(
    index: int, item: StreamItem, options: RequestOptions
) -> tuple[QueueItem, pb.AttendStreamRequest | None]:
    """Encodes one request of the caller; if the client refuses it, only its error is queued."""
    try:
        call = _encode(item, options)
    except InvalidArgumentError as error:
        return error, None
    return SentRequest(str(index), call), pb.AttendStreamRequest(id=str(index), request=call.requests[0])


def _encode(item: StreamItem, options: RequestOptions) -> EncodedCall[AnyResult]:
    match item:
        case EmbeddingInputs():
            return encode_stream_item(options, item)
        case TextInputs():
            return encode_texts(options, item.text, mask=item.mask, return_offsets=item.return_offsets)
        case TokenInputs():
            return encode_tokens(options, item.token_ids, mask=item.mask, lengths=item.lengths)
        case AttendInputs():
            return encode_vectors(options, item)
    return encode_vectors(options, AttendInputs(item))


def decode_response(response: pb.AttendStreamResponse, sent: SentRequest) -> Outcome:
    """Decodes the response to one request: its result or its error.

    Raises:
        InternalError: The response belongs to another request, so the following ones cannot be trusted.
    """
    if response.id != sent.id:
        raise InternalError(
            f"the server answered request {response.id!r}; expected the answer to {sent.id!r}"
        )
    if response.WhichOneof("result") == "error":
        return from_stream_error(response.error)
    try:
        return sent.call.decode([response.response])
    except InternalError as error:
        return error


def ended_early() -> UnavailableError:
    """The error of a stream that the server ended, without an error, before it answered all requests."""
    return UnavailableError("the server ended the stream before all requests were answered")


def idle_too_long(seconds: float | None) -> DeadlineExceededError:
    """The error of a stream whose next response did not arrive in time."""
    return DeadlineExceededError(f"no response arrived within {seconds} s while requests were in flight")
