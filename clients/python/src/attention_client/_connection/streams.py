"""What the synchronous and the asynchronous stream share: their settings, and each request's way through.

Both read the caller's iterable and send its requests apart from the caller, who receives the responses.
Entries of a queue pass to the caller in the order of the requests, and free slots of `max_in_flight` pass
back. An entry is a request that was sent and awaits its response, the error of a request that was refused
before it was sent, or the end of the input or of the call.
"""

import itertools
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

from attention_client import errors
from attention_client._calls.attention import (
    AttendInputs,
    EncodedCall,
    encode_texts,
    encode_tokens,
    encode_vectors,
)
from attention_client._calls.embeddings import encode_stream_item
from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._values import (
    AnyResult,
    Arrays,
    EmbeddingInputs,
    RequestOptions,
    TextInputs,
    TokenInputs,
    type_name,
)
from attention_client.errors import AttentionClientError, from_stream_error, invalid


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


class StreamEnd(Enum):
    """The end of the input or of the call, among the requests of the queue."""

    INPUT_ENDED = "the caller's iterable is exhausted, or raised"
    CALL_ENDED = "the server ended the call, or the connection is lost"


# Anything else is a query.
StreamItem: TypeAlias = AttendInputs | TokenInputs | TextInputs | EmbeddingInputs | Arrays
Entry: TypeAlias = EncodedCall[AnyResult] | AttentionClientError | StreamEnd
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
) -> tuple[Entry, pb.AttendStreamRequest | None]:
    """Encodes one request of the caller; if the client refuses it, only its error is queued."""
    try:
        call = encode_request(item, options)
    except errors.InvalidArgumentError as error:
        return error, None
    return call, pb.AttendStreamRequest(id=str(index), request=call.requests[0])


def encode_request(item: StreamItem, options: RequestOptions) -> EncodedCall[AnyResult]:
    """Encodes a request of any kind.

    Raises:
        InvalidArgumentError: An argument is wrong.
    """
    match item:
        case EmbeddingInputs():
            return encode_stream_item(options, item)
        case TextInputs():
            return encode_texts(options, item)
        case TokenInputs():
            return encode_tokens(options, item)
        case AttendInputs():
            return encode_vectors(options, item)
    return encode_vectors(options, AttendInputs(item))


class Exchange(Protocol):
    """One stream's call, and what reads the caller's iterable. The two clients differ in how it waits.

    Attributes:
        failure: The exception of the caller's iterable.
        slots: A semaphore: how many more requests may be read.
    """

    failure: BaseException | None
    slots: Any

    async def next_entry(self) -> Entry:
        """Waits for the next entry."""

    async def read(self) -> pb.AttendStreamResponse | None:
        """Waits for one response; None if the server has ended the call.

        Raises:
            AttentionClientError: The call ended with an error, or the response takes too long.
        """

    async def stop(self) -> None:
        """Cancels the call, and stops reading the caller's iterable."""


async def receive_all(exchange: Exchange, settings: StreamSettings) -> AsyncGenerator[Outcome, None]:
    """Runs one stream. Closing the generator cancels the call."""
    try:
        for index in itertools.count():
            entry = await exchange.next_entry()
            if entry is StreamEnd.INPUT_ENDED:
                break
            outcome = await _receive(exchange, index, entry)
            exchange.slots.release()
            if isinstance(outcome, AttentionClientError) and not settings.return_exceptions:
                raise outcome
            yield outcome
        # Lets the server end the call. All responses have arrived, so a failure now changes nothing.
        with suppress(AttentionClientError):
            await exchange.read()
        if exchange.failure is not None:
            raise exchange.failure
    finally:
        await exchange.stop()


async def _receive(exchange: Exchange, index: int, entry: Entry) -> Outcome:
    """Waits for the response to one request, unless the client has refused it."""
    if isinstance(entry, AttentionClientError):
        return entry
    try:
        response = await exchange.read()
        if response is None or isinstance(entry, StreamEnd):
            raise ended_early()
        outcome = decode_response(response, index, entry)
    except AttentionClientError as error:
        # An exception of the caller's iterable takes precedence over the error of the call that it broke.
        failure = exchange.failure or error
        raise failure from failure.__cause__
    if isinstance(outcome, errors.NotFoundError) and (context := entry.context) is not None:
        try:
            outcome = await context._recover(entry, outcome, None)
        except AttentionClientError as error:
            outcome = error
    return outcome


def decode_response(response: pb.AttendStreamResponse, index: int, call: EncodedCall[AnyResult]) -> Outcome:
    """Decodes the response to one request: its result or its error.

    Raises:
        InternalError: The response belongs to another request, so the following ones cannot be trusted.
    """
    if response.id != str(index):
        raise errors.InternalError(
            f"the server answered request {response.id!r}; expected the answer to '{index}'"
        )
    if response.WhichOneof("result") == "error":
        return from_stream_error(response.error)
    try:
        return call.decode([response.response])
    except errors.InternalError as error:
        return error


def ended_early() -> errors.UnavailableError:
    """The error of a stream that the server ended, without an error, before it answered all requests."""
    return errors.UnavailableError("the server ended the stream before all requests were answered")


def idle_too_long(seconds: float | None) -> errors.DeadlineExceededError:
    """The error of a stream whose next response did not arrive in time."""
    return errors.DeadlineExceededError(
        f"no response arrived within {seconds} s while requests were in flight"
    )
