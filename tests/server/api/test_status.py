"""Every error of a request has a gRPC status."""

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.rpc import status_pb2

from attention_serving.protos.attention.v1.attention_pb2 import AttendStreamResponse
from attention_serving.protos.inference.open_inference_pb2 import ModelStreamInferResponse
from attention_serving.server.api import admission  # noqa: F401 - defines some of the errors
from attention_serving.server.api.attention.handlers import AttendStream
from attention_serving.server.api.errors import UNEXPECTED, code_of, engine_error_of, trailing_metadata
from attention_serving.server.api.open_inference.handlers import ModelStreamInfer
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, OverloadedError
from attention_serving.server.security import web_tokens  # noqa: F401 - and others

# Code and reason of each error, by its name. Clients rely on both.
EXPECTED = {
    "EngineError": ("INTERNAL", "INTERNAL"),
    "RunFailedError": ("INTERNAL", "RUN_FAILED"),
    "InvalidRequestError": ("INVALID_ARGUMENT", "INVALID_FIELD"),
    "LimitExceededError": ("INVALID_ARGUMENT", "LIMIT_EXCEEDED"),
    "ModelNotFoundError": ("NOT_FOUND", "MODEL_NOT_FOUND"),
    "RegionNotFoundError": ("NOT_FOUND", "REGION_NOT_FOUND"),
    "ContextNotFoundError": ("NOT_FOUND", "CONTEXT_NOT_FOUND"),
    "ModelNotReadyError": ("FAILED_PRECONDITION", "MODEL_NOT_READY"),
    "UnsupportedError": ("UNIMPLEMENTED", "UNSUPPORTED"),
    "OverloadedError": ("RESOURCE_EXHAUSTED", "OVERLOADED"),
    "IdentityLimitError": ("RESOURCE_EXHAUSTED", "IDENTITY_LIMIT"),
    "DeadlineExceededError": ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    "ReceiveTimeoutError": ("DEADLINE_EXCEEDED", "RECEIVE_TIMEOUT"),
    "ShuttingDownError": ("UNAVAILABLE", "SHUTTING_DOWN"),
    "IdleStreamError": ("UNAVAILABLE", "STREAM_IDLE"),
    "KeysUnavailableError": ("UNAVAILABLE", "KEYS_UNAVAILABLE"),
    "CredentialsError": ("UNAUTHENTICATED", "CREDENTIALS_INVALID"),
    "MissingCredentialsError": ("UNAUTHENTICATED", "CREDENTIALS_MISSING"),
    "InvalidTokenError": ("UNAUTHENTICATED", "TOKEN_INVALID"),
    "ExpiredTokenError": ("UNAUTHENTICATED", "TOKEN_EXPIRED"),
    "PermissionDeniedError": ("PERMISSION_DENIED", "RIGHT_MISSING"),
}


def subclasses(parent: type[EngineError]) -> Iterator[type[EngineError]]:
    for child in parent.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_has_a_code_and_a_stable_reason() -> None:
    found = {error.__name__: (error.code.name, error.reason) for error in subclasses(EngineError)}
    assert {"EngineError": (EngineError.code.name, EngineError.reason), **found} == EXPECTED


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
    error = kind._with_reply(object.__new__(kind), engine_error_of(ValueError("a secret")), "7")
    answer = reply.FromString(error.reply)
    assert UNEXPECTED in str(answer)
    assert '"7"' in str(answer)
    assert "secret" not in str(answer)
