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

from attention_serving.server.engine.errors import Code, EngineError, OverloadedError, ShuttingDownError
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.method import CallKind, Method
from attention_serving.server.rpc.transport.call import Call

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
        taken: Number of calls that have one.
    """

    def __init__(self, noun: str, number: int) -> None:
        self._noun = noun
        self._number = number
        self.taken = 0

    def check(self) -> None:
        """Raises OverloadedError if all are taken."""
        if self.taken >= self._number:
            raise OverloadedError(
                f"{self._number} {self._noun} are open, which is this server's limit; try again later"
            )


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
        self.limits = limits
        self.calls = Places("calls", limits.max_calls)
        self.streams = Places("streams", limits.max_streams)
        self._others = Places("calls of health, metadata and reflection", limits.max_waiting_calls)
        self._waiting: dict[Call, None] = {}
        self._other_waiting: dict[Call, None] = {}

    @property
    def waiting(self) -> int:
        """Number of calls whose first message has not arrived."""
        return len(self._waiting) + len(self._other_waiting)

    def ticket(self, call: Call, method: Method) -> "Ticket":
        """What a new call takes, of which it has nothing yet."""
        if not method.is_inference:
            return Ticket(call, self.limits, self._other_waiting, (), (self._others,))
        is_stream = method.kind is CallKind.ORDERED_STREAM
        places = (self.calls, self.streams) if is_stream else (self.calls,)
        return Ticket(call, self.limits, self._waiting, places)

    def drain(self) -> None:
        """Ends the calls whose first message does not arrive very soon: it may be on its way."""
        latest = time.monotonic() + ARRIVING_SECONDS
        for call in (*self._waiting, *self._other_waiting):
            call.call_at(latest, partial(self._end_waiting, call))

    def _end_waiting(self, call: Call) -> None:
        if call in self._waiting or call in self._other_waiting:
            end_with(call, ShuttingDownError(DRAINING))


class Ticket:
    """What one call takes of the limits, from its arrival until the core is done with it."""

    __slots__ = ("_call", "_limits", "_places", "_releases", "_taken", "_waiting")

    def __init__(
        self,
        call: Call,
        limits: CallLimits,
        waiting: dict[Call, None],
        places: tuple[Places, ...],
        at_arrival: tuple[Places, ...] = (),
    ) -> None:
        """Begins with nothing.

        Args:
            call: The call.
            limits: The limits of all calls.
            waiting: The calls that wait for their first message.
            places: What it takes when its first message has arrived.
            at_arrival: What it takes when it arrives.
        """
        self._call, self._limits, self._waiting, self._places = call, limits, waiting, places
        self._taken = at_arrival
        self._releases: tuple[Callable[[], object], ...] = ()

    def keep(self, *releases: Callable[[], object]) -> None:
        """Calls functions when the core is done with the call."""
        self._releases += releases

    async def first_message(self) -> bytes | None:
        """Waits for the first message, and takes the place of the call then.

        Returns:
            The message; None if there is none.

        Raises:
            OverloadedError: Too many calls wait, or all places are taken, before or after the message came.
        """
        at_arrival, self._taken = self._taken, ()
        for place in (*self._places, *at_arrival):
            place.check()
        if len(self._waiting) >= self._limits.max_waiting_calls:
            raise OverloadedError(
                f"{self._limits.max_waiting_calls} calls wait for their messages, which is this server's"
                " limit; try again later"
            )
        self._take(at_arrival)
        call = self._call
        self._waiting[call] = None
        call.limit_wait(self._limits.receive_timeout_seconds, self._not_received)
        message = await call.message()
        call.latest = math.inf
        self._waiting.pop(call)
        for place in self._places:
            place.check()
        self._take(self._places)
        return message

    def _take(self, places: tuple[Places, ...]) -> None:
        self._taken += places
        for place in places:
            place.taken += 1

    def idle(self) -> None:
        """Every reply of a stream has been sent: it waits for a request."""
        self._call.limit_wait(self._limits.stream_idle_seconds, self._is_idle)

    def give_back(self) -> None:
        """The core is done with the call."""
        self._waiting.pop(self._call, None)
        for place in self._taken:
            place.taken -= 1
        for release in self._releases:
            release()

    def _not_received(self) -> None:
        seconds = self._limits.receive_timeout_seconds
        error = ReceiveTimeoutError(f"no message of the call arrived within {seconds:g} seconds")
        end_with(self._call, error)

    def _is_idle(self) -> None:
        seconds = self._limits.stream_idle_seconds
        error = IdleStreamError(f"the stream was idle for {seconds:g} seconds; open another")
        end_with(self._call, error)
