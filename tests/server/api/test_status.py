"""Errors of requests as a status of gRPC. tests/test_operations_page.py has all codes and reasons."""

from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.rpc import status_pb2

from attention_serving.protos.attention.v1.attention_pb2 import AttendStreamResponse
from attention_serving.protos.inference.open_inference_pb2 import ModelStreamInferResponse
from attention_serving.server.api.attention.handlers import AttendStream
from attention_serving.server.api.errors import UNEXPECTED, code_of, log_and_wrap_error, trailing_metadata
from attention_serving.server.api.open_inference.handlers import ModelStreamInfer
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, OverloadedError


@pytest.mark.parametrize(
    ("error", "details"),
    [
        (EngineError("m"), {}),
        (InvalidRequestError("key", "m"), {"fieldViolations": [{"field": "key", "description": "key: m"}]}),
        (EngineError("m", field="f"), {"fieldViolations": [{"field": "f", "description": "m"}]}),
        (OverloadedError("full", retry_after=1.25), {"retryDelay": "1.250s"}),
    ],
    ids=["no field", "field", "field beside the message", "retry"],
)
def test_an_error_becomes_a_status_with_its_details(error: EngineError, details: dict[str, Any]) -> None:
    ((_, value),) = trailing_metadata(error)
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (code_of(error).value[0], error.message)
    found: dict[str, Any] = {}
    for detail in status.details:
        found |= MessageToDict(detail)
    assert found.pop("@type").startswith("type.googleapis.com/google.rpc.")
    assert found == {"reason": error.reason, "domain": "attention.v1", **details}


@pytest.mark.parametrize(
    ("kind", "reply"), [(AttendStream, AttendStreamResponse), (ModelStreamInfer, ModelStreamInferResponse)]
)
def test_an_unexpected_error_in_a_stream_reveals_no_details(kind: type[Any], reply: type[Any]) -> None:
    error = kind._with_reply(object.__new__(kind), log_and_wrap_error(ValueError("a secret")), "7")
    answer = reply.FromString(error.reply)
    assert UNEXPECTED in str(answer)
    assert '"7"' in str(answer)
    assert "secret" not in str(answer)
