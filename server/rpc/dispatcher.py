"""Finds the route of a new call, applies the limits of concurrency, and reports how the call ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc

from server.engine.errors import OverloadedError
from server.rpc.calls.ending import end_with
from server.rpc.calls.ordered_stream import OrderedStream
from server.rpc.calls.route import CallKind, Route
from server.rpc.calls.single_request import ServerStream, UnaryCall
from server.rpc.transport.seam import Call


@dataclass(frozen=True, kw_only=True)
class CallLoad:
    """The counted calls at one moment.

    Attributes:
        calls: Number of open calls, streams included.
        streams: Number of ordered streams among them.
    """

    calls: int = 0
    streams: int = 0


class CallObserver(Protocol):
    """Receives a report of every call that ended."""

    def called(self, method: str, code: str, seconds: float) -> None:
        """A call ended with a status code, so many seconds after it arrived."""

    def refused(self, method: str, reason: str) -> None:
        """A request was refused for a stable reason, such as OVERLOADED: a call, or a message of a stream."""

    def reader_cut(self, method: str) -> None:
        """A call was ended because its caller did not read the replies in time."""


class Dispatcher:
    """Accepts calls. All methods run on the transport's thread, except `load`."""

    def __init__(
        self,
        routes: Mapping[str, Route],
        observer: CallObserver,
        *,
        max_calls: int,
        max_streams: int,
        stream_window: int,
    ) -> None:
        """Creates the dispatcher.

        Args:
            routes: The route of each method, by its full name.
            observer: Receives a report of every call whose route is counted.
            max_calls: Number of counted calls that are open at a time, streams included.
            max_streams: Number of ordered streams among them.
            stream_window: Number of requests of one stream that may be without a sent reply.
        """
        self._routes = routes
        self._observer = observer
        self._window = stream_window
        self._calls = ConcurrencyLimit("calls", max_calls)
        self._streams = ConcurrencyLimit("streams", max_streams)

    def accept(self, call: Call) -> None:
        """Handles a new call, or refuses it."""
        route = self._routes.get(call.method)
        if route is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "the server has no such method")
            return
        if route.counted:
            call.add_done_callback(partial(self._ended, call, time.perf_counter()))
            try:
                self._admit(call, route.kind)
            except OverloadedError as error:
                end_with(call, error)
                return
        match route.kind:
            case CallKind.UNARY:
                UnaryCall(call, route)
            case CallKind.ORDERED_STREAM:
                OrderedStream(call, route, self._window)
            case CallKind.SERVER_STREAMING:
                ServerStream(call, route)

    def load(self) -> CallLoad:
        """The calls that are open now. For any thread."""
        return CallLoad(calls=self._calls.open, streams=self._streams.open)

    def _admit(self, call: Call, kind: CallKind) -> None:
        self._calls.acquire(call)
        if kind is CallKind.ORDERED_STREAM:
            self._streams.acquire(call)

    def _ended(self, call: Call, started: float) -> None:
        code = call.ended_with or grpc.StatusCode.UNKNOWN
        self._observer.called(call.method, code.name, time.perf_counter() - started)


class ConcurrencyLimit:
    """Limits how many calls are open at a time.

    Attributes:
        open: Number of calls that are open.
    """

    def __init__(self, noun: str, limit: int) -> None:
        self._noun = noun
        self._limit = limit
        self.open = 0

    def acquire(self, call: Call) -> None:
        """Admits a call, which counts until it ends.

        Raises:
            OverloadedError: The limit is reached.
        """
        if self.open >= self._limit:
            raise OverloadedError(
                f"{self._limit} {self._noun} are open, which is this server's limit; try again later"
            )
        self.open += 1
        call.add_done_callback(self._release)

    def _release(self) -> None:
        self.open -= 1
