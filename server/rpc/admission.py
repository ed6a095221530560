"""Which calls the server takes: the one place of the limits on calls.

A call of inference (`Route.takes_place`)
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

import time
from dataclasses import dataclass
from functools import partial

from attention_serving.server.engine.errors import Code, EngineError, OverloadedError, ShuttingDownError
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.route import CallKind, Route
from attention_serving.server.rpc.timeouts import Timeouts
from attention_serving.server.rpc.transport.seam import Call

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


class ConcurrencyLimit:
    """Limits how many calls are open at a time.

    Attributes:
        open: Number of calls that are open.
    """

    def __init__(self, noun: str, limit: int) -> None:
        self._noun = noun
        self._limit = limit
        self.open = 0

    def check(self) -> None:
        """Raises OverloadedError if the limit is reached."""
        if self.open >= self._limit:
            raise OverloadedError(
                f"{self._limit} {self._noun} are open, which is this server's limit; try again later"
            )

    def acquire(self, call: Call) -> None:
        """Admits a call, which counts until the core is done with it.

        Raises:
            OverloadedError: The limit is reached.
        """
        self.check()
        self.open += 1
        call.add_done_callback(self._release)

    def _release(self) -> None:
        self.open -= 1


class CallAdmission:
    """Admits the calls of some methods. All methods run on the transport's thread."""

    def __init__(
        self,
        waiting: Timeouts[Call],
        idle: Timeouts[Call],
        *,
        max_waiting: int,
        places: tuple[ConcurrencyLimit, ...] = (),
        at_arrival: ConcurrencyLimit | None = None,
    ) -> None:
        """Creates an admission.

        Args:
            waiting: The calls whose first message has not arrived.
            idle: The streams that wait for a later message.
            max_waiting: How many calls may wait.
            places: What a call takes when its first message has arrived.
            at_arrival: What it takes when it arrives.
        """
        self._waiting = waiting
        self._idle = idle
        self._max_waiting = max_waiting
        self._places = places
        self._at_arrival = at_arrival

    def arrive(self, call: Call) -> None:
        """A call arrived. It is refused before its message is received if it could not be taken then.

        Raises:
            OverloadedError: Too many calls wait, or all places are taken.
        """
        for place in self._places:
            place.check()
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(
                f"{self._max_waiting} calls wait for their messages, which is this server's limit;"
                " try again later"
            )
        if self._at_arrival is not None:
            self._at_arrival.acquire(call)
        self._waiting.add(call, call.call_at)

    def received(self, call: Call) -> None:
        """A message of a call arrived. The first takes the call's places.

        Raises:
            OverloadedError: All places are taken.
        """
        if self._waiting.remove(call):
            for place in self._places:
                place.acquire(call)
        else:
            self._idle.remove(call)

    def idle(self, call: Call) -> None:
        """Every reply of a stream has been sent."""
        self._idle.add(call, call.call_at)

    def left(self, call: Call) -> None:
        """The core is done with a call."""
        if not self._waiting.remove(call):
            self._idle.remove(call)


class CallAdmissions:
    """The admission of every method."""

    def __init__(self, limits: CallLimits) -> None:
        """Creates the admissions of a server.

        Args:
            limits: How many calls are open at a time.
        """
        self._limits = limits
        self._calls = ConcurrencyLimit("calls", limits.max_calls)
        self._streams = ConcurrencyLimit("streams", limits.max_streams)
        self._waiting = Timeouts(limits.receive_timeout_seconds, self._not_received)
        self._other_waiting = Timeouts(limits.receive_timeout_seconds, self._not_received)
        idle = Timeouts(limits.stream_idle_seconds, self._is_idle)
        most = limits.max_waiting_calls
        self._unary = CallAdmission(self._waiting, idle, max_waiting=most, places=(self._calls,))
        places = (self._calls, self._streams)
        self._ordered = CallAdmission(self._waiting, idle, max_waiting=most, places=places)
        others = ConcurrencyLimit("calls of health, metadata and reflection", most)
        self._others = CallAdmission(self._other_waiting, idle, max_waiting=most, at_arrival=others)

    @property
    def calls(self) -> int:
        """Number of places that are taken."""
        return self._calls.open

    @property
    def streams(self) -> int:
        """Number of ordered streams among them."""
        return self._streams.open

    @property
    def waiting(self) -> int:
        """Number of calls whose first message has not arrived."""
        return len(self._waiting) + len(self._other_waiting)

    def of(self, route: Route) -> CallAdmission:
        """The admission of a method."""
        if not route.takes_place:
            return self._others
        return self._ordered if route.kind is CallKind.ORDERED_STREAM else self._unary

    def drain(self) -> None:
        """Ends the calls whose first message does not arrive very soon: it may be on its way."""
        latest = time.monotonic() + ARRIVING_SECONDS
        for call in (*self._waiting, *self._other_waiting):
            call.call_at(latest, partial(self._end_waiting, call))

    def _end_waiting(self, call: Call) -> None:
        if call in self._waiting or call in self._other_waiting:
            end_with(call, ShuttingDownError(DRAINING))

    def _not_received(self, call: Call) -> None:
        seconds = self._limits.receive_timeout_seconds
        end_with(call, ReceiveTimeoutError(f"no message of the call arrived within {seconds:g} seconds"))

    def _is_idle(self, call: Call) -> None:
        seconds = self._limits.stream_idle_seconds
        end_with(call, IdleStreamError(f"the stream was idle for {seconds:g} seconds; open another"))
