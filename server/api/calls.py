"""The life of every call: one coroutine each, from its arrival until the core is done with it."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import grpc

from attention_serving.server.api.access import CallAccess
from attention_serving.server.api.admission import DRAINING, Admission, CallLimits, Ticket
from attention_serving.server.api.errors import CallError, end_with
from attention_serving.server.api.method import CallKind, Method
from attention_serving.server.api.replies import OrderedReplies, Outbox
from attention_serving.server.coroutines import Task
from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.records import CallRecord
from attention_serving.server.transport.call import OK, Call


@dataclass(frozen=True, kw_only=True)
class CallLoad:
    """The calls at one moment.

    Attributes:
        calls: Number of places that are taken, streams included.
        streams: Number of ordered streams among them.
        waiting: Number of calls whose first message has not arrived.
        connections: Number of connections.
    """

    calls: int = 0
    streams: int = 0
    waiting: int = 0
    connections: int = 0


class CallObserver(Protocol):
    """Receives a report of every call that ended."""

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call ended with a status code, so many seconds after it arrived."""

    def refused(self, method: str, reason: str) -> None:
        """A request was refused for a stable reason, such as OVERLOADED: a call, or a message of a stream."""

    def reader_cut(self, method: str) -> None:
        """A call was ended because its caller did not read the replies in time."""


NO_MESSAGE = "the call ended without a request message"
# Decides whether a call is recorded, when it arrives, and whether it is a stream; None if it is not.
Recorder: TypeAlias = Callable[[Call, bool], CallRecord | None]
# Errors of requests that the server took.
NOT_REFUSALS = ("", EngineError.reason, RunFailedError.reason, DeadlineExceededError.reason)


