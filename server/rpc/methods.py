"""Which method a call is for; that it takes a place; and that it is counted and timed."""

import threading
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import grpc

from server.engine.errors import OverloadedError
from server.rpc.calls import Method, end_with
from server.rpc.completion_queue import Call
from server.rpc.streams import News, OrderedStream
from server.rpc.unary import UnaryCall


class CallObserver(Protocol):
    """Told of every call that ended."""

    def called(self, method: str, code: str, seconds: float) -> None:
        """One call ended with a status code."""


class Kind(Enum):
    """How many requests and answers a call has."""

    UNARY = "one of each"
    STREAM = "an answer for each request"
    NEWS = "one request, answers as news comes"


class Methods:
    """The methods of every service. Generated code adds services to it as to a `grpc.Server`."""

    def __init__(
        self,
        observer: CallObserver,
        *,
        max_calls: int,
        max_streams: int,
        stream_window: int,
    ) -> None:
        self._observer = observer
        self._window = stream_window
        self._methods: dict[str, tuple[Kind, Method]] = {}
        self._calls = _Places("calls are held", max_calls)
        self._streams = _Places("streams are open", max_streams)

    def add_generic_rpc_handlers(self, handlers: Sequence[object]) -> None:
        """Part of what generated code calls; the next method has them by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds the methods of a service."""
        for name, handler in handlers.items():
            self._methods[f"/{service}/{name}"] = _method(handler)

    def accept(self, call: Call) -> None:
        """Carries a new call out, or refuses it."""
        found = self._methods.get(call.method)
        if found is None:
            call.finish(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
            return
        kind, method = found
        # gRPC's own services pass: a server that is busy is healthy.
        if not call.method.startswith("/grpc."):
            self._observe(call)
            try:
                self._take_places(call, kind)
            except OverloadedError as error:
                end_with(call, error)
                return
        match kind:
            case Kind.UNARY:
                UnaryCall(call, method)
            case Kind.STREAM:
                OrderedStream(call, method, self._window)
            case Kind.NEWS:
                News(call, method)

    def _take_places(self, call: Call, kind: Kind) -> None:
        self._calls.take(call)
        if kind is Kind.STREAM:
            self._streams.take(call)

    def _observe(self, call: Call) -> None:
        started = time.perf_counter()

        def ended() -> None:
            code = call.ended_with or grpc.StatusCode.UNKNOWN
            self._observer.called(call.method, code.name, time.perf_counter() - started)

        call.add_callback(ended)


def _method(handler: Any) -> tuple[Kind, Method]:
    """What generated code makes of a service's method."""
    if handler.unary_unary:
        kind, behavior = Kind.UNARY, handler.unary_unary
    elif handler.stream_stream:
        kind, behavior = Kind.STREAM, handler.stream_stream
    else:
        kind, behavior = Kind.NEWS, handler.unary_stream
    read = getattr(behavior, "read", handler.request_deserializer)
    return kind, Method(behavior, read, handler.response_serializer)


class _Places:
    """How many calls there may be at a time."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._free = limit
        self._lock = threading.Lock()

    def take(self, call: Call) -> None:
        """Takes a place until the call ends.

        Raises:
            OverloadedError: None is left.
        """
        with self._lock:
            if not self._free:
                raise OverloadedError(f"{self._limit} {self._what}, which is the limit; try again later")
            self._free -= 1
        call.add_callback(self._release)

    def _release(self) -> None:
        with self._lock:
            self._free += 1
