"""The gRPC server: services, health, reflection, limits of size and of concurrency."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.attention.v1 import attention_pb2, attention_pb2_grpc
from protos.inference import open_inference_pb2, open_inference_pb2_grpc
from server.engine.engine import Engine
from server.errors import BindError
from server.rpc.attention_service import AttentionService
from server.rpc.interceptor import CallInterceptor, CallObserver
from server.rpc.open_inference_service import OpenInferenceService

SERVICES = (
    attention_pb2.DESCRIPTOR.services_by_name["AttentionService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SPARE_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class RpcOptions:
    """Where to listen and how much to take."""

    host: str
    port: int
    max_message_bytes: int
    max_concurrent_calls: int
    max_streams: int
    stream_window: int


class RpcServer:
    """Listens from `start` to `stop`."""

    def __init__(self, engine: Engine, options: RpcOptions, observer: CallObserver) -> None:
        self._options = options
        self._health = health.HealthServicer()
        self._serving = False
        self._server = grpc.server(
            # More threads than calls that may be held: refusals and health checks need them too.
            ThreadPoolExecutor(options.max_concurrent_calls + SPARE_THREADS, thread_name_prefix="call"),
            interceptors=[CallInterceptor(observer, options.max_concurrent_calls)],
            options=[
                ("grpc.max_receive_message_length", options.max_message_bytes),
                ("grpc.max_send_message_length", options.max_message_bytes),
                # A second server on the port is an error, not a silent share of the calls.
                ("grpc.so_reuseport", 0),
            ],
        )
        attention = AttentionService(
            engine, max_streams=options.max_streams, stream_window=options.stream_window
        )
        open_inference = OpenInferenceService(engine, self._is_serving)
        attention_pb2_grpc.add_AttentionServiceServicer_to_server(attention, self._server)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def start(self) -> int:
        """Listens and reports health SERVING. Returns the port, which the system chooses for port 0.

        Raises:
            BindError: The address is taken or is none of this machine's.
        """
        host = self._options.host.strip("[]")
        address = f"[{host}]:{self._options.port}" if ":" in host else f"{host}:{self._options.port}"
        try:
            port: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise BindError(f"cannot listen on {address}: {error}") from error
        self._server.start()
        self._set_serving(serving=True)
        return port

    def stop(self, grace: float) -> float:
        """Reports NOT_SERVING, refuses new calls and waits for those that run.

        Args:
            grace: Seconds that they may take; then they are cancelled.

        Returns:
            Seconds that they took.
        """
        started = time.monotonic()
        self._set_serving(serving=False)
        self._server.stop(grace).wait()
        return time.monotonic() - started

    def _is_serving(self) -> bool:
        return self._serving

    def _set_serving(self, *, serving: bool) -> None:
        self._serving = serving
        for service in ("", *SERVICES):
            self._health.set(service, SERVING if serving else NOT_SERVING)
