"""Which calls the server takes: the one place of the limits on calls.

A call of inference (`Method.is_inference`)
    waits for its first message: at most `max_waiting_calls` do, each for `receive_timeout_seconds`. It holds
    no place, so that callers who only open calls keep nobody from being served. It is refused at once if no
    place is free.
    Then it takes a place, of which there are `max_concurrent_calls`, and keeps it until the core has sent its
    reply or the call has ended. An ordered stream takes one of `max_streams` too, and may wait
    `stream_idle_seconds` for its next message while no reply is outstanding.

A call of any other method (liveness, readiness, health, metadata, reflection)
    takes no place. A bound of their own, `max_waiting_calls` again, holds from their arrival to their end.

Before both, HTTP/2 bounds the calls of one connection (`max_calls_per_connection`): the client's library
makes further calls wait.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from attention_serving.server.api.errors import end_with
from attention_serving.server.api.method import CallKind, Method
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import Code, EngineError, OverloadedError, ShuttingDownError
from attention_serving.server.transport.call import Call

DRAINING = "the server is shutting down; retry on another server"
# How long the first message of a call may still take to arrive once a drain has begun.
ARRIVING_SECONDS = 0.5


class ReceiveTimeoutError(EngineError):
    """The call was opened, but its first message did not arrive in time."""

    code = Code.DEADLINE_EXCEEDED
    reason = "RECEIVE_TIMEOUT"


class IdleStreamError(EngineError):
    """The stream had nothing to answer for longer than the server allows."""

    code = Code.UNAVAILABLE
    reason = "STREAM_IDLE"


@dataclass(frozen=True, kw_only=True)
class CallLimits:
    """How many calls are open at a time, and how long they may wait for messages.

    Attributes:
        max_calls: Calls of inference whose message has arrived, streams included.
        max_streams: Ordered streams among them.
        max_waiting_calls: Calls of inference whose message has not arrived; and calls of other methods.
        receive_timeout_seconds: How long the first message of a call may take. 0 sets no limit.
        stream_idle_seconds: How long a stream may wait for its next message while nothing is outstanding. 0
            sets no limit.
    """

    max_calls: int
    max_streams: int
    max_waiting_calls: int = 4096
    receive_timeout_seconds: float = 0
    stream_idle_seconds: float = 0


class Places:
    """Places of one kind.

    Attributes:
        number: How many there are.
        taken: Number of calls that have one.
    """

    def __init__(self, noun: str, number: int) -> None:
        self._noun = noun
        self.number = number
        self.taken = 0

    def full(self) -> OverloadedError:
        """The error if all are taken."""
        return OverloadedError(
            f"{self.number} {self._noun} are open, which is this server's limit; try again later"
        )


class Lane:
    """What the calls of some methods share.

    Attributes:
        waiting: The calls whose first message has not arrived.
        at_arrival: What a call takes when it arrives.
        at_message: What it takes when its first message has arrived.
    """

    def __init__(self, limits: CallLimits) -> None:
        self.limits = limits
        self.waiting: dict[Call, None] = {}
        self.at_arrival: tuple[Places, ...] = ()
        self.at_message: tuple[Places, ...] = ()


class Admission:
    """Admits the calls of a server. For the transport's thread; any thread may read the numbers.

    Attributes:
        calls: Places of inference.
        streams: Places of streams among them.
    """

    def __init__(self, limits: CallLimits) -> None:
        """Creates the admission of a server.

        Args:
            limits: How many calls are open at a time.
        """
        self.calls = Places("calls", limits.max_calls)
        self.streams = Places("streams", limits.max_streams)
        self._unary, self._streaming, self._others = Lane(limits), Lane(limits), Lane(limits)
        self._streaming.waiting = self._unary.waiting
        self._unary.at_message = (self.calls,)
        self._streaming.at_message = (self.calls, self.streams)
        self._others.at_arrival = (
            Places("calls of health, metadata and reflection", limits.max_waiting_calls),
        )

    @property
    def waiting(self) -> int:
        """Number of calls whose first message has not arrived."""
        return len(self._unary.waiting) + len(self._others.waiting)

    def lane(self, method: Method) -> Lane:
        """That of the calls of a method."""
        if not method.is_inference:
            return self._others
        return self._streaming if method.kind is CallKind.ORDERED_STREAM else self._unary

    def drain(self) -> None:
        """Ends the calls whose first message does not arrive very soon: it may be on its way."""
        latest = time.monotonic() + ARRIVING_SECONDS
        for waiting in (self._unary.waiting, self._others.waiting):
            for call in waiting:
                call.call_at(latest, partial(_end_waiting, call, waiting))


class Ticket:
    """What one call takes of the limits, from its arrival until the core is done with it.

    Attributes:
        reservation: The memory of the request of a unary call; None before it has arrived.
    """

    __slots__ = ("_call", "_lane", "_releases", "_taken", "reservation")

    def __init__(self, call: Call, lane: Lane) -> None:
        """Begins with nothing."""
        self._call, self._lane = call, lane
        self._taken: tuple[Places, ...] = ()
        self._releases: tuple[Callable[[], object], ...] = ()
        self.reservation: Reservation | None = None

    def keep(self, *releases: Callable[[], object]) -> None:
        """Calls functions when the core is done with the call."""
        self._releases += releases

    def arrive(self) -> None:
        """The call waits for its first message.

        Raises:
            OverloadedError: Too many calls wait, or no place is free for its message.
        """
        call, lane = self._call, self._lane
        for place in (*lane.at_message, *lane.at_arrival):
            if place.taken >= place.number:
                raise place.full()
        if len(lane.waiting) >= lane.limits.max_waiting_calls:
            raise OverloadedError(
                f"{lane.limits.max_waiting_calls} calls wait for their messages, which is this server's"
                " limit; try again later"
            )
        for place in lane.at_arrival:
            place.taken += 1
        self._taken = lane.at_arrival
        lane.waiting[call] = None
        call.limit_wait(lane.limits.receive_timeout_seconds, self._not_received)

    def received(self) -> None:
        """The first message arrived.

        Raises:
            OverloadedError: All places are taken.
        """
        self._call.latest = math.inf
        del self._lane.waiting[self._call]
        for place in self._lane.at_message:
            if place.taken >= place.number:
                raise place.full()
            place.taken += 1
            self._taken += (place,)

    def idle(self) -> None:
        """Every reply of a stream has been sent: it waits for a request."""
        if self._call.ended_with is None:  # otherwise it waits until its status is sent
            self._call.limit_wait(self._lane.limits.stream_idle_seconds, self._is_idle)

    def give_back(self) -> None:
        """The core is done with the call."""
        self._lane.waiting.pop(self._call, None)
        for place in self._taken:
            place.taken -= 1
        for release in self._releases:
            release()
        if self.reservation is not None:
            self.reservation.release()

    def _not_received(self) -> None:
        seconds = self._lane.limits.receive_timeout_seconds
        error = ReceiveTimeoutError(f"no message of the call arrived within {seconds:g} seconds")
        end_with(self._call, error)

    def _is_idle(self) -> None:
        seconds = self._lane.limits.stream_idle_seconds
        error = IdleStreamError(f"the stream was idle for {seconds:g} seconds; open another")
        end_with(self._call, error)


def _end_waiting(call: Call, waiting: dict[Call, None]) -> None:
    """Ends a call whose first message has not arrived since the drain began."""
    if call in waiting:
        end_with(call, ShuttingDownError(DRAINING))
