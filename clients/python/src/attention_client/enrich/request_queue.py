"""The requests of a job to servers: queued, sent on a stream, and queued again if the stream breaks."""

import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from attention_client import AttendInputs, AttentionClientError, EmbeddingInputs, TextInputs, TokenInputs
from attention_client._embeddings import EmbedOptions
from attention_client.enrich.backend import BackendRequest, BackendResult, Role
from attention_client.enrich.errors import RefusedError

# Seconds after which a stream that has no request to send checks whether it has ended.
POLL_SECONDS = 0.1
# gRPC ends a stream whose message is too large without saying which message it was. Every request that was
# unanswered is sent again; one that was unanswered this many times is refused.
MAX_ATTEMPTS = 3
StreamInputs: TypeAlias = AttendInputs | TextInputs | TokenInputs | EmbeddingInputs


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that is not answered yet.

    Attributes:
        request: The request.
        future: Future of its result.
        attempts: Number of streams that ended with a message too large before they answered it.
    """

    request: BackendRequest
    future: "Future[BackendResult]"
    attempts: int = 0


RequestQueue: TypeAlias = "queue.SimpleQueue[QueuedRequest]"


class StreamRequests(Iterator[StreamInputs]):
    """What one stream takes from the queue, and which of it is unanswered.

    The stream reads it on another thread, which may be inside `__next__` when the stream breaks.
    """

    def __init__(
        self, requests: RequestQueue, closing: threading.Event, embed: EmbedOptions | None = None
    ) -> None:
        """Takes requests until the job closes.

        Args:
            requests: The queue.
            closing: Is set when the job ends.
            embed: Options of requests to a text encoder; None for any other model.
        """
        self._requests = requests
        self._closing = closing
        self._embed = embed
        self._lock = threading.Lock()
        self._unanswered: deque[QueuedRequest] | None = deque()

    def __next__(self) -> StreamInputs:
        while not self._closing.is_set() and self._unanswered is not None:
            try:
                queued = self._requests.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            with self._lock:
                if self._unanswered is not None:
                    self._unanswered.append(queued)
                    return to_inputs(queued.request, self._embed)
            self._requests.put(queued)
        raise StopIteration

    def pop_answered(self) -> QueuedRequest:
        """Removes and returns the oldest unanswered request, whose answer has arrived."""
        with self._lock:
            assert self._unanswered is not None  # noqa: S101 - requeue() is called after the last answer
            return self._unanswered.popleft()

    def requeue(self, too_large: AttentionClientError | None = None) -> None:
        """Puts unanswered requests back into the queue. Nothing is taken from it any more.

        Args:
            too_large: The error of the stream, if it ended because a message was too large.
        """
        with self._lock:
            unanswered, self._unanswered = self._unanswered, None
        for queued in unanswered or ():
            queued.attempts += too_large is not None
            if too_large and queued.attempts >= MAX_ATTEMPTS:
                queued.future.set_exception(RefusedError(too_large.message, too_large.reason))
            else:
                self._requests.put(queued)


def to_inputs(request: BackendRequest, embed: EmbedOptions | None) -> StreamInputs:
    """A request as an item of `attend_stream`; with options of embeddings, for a text encoder."""
    query = request.inputs[Role.QUERY]
    if embed is not None:
        return EmbeddingInputs(list(query), embed.prompt, embed.dimensions, embed.truncate)
    if isinstance(query[0], str):
        return TextInputs(list(query))
    if query[0].ndim == 1:
        return TokenInputs(list(query))
    return AttendInputs(*(list(rows) for rows in request.inputs.values()))
