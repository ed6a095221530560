"""The Open Inference Protocol: the names, numbers and types that Triton's own client depends on."""

from typing import Any

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from tests.support import triton
from tests.support.protocol import describe, describe_triton

SERVICE = "GRPCInferenceService"
# Of Triton's configuration and statistics, the server states a part.
PARTIAL = {"ModelConfig", "ModelDynamicBatching", "ModelInput", "ModelOutput", "ModelStatistics"}


OURS = describe(DESCRIPTOR)


def test_the_protocol_is_triton_s() -> None:
    theirs: dict[str, Any] = triton.in_another_process(describe_triton)
    expected = {
        name: {field: fields[field] for field in OURS["messages"][name]} if name in PARTIAL else fields
        for name, fields in theirs["messages"].items()
        if name in OURS["messages"]
    }
    assert OURS["messages"] == expected
    assert OURS["enums"] == {name: theirs["enums"][name] for name in OURS["enums"]}
    assert DESCRIPTOR.services_by_name[SERVICE].full_name == f"inference.{SERVICE}"
    assert OURS["methods"] == theirs["methods"]
