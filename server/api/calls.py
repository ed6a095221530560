"""The life of every call: a coroutine, from its arrival until gRPC has finished the call."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from types import coroutine
from typing import Any, TypeAlias

import grpc

from attention_serving.server.api.admission import DRAINING, AdmissionControl
from attention_serving.server.api.errors import finish_with_error, prepare_finish
from attention_serving.server.api.method import Method
from attention_serving.server.coroutines import Callback, Task, Wait, suspend
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    EngineError,
    LimitExceededError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.engine.events import CallEvent, EventLog, RefusalEvent
from attention_serving.server.engine.limits import Limits
from attention_serving.server.observe.records import CallRecord
from attention_serving.server.transport.call import OK, Call


@dataclass(frozen=True, kw_only=True)
class CallLoad:
    """The calls at one moment. Each attribute is the metric of the same name, after `attention_`.

    Attributes:
        open_calls: Number of slots that are taken, streams included.
        open_streams: Number of ordered streams among them.
        waiting_calls: Number of calls whose first message has not arrived.
        open_connections: Number of connections.
    """

    open_calls: int = 0
    open_streams: int = 0
    waiting_calls: int = 0
    open_connections: int = 0


NO_REQUEST_MESSAGE = "the call ended without a request message"
# The kinds of methods whose calls may have several replies.
REPLY_STREAMS = "ordered stream", "server stream"
# Decides whether a call is recorded, when it arrives, and whether it is a stream; None if it is not.
Recorder: TypeAlias = Callable[[Call, bool], CallRecord | None]
# Reasons of errors after the admission of a request, which are not counted as refusals.
REASONS_AFTER_ADMISSION = (EngineError.reason, RunFailedError.reason, DeadlineExceededError.reason)


class Calls:
    """Serves the calls of all methods. For the transport's thread, except `load`."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        events: EventLog,
        admission: AdmissionControl,
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """Creates what serves the calls of a server.

        Args:
            methods: Each method, by its full name.
            events: Receives an event for every call whose method is counted, and for every refusal.
            admission: Decides which calls are taken.
            recorder: Is asked about every call whose method is counted; None if none is recorded.
        """
        self._methods, self._events = methods, events
        self._admission, self._recorder = admission, recorder
        # The ordered streams, which end once what was received has been answered.
        self._streams: set[Call] = set()

    async def serve(self, call: Call) -> None:
        """Serves one call until gRPC has finished it: one request and one reply, or a stream."""
        method = self._methods.get(call.method)
        if method is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "the server has no such method")
            return
        started, reservation, message = time.perf_counter(), None, None
        if self._recorder is not None and method.is_counted:
            call.record = self._recorder(call, method.kind in REPLY_STREAMS)
        try:
            try:
                self._admission.start_waiting(call, method)
                if method.kind in REPLY_STREAMS:
                    is_ordered = method.kind == "ordered stream"
                    await (self._ordered_stream if is_ordered else self._server_stream)(call, method)
                else:
                    message = await call.message()
                    if message is None:
                        call.finish(grpc.StatusCode.UNIMPLEMENTED, NO_REQUEST_MESSAGE)
                        return
                    self._admission.admit(call, method)
                    timeline = None if call.record is None else call.record.start_timeline(len(message))
                    if method.budget is not None:
                        reservation = Reservation(method.budget, call.account, timeline)
                    message = await self._collect(message, call, method, reservation)
                    reply = await method.handle(message, call, reservation)
                    if timeline is not None:
                        timeline.sent_bytes = len(reply)
                    call.finish(OK, message=reply)
                    del reply  # the core has a copy of what is not sent yet
            except Exception as error:  # an unexpected one too must end the call, and not only be logged
                finish_with_error(call, error)
            del message
            await suspend(None)  # for the end of the call, which closes this
        finally:
            if reservation is not None:
                reservation.release()
            self._admission.leave(call, method)
            if method.is_counted:
                self._report(call, started)

    async def _collect(
        self, message: Any, call: Call, method: Method, reservation: Reservation | None
    ) -> Any:
        """The request of a call; of a client stream, all messages, which may be as large as one request."""
        if method.kind != "client stream" or reservation is None:
            return message
        messages, most = [], self._admission.options.max_message_bytes
        while message is not None:
            self._admission.authenticate(call, method)
            reservation.add(len(message))
            messages.append(message)
            if reservation.size > most or len(messages) > Limits.max_sequences:
                limit = f"the limit is {Limits.max_sequences} messages, of {most} bytes in all"
                raise LimitExceededError("message", f"is number {len(messages)} of the stream; {limit}")
            self._admission.start_idle_timeout(call)
            message = await call.message()
        call.wait_deadline = math.inf
        return messages

    async def _ordered_stream(self, call: Call, method: Method) -> None:
        """One reply for each request, in the order of the requests, while later requests are received.

        If the caller reads replies slowly, its requests are received slowly.
        """
        replies = OrderedReplies()
        self._streams.add(call)
        try:
            message = await call.message()
            if message is not None:
                self._admission.admit(call, method)
            while message is not None:
                self._admission.authenticate(call, method)
                if not replies:  # it was idle
                    call.wait_deadline = math.inf
                replies.begin(Task(self._answer(call, method, message, replies), call.post))
                message = None  # it must not stay alive while the stream waits
                await replies.wait_for_fewer_than(self._admission.options.stream_window)
                message = await call.message()
            was_stopped = call.receives_no_more
            await replies.wait_for_fewer_than(1)
            if was_stopped:
                raise ShuttingDownError(DRAINING)
            call.finish(OK)
        finally:
            self._streams.discard(call)
            replies.close()

    async def _answer(self, call: Call, method: Method, message: bytes, replies: "OrderedReplies") -> None:
        """Answers one request of a stream, when its turn comes. An error of the method ends the stream."""
        timeline = None if call.record is None else call.record.start_timeline(len(message))
        reservation = None if method.budget is None else Reservation(method.budget, call.account, timeline)
        end: Callback | None = None
        try:
            try:
                reply: bytes = await method.handle(message, call, reservation)
            except Exception as error:
                if timeline is not None:
                    timeline.fail(error)
                if isinstance(error, EngineError) and (reply := error.reply):
                    self._count_refusal(error.reason)
                else:
                    end = prepare_finish(call, error)
                    call.stop_receiving()
            del message  # it must not stay alive while earlier replies are sent
            more = await replies.wait_for_turn()
            if end is not None:
                end()
                return
            await call.send(reply, more=more)
        finally:
            if reservation is not None:
                reservation.release()
        if timeline is not None and call.record is not None:
            timeline.sent_bytes = len(reply)
            call.record.end_timeline(timeline)
        replies.end_turn()
        if not replies:
            self._admission.start_idle_timeout(call)

    async def _server_stream(self, call: Call, method: Method) -> None:
        """One request, and what the handler replies until the server drains."""
        message = await call.message()
        if message is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, NO_REQUEST_MESSAGE)
            return
        self._admission.admit(call, method)
        replies = method.handle(message)
        del message
        async for reply in replies:
            await call.send(reply)
        raise ShuttingDownError(DRAINING)

    def drain(self) -> None:
        """Refuses calls from now on, and ends those that would not end by themselves.

        Those are the calls whose first message does not arrive soon, and the ordered streams: each ends once
        the replies to what was received have been sent.
        """
        self._admission.drain()
        for call in tuple(self._streams):
            call.stop_receiving()

    def load(self) -> CallLoad:
        """The calls that are open now. For any thread."""
        calls, streams = len(self._admission.calls), len(self._admission.streams)
        waiting = len(self._admission.waiting) + len(self._admission.waiting_other_calls)
        return CallLoad(open_calls=calls, open_streams=streams, waiting_calls=waiting)

    def _report(self, call: Call, started: float) -> None:
        """Reports a call that gRPC has finished: it was answered, or cancelled."""
        code = call.status_code or grpc.StatusCode.UNKNOWN
        name = "OK" if code is OK else code.name
        self._events.add(CallEvent(call.method, name, time.perf_counter() - started))
        if call.reason:
            self._count_refusal(call.reason)
        if call.record is not None:
            # After success, an id that the caller did not choose is of no use.
            call.record.request_id = call.request_id if code is OK else call.ensure_request_id()
            call.record.end(name, call.reason)

    def _count_refusal(self, reason: str) -> None:
        """Counts a call, or a request of a stream that goes on, unless the server took it."""
        if reason not in REASONS_AFTER_ADMISSION:
            self._events.add(RefusalEvent(reason))


