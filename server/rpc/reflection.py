"""Server reflection in both of its versions, with the library's servicer."""

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2

from attention_serving.server.rpc.transport.call import Call

SERVICE_NAME: str = reflection.SERVICE_NAME
PACKAGE_V1 = "grpc.reflection.v1"
SERVICE_NAME_V1 = f"{PACKAGE_V1}.ServerReflection"
SERVICE_NAMES = (SERVICE_NAME_V1, SERVICE_NAME)
FILE_V1 = "grpc/reflection/v1/reflection.proto"


class ReflectionService:
    """Lists the services and describes their files."""

    def __init__(self, services: Iterable[str]) -> None:
        _describe_v1(descriptor_pool.Default())  # type: ignore[no-untyped-call]
        self._servicer = reflection.ReflectionServicer(tuple(services))

    def info(
        self,
        request: reflection_pb2.ServerReflectionRequest,
        call: Call,  # noqa: ARG002 - the signature of a handler
    ) -> reflection_pb2.ServerReflectionResponse:
        """Replies to one request of a stream. The messages of both versions are the same on the wire."""
        replies: Any = self._servicer.ServerReflectionInfo(iter((request,)), None)
        return next(replies)


def _describe_v1(pool: Any) -> None:
    """Adds the descriptor of version 1, which the library lacks: that of v1alpha in another package."""
    try:
        pool.FindFileByName(FILE_V1)
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
        file.name, file.package = FILE_V1, PACKAGE_V1
        for field in (field for message in file.message_type for field in message.field):
            if field.type_name:
                field.type_name = _in_v1(field.type_name)
        for method in (method for service in file.service for method in service.method):
            method.input_type, method.output_type = _in_v1(method.input_type), _in_v1(method.output_type)
        pool.Add(file)


def _in_v1(type_name: str) -> str:
    return type_name.replace(".grpc.reflection.v1alpha.", f".{PACKAGE_V1}.")
