"""The Open Inference Protocol: the names, numbers and types that Triton's own client depends on."""

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from tests.support import triton

# Of Triton's configuration and statistics, the server states a part.
# A field of the Open Inference Protocol that Triton lacks, and the message of its entries.
PROPERTIES = 6
MAP_ENTRY = {"key": (1, 9, 1, ""), "value": (2, 9, 1, "")}
PARTIAL = {"ModelConfig", "ModelDynamicBatching", "ModelInput", "ModelOutput", "ModelStatistics"}


def fields(messages: Iterable[DescriptorProto], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each message with its fields by name, and those within it."""
    for message in messages:
        found = {each.name: (each.number, each.type, each.label, each.type_name) for each in message.field}
        yield prefix + message.name, found
        yield from fields(message.nested_type, f"{prefix}{message.name}.")


def test_the_protocol_is_triton_s() -> None:
    ours = FileDescriptorProto.FromString(DESCRIPTOR.serialized_pb)
    files = triton.in_another_process(triton.protocol_files)
    theirs = [FileDescriptorProto.FromString(each) for each in files]
    known = dict(fields(message for file in theirs for message in file.message_type))
    for name, found in fields(ours.message_type):
        if name == "ModelMetadataResponse":
            assert found.pop("properties")[0] == PROPERTIES
        expected = known.get(name, MAP_ENTRY)
        assert found == ({field: expected[field] for field in found} if name in PARTIAL else expected), name
    enums = {enum.name: enum.value for file in theirs for enum in file.enum_type}
    assert all(enum.value == enums[enum.name] for enum in ours.enum_type)
    (service,), (its,) = ours.service, theirs[0].service
    assert (ours.package, service.name) == (theirs[0].package, its.name)
    methods = {method.name: method for method in its.method}
    assert methods == {method.name: method for method in service.method}
