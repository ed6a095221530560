"""Issue the requests of a load in turn over one channel: as unary calls, or on one stream.

Times are nanoseconds of time.perf_counter_ns.
"""

import time
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum, auto
from itertools import cycle
from typing import Any, Protocol

from benchmarks.channel import CallFailedError, Channel, answer, status, succeeded

clock = time.perf_counter_ns


@dataclass(frozen=True, eq=False)
class Request:
    """The bytes of one request, and what they ask."""

    data: bytes
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One request that was answered, or that failed."""

    request: Request
    started: int
    ended: int
    succeeded: bool


class Caller(Protocol):
    """Starts requests and waits for their ends."""

    def start(self, since: int | None = None) -> None:
        """Starts the next request; its latency counts from `since`, else from now."""

    def finish(self) -> Completion:
        """Waits for the next end."""

    def close(self) -> None:
        """Ends; nothing is in flight any more."""


class UnaryCaller:
    """One call for each request. `start` and `finish` may run on two threads."""

    def __init__(self, target: str, method: bytes, requests: Many[Request]) -> None:
        self._channel = Channel(target)
        self._method = method
        self._requests = cycle(requests)

    def start(self, since: int | None = None) -> None:
        """As of Caller."""
        request = next(self._requests)
        self._channel.call(self._method, request.data, (request, clock() if since is None else since))

    def finish(self) -> Completion:
        """As of Caller; the answer is not parsed."""
        event = self._channel.next_event()
        ended = clock()
        request, started = event.tag
        return Completion(request, started, ended, succeeded(event))

    def close(self) -> None:
        """As of Caller."""
        self._channel.close()


class _Tag(Enum):
    OPENED = auto()
    SENT = auto()
    RECEIVED = auto()
    ENDED = auto()


class StreamCaller:
    """All requests on one bidirectional call. Answers come in the order of the requests."""

    def __init__(self, target: str, method: bytes, requests: Many[Request]) -> None:
        self._channel = Channel(target)
        self._requests = cycle(requests)
        self._unsent: deque[Request] = deque()
        self._unanswered: deque[tuple[Request, int]] = deque()
        self._sending = False
        self._due = len((_Tag.OPENED, _Tag.ENDED))  # events that are still to come
        self._stream = self._channel.open_stream(method, _Tag.OPENED, _Tag.ENDED)
        self._receive()

    def start(self, since: int | None = None) -> None:
        """As of Caller. Messages leave one after the other."""
        request = next(self._requests)
        self._unanswered.append((request, clock() if since is None else since))
        self._unsent.append(request)
        self._send()

    def _send(self) -> None:
        if self._unsent and not self._sending:
            self._sending = True
            self._due += 1
            self._stream.send(self._unsent.popleft().data, _Tag.SENT)

    def finish(self) -> Completion:
        """As of Caller.

        Raises:
            CallFailedError: The stream ended.
        """
        self.receive()
        request, started = self._unanswered.popleft()
        return Completion(request, started, clock(), succeeded=True)

    def receive(self) -> bytes:
        """Waits for the next answer and returns it.

        Raises:
            CallFailedError: The stream ended.
        """
        while True:
            event = self._next_event()
            if event.tag is _Tag.ENDED:
                raise CallFailedError(status(event.batch_operations[1]))
            if event.tag is _Tag.SENT:
                self._sending = False
                self._send()
            if event.tag is _Tag.RECEIVED and (message := _message(event)) is not None:
                self._receive()
                return message

    def _receive(self) -> None:
        self._due += 1
        self._stream.receive(_Tag.RECEIVED)

    def _next_event(self) -> Any:
        event = self._channel.next_event()
        self._due -= 1
        return event

    def close(self) -> None:
        """As of Caller. A channel waits for events that nobody fetches, so all of them are."""
        self._due += 1
        self._stream.close(_Tag.SENT)
        while self._due:
            self._next_event()
        self._channel.close()


def _message(event: Any) -> bytes | None:
    """The message of a stream; None where it ended."""
    message: bytes | None = event.batch_operations[0].message()
    return message


def ask_once(target: str, method: bytes, request: Request, *, stream: bool) -> bytes:
    """The answer to one request.

    Raises:
        CallFailedError: There is none.
    """
    if stream:
        caller = StreamCaller(target, method, [request])
        caller.start()
        received = caller.receive()
        caller.close()
        return received
    channel = Channel(target)
    channel.call(method, request.data, None)
    try:
        return answer(channel.next_event())
    finally:
        channel.close()
