"""A gRPC server in this process, whose answers a test chooses."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attention_client._generated.attention.v1 import attention_pb2 as pb
from attention_client._generated.attention.v1 import attention_pb2_grpc as pb_grpc

Behaviour = Callable[[grpc.ServicerContext], None]


class Service(pb_grpc.AttentionServiceServicer):
    """Returns the query as the context vectors; records each attempt; `before` may abort it.

    Attributes:
        attempts: The metadata of each attempt that arrived.
    """

    def __init__(self, before: Behaviour = lambda _: None) -> None:
        self.attempts: list[dict[str, Any]] = []
        self._before = before

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext):  # noqa: ARG002, N802
        self._begin(context)
        return pb.ListModelsResponse(models=[pb.Model(name="m", version="1", state=pb.Model.STATE_READY)])

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext):  # noqa: N802
        self._begin(context)
        return pb.GetModelResponse(model=pb.Model(name=request.name, version=request.version))

    def Attend(self, request: pb.AttendRequest, context: grpc.ServicerContext):  # noqa: N802
        self._begin(context)
        return pb.AttendResponse(
            model_name=request.model_name, model_version=request.model_version, context_vectors=request.query
        )

    def AttendStream(  # noqa: N802
        self, requests: Iterator[pb.AttendStreamRequest], context: grpc.ServicerContext
    ):
        self._begin(context)
        for item in requests:
            response = pb.AttendResponse(
                model_version=item.request.model_version, context_vectors=item.request.query
            )
            yield pb.AttendStreamResponse(id=item.id, response=response)

    def _begin(self, context: grpc.ServicerContext) -> None:
        self.attempts.append(dict(context.invocation_metadata()))
        self._before(context)


def unavailable(times: int) -> Behaviour:
    """Answers the first attempts with UNAVAILABLE."""
    remaining = iter(range(times))

    def fail(context: grpc.ServicerContext) -> None:
        if next(remaining, None) is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")

    return fail


@contextmanager
def running(
    service: Service,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    credentials: grpc.ServerCredentials | None = None,
    options: list[tuple[str, Any]] | None = None,
) -> Iterator[str]:
    """Serves until the block ends; yields HOST:PORT."""
    checks = health.HealthServicer()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    pb_grpc.add_AttentionServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"{host}:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"{host}:{bound}"
    finally:
        server.stop(None).wait()


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that refuses connections until a server is started on it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC's servers do
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