class Calls:
    """Serves the calls of all methods. For the transport's thread, except `load`."""

    def __init__(
        self,
        methods: Mapping[str, Method],
        observer: CallObserver,
        limits: CallLimits,
        check_deadline: Callable[..., None],
        *,
        stream_window: int,
        access: CallAccess | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Creates what serves the calls of a server.

        Args:
            methods: Each method, by its full name.
            observer: Receives a report of every call whose method is counted, and of every refusal.
            limits: How many calls are open at a time.
            check_deadline: Raises OverloadedError if a call with that deadline, and of a `Caller` if one is
                given, would be answered too late.
            stream_window: Number of requests of one stream that may be without a sent reply.
            access: Checks who calls, and what that identity may do and hold. None lets everyone do
                everything.
            recorder: Is asked about every call whose method is counted; None if none is recorded.
        """
        admission = self._admission = Admission(limits)
        self._methods = {name: (method, admission.lane(method)) for name, method in methods.items()}
        self._observer = observer
        self._check_deadline = check_deadline
        self._window = stream_window
        self._access = access
        self._recorder = recorder
        # How to end each stream once what was received has been answered.
        self._streams: dict[Call, Callable[[], object]] = {}
        self._draining = False

    async def serve(self, call: Call) -> None:
        """Serves one call until the core is done with it."""
        found = self._methods.get(call.method)
        if found is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "the server has no such method")
            return
        method, lane = found
        started = time.perf_counter()
        if self._recorder is not None and method.is_counted:
            call.record = self._recorder(call, method.kind is not CallKind.UNARY)
        ticket = Ticket(call, lane)
        try:
            try:
                if self._draining or self._access is not None or call.deadline != math.inf:
                    self._admit(call, method, ticket)
                if call.record is not None:
                    call.record.caller = call.caller
                ticket.arrive()
                if method.kind is CallKind.UNARY:
                    await self._unary(call, method, ticket)
                elif method.kind is CallKind.ORDERED_STREAM:
                    await self._ordered_stream(call, method, ticket)
                else:
                    await self._server_stream(call, method, ticket)
            except Exception as error:  # an unexpected one too must end the call, and not only be logged
                end_with(call, error)
            await call.done()
        finally:
            ticket.give_back()
            self._report(call, method, started)

    def _admit(self, call: Call, method: Method, ticket: Ticket) -> None:
        """Refuses a call before its message is received."""
        is_unary = method.kind is CallKind.UNARY
        if self._draining and (method.is_inference or not is_unary):
            raise ShuttingDownError(DRAINING)
        if self._access is not None:
            self._access.admit(call, method, ticket.keep)
        if method.is_inference and is_unary and call.deadline != math.inf:
            if call.identity is None:
                self._check_deadline(call.deadline)
            else:
                self._check_deadline(call.deadline, call.identity.caller)

    async def _unary(self, call: Call, method: Method, ticket: Ticket) -> None:
        """One request, one reply."""
        message = await call.message()
        if message is None:
            raise CallError(grpc.StatusCode.UNIMPLEMENTED, NO_MESSAGE)
        ticket.received()
        record = None if call.record is None else call.record.received(len(message))
        if method.budget is not None:
            ticket.reservation = method.budget.reserve(len(message), call.account)
            ticket.reservation.timeline = record
        reply = await method.handle(message, call, ticket.reservation)
        if record is not None:
            record.sent_bytes = len(reply)
        call.reply(reply)

    async def _ordered_stream(self, call: Call, method: Method, ticket: Ticket) -> None:
        """One reply for each request, in the order of the requests, while later requests are received.

        If the caller reads replies slowly, its requests are received slowly.
        """
        replies = OrderedReplies(self._window)
        self._streams[call] = call.stop_receiving
        try:
            message = await call.message()
            if message is not None:
                ticket.received()
            while message is not None:
                if self._access is not None:
                    self._access.check_again(call, method)
                if not replies:  # it was idle
                    call.latest = math.inf
                replies.begin(Task(self._answer(call, method, message, replies, ticket), call.post))
                await replies.room()
                message = await call.message()
            was_stopped = call.receives_no_more
            await replies.room(1)
            if was_stopped:
                raise ShuttingDownError(DRAINING)
            call.finish(OK)
            await call.done()
        finally:
            del self._streams[call]
            replies.close()

    async def _answer(
        self, call: Call, method: Method, message: bytes, replies: OrderedReplies, ticket: Ticket
    ) -> None:
        """Answers one request of a stream, when its turn comes. An error of the method ends the stream."""
        record = None if call.record is None else call.record.received(len(message))
        reservation = error = None
        try:
            try:
                if method.budget is not None:
                    reservation = method.budget.reserve(len(message), call.account)
                    reservation.timeline = record
                reply = await method.handle(message, call, reservation)
            except Exception as raised:
                if record is not None:
                    record.failed(raised)
                if reservation is None and method.refuse and isinstance(raised, OverloadedError):
                    reply = method.refuse(message, raised)
                else:
                    error = raised
                    call.stop_receiving()
            more = await replies.turn()
            if error is not None:
                end_with(call, error)
                return
            await call.send(reply, more=more)
        finally:
            del error  # it refers to this frame, and neither may keep the other alive
            if reservation is not None:
                reservation.release()
        if record is not None and call.record is not None:
            record.sent_bytes = len(reply)
            call.record.request_ended(record)
        replies.sent()
        if not replies:
            ticket.idle()

    async def _server_stream(self, call: Call, method: Method, ticket: Ticket) -> None:
        """One request, and whatever the handler sends until the call ends."""
        outbox = Outbox(call.post)
        self._streams[call] = partial(outbox.put, None)
        try:
            message = await call.message()
            if message is None:
                raise CallError(grpc.StatusCode.UNIMPLEMENTED, NO_MESSAGE)
            ticket.received()
            end = method.handle(message, call, outbox.put)
            try:
                while (reply := await outbox.next()) is not None:
                    await call.send(reply)
                raise ShuttingDownError(DRAINING)
            finally:
                end()
        finally:
            del self._streams[call]

    def drain(self) -> None:
        """Refuses calls from now on, and ends those that would not end by themselves.

        Those are the calls whose first message does not arrive soon, and the streams: each ends once the
        replies to what was received have been sent.
        """
        self._draining = True
        self._admission.drain()
        for end in tuple(self._streams.values()):
            end()

    def load(self) -> CallLoad:
        """The calls that are open now. For any thread."""
        admission = self._admission
        return CallLoad(
            calls=admission.calls.taken, streams=admission.streams.taken, waiting=admission.waiting
        )

    def _report(self, call: Call, method: Method, started: float) -> None:
        """Reports a call. The core is done with it: it was sent, or cancelled."""
        seconds, code = time.perf_counter() - started, call.ended_with or grpc.StatusCode.UNKNOWN
        if call.reason not in NOT_REFUSALS:
            self._observer.refused(call.method, call.reason)
        if call.reader_cut:
            self._observer.reader_cut(call.method)
        if not method.is_counted:
            return
        self._observer.call_ended(call.method, "OK" if code is OK else code.name, seconds)
        if call.record is not None:
            call.record.caller = call.caller
            # Of a call that succeeded, an id that nobody knows is of no use.
            call.record.request_id = call.known_request_id if code is OK else call.request_id
            call.record.ended(code.name, call.reason)
