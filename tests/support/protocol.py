"""Describes a protocol by its descriptors. Does not import the protocol of this repository."""

from typing import Any

from google.protobuf.descriptor import Descriptor, FileDescriptor


def describe(*files: FileDescriptor) -> dict[str, Any]:
    """The messages, enums and methods of a protocol."""
    described: dict[str, Any] = {"messages": {}, "enums": {}, "methods": {}}
    for file in files:
        for name, message in file.message_types_by_name.items():
            described["messages"] |= dict(_messages(name, message))
        for name, enum in file.enum_types_by_name.items():
            described["enums"][name] = {value.name: value.number for value in enum.values}
        for service in file.services_by_name.values():
            for method in service.methods:
                described["methods"][method.name] = (
                    method.input_type.full_name,
                    method.output_type.full_name,
                    method.client_streaming,
                    method.server_streaming,
                )
    return described


def describe_triton() -> dict[str, Any]:
    """The same of Triton's client. Runs where no other copy of the protocol is."""
    from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: PLC0415

    return describe(service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)


def _messages(name: str, message: Descriptor) -> list[tuple[str, dict[str, Any]]]:
    fields = {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.message_type.full_name if field.message_type else "",
            field.containing_oneof.name if field.containing_oneof else "",
        )
        for field in message.fields
    }
    inner = [part for nested in message.nested_types for part in _messages(f"{name}.{nested.name}", nested)]
    return [(name, fields), *inner]