class OrderedReplies:
    """The requests of a stream whose replies have not been sent, in their order.

    Each is answered by a task of its own, which awaits its turn to send. The stream's task awaits room for
    the next request.
    """

    def __init__(self) -> None:
        """Begins without requests."""
        self._answering: deque[Task] = deque()
        # Those that await their turn.
        self._ready: set[Task] = set()
        # The stream's task, if it awaits that fewer requests are left than that.
        self._waiting: Task | None = None
        self._most = 0

    def __len__(self) -> int:
        """Number of requests without a sent reply."""
        return len(self._answering)

    def begin(self, task: Task) -> None:
        """A request arrived, which a task answers."""
        self._answering.append(task)
        task.resume()

    @coroutine
    def wait_for_turn(self) -> Generator[Wait, Any, bool]:
        """Waits until the replies to all earlier requests have been sent.

        Returns:
            Whether the next reply is ready too.
        """
        yield self._await_turn
        return len(self._answering) > 1 and self._answering[1] in self._ready

    def _await_turn(self, task: Task) -> None:
        self._ready.add(task)
        self._next()

    def end_turn(self) -> None:
        """The reply whose turn it was has been sent."""
        self._answering.popleft()
        if self._waiting is not None and len(self._answering) < self._most:
            task, self._waiting = self._waiting, None
            task.resume()
        self._next()

    def _next(self) -> None:
        if self._answering and self._answering[0] in self._ready:
            task = self._answering[0]
            self._ready.discard(task)
            task.resume()

    @coroutine
    def wait_for_fewer_than(self, most: int) -> Generator[Wait, Any, None]:
        """Waits until fewer requests than that are without a sent reply."""
        self._most = most
        if len(self._answering) >= most:
            yield self._await_room

    def _await_room(self, task: Task) -> None:
        self._waiting = task

    def close(self) -> None:
        """Ends all tasks: no reply can be sent any more."""
        self._waiting = None
        for task in self._answering:
            task.close()
