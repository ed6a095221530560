"""The Open Inference Protocol: the names, numbers and types that Triton's own client depends on."""

from typing import Any

import pytest

from attention_serving.protos.inference.open_inference_pb2 import DESCRIPTOR
from tests.support import triton
from tests.support.protocol import describe, describe_triton

SERVICE = "GRPCInferenceService"
# Of Triton's configuration and statistics, the server states a part.
PARTIAL = {"ModelConfig", "ModelDynamicBatching", "ModelInput", "ModelOutput", "ModelStatistics"}


OURS = describe(DESCRIPTOR)


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    found: dict[str, Any] = triton.in_another_process(describe_triton)
    return found


@pytest.mark.parametrize("name", OURS["messages"])
def test_a_message_has_triton_s_fields(name: str, theirs: dict[str, Any]) -> None:
    expected, found = theirs["messages"][name], OURS["messages"][name]
    if name in PARTIAL:
        expected = {field: expected[field] for field in found}
    assert found == expected


@pytest.mark.parametrize("name", OURS["enums"])
def test_an_enum_has_triton_s_values(name: str, theirs: dict[str, Any]) -> None:
    assert OURS["enums"][name] == theirs["enums"][name]


def test_the_service_has_triton_s_methods(theirs: dict[str, Any]) -> None:
    assert DESCRIPTOR.services_by_name[SERVICE].full_name == f"inference.{SERVICE}"
    assert OURS["methods"] == theirs["methods"]
