"""Around every call: it takes a place, its error becomes a status, and it is counted and timed."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import grpc
from grpc_status import rpc_status

from server.engine.errors import EngineError, OverloadedError
from server.rpc.status import UNEXPECTED, code_of, status_of

log = logging.getLogger(__name__)
# In quotes: the stubs make the class generic, the library does not.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class CallObserver(Protocol):
    """Told of every call that ended."""

    def called(self, method: str, code: str, seconds: float) -> None:
        """One call ended with a status code."""


class CallInterceptor(grpc.ServerInterceptor):
    """Wraps the handlers of every service."""

    def __init__(self, observer: CallObserver, max_calls: int) -> None:
        self._observer = observer
        self._max_calls = max_calls
        self._free = threading.Semaphore(max_calls)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wraps the handler of one call; unary and bidirectional calls are those that services here have.

        gRPC's own services pass: a server that is busy is healthy.
        """
        handler = continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        coders = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), *coders)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(method, handler.stream_stream), *coders)
        return handler

    def _unary(self, method: str, behavior: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            with self._around(method, context):
                return behavior(request, context)

        return call

    def _stream(self, method: str, behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._around(method, context):
                yield from behavior(requests, context)

        return call

    @contextmanager
    def _around(self, method: str, context: grpc.ServicerContext) -> Iterator[None]:
        started = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            with self._slot():
                yield
        except EngineError as error:
            code = code_of(error)
            context.abort_with_status(rpc_status.to_status(status_of(error)))
        except GeneratorExit:  # the caller left a stream
            code = grpc.StatusCode.CANCELLED
            raise
        except CancelledError:  # the caller left
            code = grpc.StatusCode.CANCELLED
            context.abort(code, "the caller left")
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("call failed", extra={"method": method})
            context.abort(code, UNEXPECTED)
        finally:
            self._observer.called(method, code.name, time.perf_counter() - started)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if not self._free.acquire(blocking=False):
            raise OverloadedError(f"{self._max_calls} calls are held, which is the limit; try again later")
        try:
            yield
        finally:
            self._free.release()
