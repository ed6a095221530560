"""The gRPC server: services, health, reflection, limits of size and of concurrency."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from protos.attention.v1 import attention_pb2, attention_pb2_grpc
from protos.inference import open_inference_pb2, open_inference_pb2_grpc
from server.engine.engine import Engine
from server.errors import BindError
from server.rpc.attention.service import AttentionService
from server.rpc.completion_queue import CompletionQueueServer
from server.rpc.methods import CallObserver, Methods
from server.rpc.open_inference.service import OpenInferenceService

SERVICES = (
    attention_pb2.DESCRIPTOR.services_by_name["AttentionService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Where to listen and how much to take."""

    host: str
    port: int
    max_message_bytes: int
    max_concurrent_calls: int
    max_streams: int
    stream_window: int
    share_port: bool = False


class RpcServer:
    """The gRPC server, from `bind` over `start` to `stop`.

    `bind` needs no engine, so that a port that is in use is found before models are loaded. Connections
    that clients make between `bind` and `start` wait in the system's queue, and so do their calls, until
    `start` or their deadlines. They fail with UNAVAILABLE or CANCELLED if the server stops without having
    started.
    """

    def __init__(self, options: RpcOptions, observer: CallObserver) -> None:
        self._options = options
        self._health = health.HealthServicer()
        self._serving = False
        self._methods = Methods(
            observer,
            max_calls=options.max_concurrent_calls,
            max_streams=options.max_streams,
            stream_window=options.stream_window,
        )
        self._server = CompletionQueueServer(
            {
                "grpc.max_receive_message_length": options.max_message_bytes,
                "grpc.max_send_message_length": options.max_message_bytes,
                # A second server that nobody wanted is an error, not a silent share of the calls.
                "grpc.so_reuseport": int(options.share_port),
            }
        )

    def _add_services(self, methods: Any, engine: Engine) -> None:
        """Generated code takes `methods` for a `grpc.Server`, of which it uses what Methods has."""
        attention: Any = AttentionService(engine)
        open_inference: Any = OpenInferenceService(engine, self._is_serving)
        names = (*SERVICES, health.SERVICE_NAME, REFLECTION)
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(attention, methods)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, methods)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(_Reflection(names), methods)

    def bind(self) -> int:
        """Binds the address. Returns the port, which the system chooses for port 0.

        Raises:
            BindError: The address is in use, or does not belong to this machine.
        """
        host = self._options.host.strip("[]")
        address = f"[{host}]:{self._options.port}" if ":" in host else f"{host}:{self._options.port}"
        try:
            return self._server.listen(address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error

    def start(self, engine: Engine) -> None:
        """Begins to answer calls, and reports health SERVING. `bind` comes first.

        Args:
            engine: Computes what calls ask for. Its owner closes it after `stop`.
        """
        self._add_services(self._methods, engine)
        self._server.start(accept=self._methods.accept, turn=engine.run_inline)
        self._set_serving(serving=True)

    def stop(self, grace: float) -> float:
        """Reports NOT_SERVING, refuses new calls and waits for those that run.

        May be called before `start`, before `bind`, and more than once.

        Args:
            grace: Seconds that they may take; then they are cancelled.

        Returns:
            Seconds that they took.
        """
        started = time.monotonic()
        self._set_serving(serving=False)
        self._server.stop(grace)
        return time.monotonic() - started

    def _is_serving(self) -> bool:
        return self._serving

    def _set_serving(self, *, serving: bool) -> None:
        self._serving = serving
        for service in ("", *SERVICES):
            self._health.set(service, SERVING if serving else NOT_SERVING)


class _Reflection:
    """The library's servicer, asked for one request at a time."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._servicer = ReflectionServicer(services)

    def ServerReflectionInfo(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """Answers one request of a stream."""
        answers: Iterator[Any] = self._servicer.ServerReflectionInfo(iter((request,)), context)
        return next(answers)
