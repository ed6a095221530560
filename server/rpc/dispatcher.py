"""Finds the route of a new call, has it admitted, and reports how it ended."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import grpc

from attention_serving.server.engine.errors import (
    DeadlineExceededError,
    EngineError,
    RunFailedError,
    ShuttingDownError,
)
from attention_serving.server.rpc.access import CallAccess, RecheckedStream
from attention_serving.server.rpc.admission import DRAINING, CallAdmission, CallAdmissions, CallLimits
from attention_serving.server.rpc.calls.ending import end_with
from attention_serving.server.rpc.calls.ordered_stream import OrderedStream, StreamProgress
from attention_serving.server.rpc.calls.route import CallKind, Route
from attention_serving.server.rpc.calls.single_request import ServerStream, UnaryCall
from attention_serving.server.rpc.records import CallRecord
from attention_serving.server.rpc.transport.seam import Call


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

    def called(self, method: str, code: str, seconds: float) -> None:
        """A call ended with a status code, so many seconds after it arrived."""

    def refused(self, method: str, reason: str) -> None:
        """A request was refused for a stable reason, such as OVERLOADED: a call, or a message of a stream."""

    def reader_cut(self, method: str) -> None:
        """A call was ended because its caller did not read the replies in time."""


# Decides whether a call is recorded, when it arrives, and whether it is a stream; None if it is not.
Recorder: TypeAlias = Callable[[Call, bool], CallRecord | None]
# Errors of requests that the server took.
NOT_REFUSALS = ("", EngineError.reason, RunFailedError.reason, DeadlineExceededError.reason)


class Dispatcher:
    """Accepts calls. All methods run on the transport's thread, except `load`."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        observer: CallObserver,
        limits: CallLimits,
        check_deadline: Callable[..., None],
        *,
        stream_window: int,
        access: CallAccess | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Creates the dispatcher.

        Args:
            routes: The route of each method, by its full name.
            observer: Receives a report of every call whose route is counted, and of every refusal.
            limits: How many calls are open at a time.
            check_deadline: Raises OverloadedError if a call with that deadline, and of a `Caller` if one is
                given, would be answered too late.
            stream_window: Number of requests of one stream that may be without a sent reply.
            access: Checks who calls, and what that identity may do and hold. None lets everyone do
                everything.
            recorder: Is asked about every call whose route is counted; None if none is recorded.
        """
        self._recorder = recorder
        self._routes = routes
        self._observer = observer
        self._check_deadline = check_deadline
        self._window = stream_window
        self._access = access
        self._admissions = CallAdmissions(limits)
        self._streams: dict[Call, OrderedStream | ServerStream] = {}
        self._draining = False

    def accept(self, call: Call) -> None:
        """Handles a new call, or refuses it."""
        route = self._routes.get(call.method)
        if route is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "the server has no such method")
            return
        if self._recorder is not None and route.counted:
            call.record = self._recorder(call, route.kind is not CallKind.UNARY)
        admission = self._admissions.of(route)
        call.add_done_callback(partial(self._done, call, route, admission, time.perf_counter()))
        try:
            self._admit(call, route)
            admission.arrive(call)
        except Exception as error:  # an unexpected one too must end the call, and not only be logged
            end_with(call, error)
            return
        if call.record is not None:
            call.record.caller = call.caller
        match route.kind:
            case CallKind.UNARY:
                UnaryCall(call, route, admission.received)
            case CallKind.ORDERED_STREAM:
                self._streams[call] = self._ordered_stream(call, route, admission)
            case CallKind.SERVER_STREAMING:
                self._streams[call] = ServerStream(call, route, admission.received)

    def _admit(self, call: Call, route: Route) -> None:
        """Refuses a call before its message is received."""
        if self._draining:
            _refuse_while_draining(route)
        if self._access is not None:
            self._access.admit(call, route)
        if route.kind is CallKind.UNARY and route.takes_place:
            if call.identity is None:
                self._check_deadline(call.deadline)
            else:
                self._check_deadline(call.deadline, call.identity.caller)

    def _ordered_stream(self, call: Call, route: Route, admission: CallAdmission) -> OrderedStream:
        progress: StreamProgress = admission
        if self._access is not None:
            progress = RecheckedStream(self._access, route, admission)
        return OrderedStream(call, route, self._window, progress)

    def drain(self) -> None:
        """Refuses calls from now on, and ends those that would not end by themselves.

        Those are the calls whose first message does not arrive soon, and the streams: each ends once the
        replies to what was received have been sent.
        """
        self._draining = True
        self._admissions.drain()
        for stream in tuple(self._streams.values()):
            stream.drain(ShuttingDownError(DRAINING))

    def load(self) -> CallLoad:
        """The calls that are open now. For any thread."""
        admissions = self._admissions
        return CallLoad(calls=admissions.calls, streams=admissions.streams, waiting=admissions.waiting)

    def _done(self, call: Call, route: Route, admission: CallAdmission, started: float) -> None:
        """Reports a call. The core is done with it: it was sent, or cancelled."""
        admission.left(call)
        self._streams.pop(call, None)
        if call.reason not in NOT_REFUSALS:
            self._observer.refused(call.method, call.reason)
        if call.reader_cut:
            self._observer.reader_cut(call.method)
        if route.counted:
            code = call.ended_with or grpc.StatusCode.UNKNOWN
            self._observer.called(call.method, code.name, time.perf_counter() - started)
            if call.record is not None:
                call.record.caller = call.caller
                # Of a call that succeeded, an id that nobody knows is of no use.
                is_needed = code is not grpc.StatusCode.OK
                call.record.request_id = call.request_id if is_needed else call.known_request_id
                call.record.ended(code.name, call.reason)


def _refuse_while_draining(route: Route) -> None:
    """Raises unless the route is one of those that tell what the server does, such as health checks."""
    if route.takes_place or route.kind is not CallKind.UNARY:
        raise ShuttingDownError(DRAINING)
