"""Server reflection, with the library's servicer."""

from collections.abc import Iterable
from typing import Any

from grpc_reflection.v1alpha import reflection, reflection_pb2

from server.rpc.transport.seam import Call

SERVICE_NAME: str = reflection.SERVICE_NAME
# The messages of version 1 are the same on the wire. The library has no descriptor of it.
SERVICE_NAME_V1 = "grpc.reflection.v1.ServerReflection"


class ReflectionService:
    """Lists the services and describes their files."""

    def __init__(self, services: Iterable[str]) -> None:
        self._servicer = reflection.ReflectionServicer(tuple(services))

    def info(
        self,
        request: reflection_pb2.ServerReflectionRequest,
        call: Call,  # noqa: ARG002 - as of a handler
    ) -> reflection_pb2.ServerReflectionResponse:
        """Replies to one request of a stream."""
        replies: Any = self._servicer.ServerReflectionInfo(iter((request,)), None)
        return next(replies)
