"""Every route but inference: the message that the gRPC server receives, and the JSON of its reply."""

import base64
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from tritonclient import http as triton

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import HOST, INFER, REQUEST, ask
from tests.server.http.scripted import Scripted

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
LOAD = "/v2/repository/r/models/m/load"
FILE = base64.b64encode(b"\0\1").decode()
TRACES = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9", "trace_file": None}
TRACES_SET = {
    "trace_level": {"value": ["TIMESTAMPS", "TENSORS"]},
    "trace_rate": {"value": ["9"]},
    "trace_file": {},
}
LOGS = {"log_info": True, "log_verbose_level": 2, "log_format": "default"}
LOGS_SET = {
    "log_info": {"bool_param": True},
    "log_verbose_level": {"uint32_param": 2},
    "log_format": {"string_param": "default"},
}
LOADED = {"config": {"string_param": "{}"}, "file:1/a": {"bytes_param": FILE}, "n": {"int64_param": 3}}
UNLOADED = {"model_name": "a", "parameters": {"unload_dependents": {"bool_param": False}}}
# Path, body, method, and its message in protobuf's JSON.
REQUESTS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("/v2/models/a%20b", None, "ModelMetadata", {"name": "a b"}),
    ("/v2/models/m/versions/2/config", None, "ModelConfig", {"name": "m", "version": "2"}),
    ("/v2/models/stats", None, "ModelStatistics", {}),
    ("/v2/repository/r/index", {"ready": True}, "RepositoryIndex", {"repository_name": "r", "ready": True}),
    (
        LOAD,
        {"parameters": {"config": "{}", "file:1/a": FILE, "n": 3}},
        "RepositoryModelLoad",
        {"repository_name": "r", "model_name": "m", "parameters": LOADED},
    ),
    (
        f"{CUDA}/region/a/register",
        {"raw_handle": {"b64": FILE}, "device_id": 1, "byte_size": 64},
        "CudaSharedMemoryRegister",
        {"name": "a", "raw_handle": FILE, "device_id": 1, "byte_size": 64},
    ),
    ("/v2/models/m/trace/setting", TRACES, "TraceSetting", {"model_name": "m", "settings": TRACES_SET}),
    ("/v2/logging", LOGS, "LogSettings", {"settings": LOGS_SET}),
]


@pytest.mark.parametrize(("path", "body", "method", "fields"), REQUESTS)
def test_requests(
    scripted: Scripted, port: int, path: str, body: object, method: str, fields: dict[str, Any]
) -> None:
    answer = ask(port, path, body)
    received = scripted.next()
    expected = json_format.ParseDict(fields, getattr(pb, f"{method}Request")())
    assert (received.method, received.request) == (method, expected)
    assert answer.status == 200


STATISTICS = {
    **dict.fromkeys(("inference_count", "execution_count"), 0),
    "name": "m",
    "version": "1",
    "last_inference": 2**53 + 1,
    "inference_stats": {"success": {"count": 2, "ns": 2**63}},
    "batch_stats": [{"batch_size": 4, "compute_infer": {"count": 2, "ns": 2**63}}],
}
INDEX = {"name": "m", "version": "1", "state": "READY", "reason": ""}
REGION = {"name": "a", "key": "/a", "offset": 8, "byte_size": 64}
TRACES_KEPT = {"settings": {"trace_level": {"value": ["OFF"]}, "trace_rate": {"value": ["9"]}}}
LOGS_KEPT = {"settings": {"a": {"bool_param": False}, "b": {"uint32_param": 0}, "c": {}}}
# Path, method, its reply in protobuf's JSON, and the JSON over HTTP.
REPLIES: list[tuple[str, str, dict[str, Any], Any]] = [
    ("/v2/health/ready", "ServerReady", {"ready": True}, {"ready": True}),
    ("/v2/models/m/stats", "ModelStatistics", {"model_stats": [STATISTICS]}, {"model_stats": [STATISTICS]}),
    (f"{SYSTEM}/status", "SystemSharedMemoryStatus", {"regions": {"a": REGION}}, [REGION]),
    ("/v2/trace/setting", "TraceSetting", TRACES_KEPT, {"trace_level": ["OFF"], "trace_rate": "9"}),
    ("/v2/logging", "LogSettings", LOGS_KEPT, {"a": False, "b": 0, "c": None}),
    ("/v2/repository/index", "RepositoryIndex", {"models": [INDEX]}, [INDEX]),
]


@pytest.mark.parametrize(("path", "method", "fields", "expected"), REPLIES)
def test_replies(
    scripted: Scripted, port: int, path: str, method: str, fields: dict[str, Any], expected: Any
) -> None:
    scripted.answer(method, json_format.ParseDict(fields, getattr(pb, f"{method}Response")()))
    answer = ask(port, path, {} if method == "RepositoryIndex" else None)
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v2/repository/index", {"ready": 1}, "ready: must be true or false"),
        ("/v2/repository/models/m/load", {"parameters": {"a": 1.5}}, "parameters[a]: must be a value of the"),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:a": "?"}},
            "parameters[file:a]: is not base64",
        ),
        (f"{CUDA}/region/a/register", {"raw_handle": {}}, "raw_handle.b64: is required"),
        ("/v2/trace/setting", {"a": [1]}, "a: must be a string, or at most 256 strings"),
        ("/v2/trace/setting", {"a": ["x"] * 257}, "a: must be a string, or at most 256 strings"),
        ("/v2/logging", {"a": 2**32}, "a: must be a value of the type bool or uint32 or string"),
        ("/v2/logging", {"a": []}, "a: must be a value of the type bool or uint32 or string"),
    ],
)
def test_wrong_bodies(scripted: Scripted, port: int, path: str, body: object, error: str) -> None:
    answer = ask(port, path, body)
    assert answer.status == 400
    assert answer.error.startswith(error)
    assert scripted.calls.empty()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("DELETE", "/v2/logging", 405, "the method is DELETE; must be GET, HEAD, POST"),
        ("POST", "/v2", 405, "must be GET, HEAD"),
        ("GET", "/", 404, "there is no such path"),
        ("GET", "/v2/models", 404, "there is no such path"),
        ("GET", "/explore", 404, "there is no such path"),  # off unless a setting switches it on
    ],
)
def test_paths_and_verbs_that_are_not_there(
    port: int, method: str, path: str, status: int, error: str
) -> None:
    answer = ask(port, path, {} if method == "POST" else None, method=method)
    assert answer.status == status
    assert error in answer.error
    assert ("allow" in answer.headers) is (status == 405)


@pytest.mark.usefixtures("scripted")
def test_a_head_has_no_body(port: int) -> None:
    answer = ask(port, "/v2/health/live", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(b'{"live":false}'))


def test_tritonclient_calls_every_method(scripted: Scripted, port: int) -> None:
    named, region = {"name": "a"}, {"name": "a", "key": "/a", "byte_size": 64}
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
        calls: list[tuple[str, dict[str, Any], Callable[[], object]]] = [
            ("ServerLive", {}, client.is_server_live),
            ("ModelReady", named, lambda: client.is_model_ready("a")),
            ("ModelMetadata", named, lambda: client.get_model_metadata("a")),
            ("RepositoryModelUnload", UNLOADED, lambda: client.unload_model("a")),
            ("ModelStatistics", named, lambda: client.get_inference_statistics("a")),
            ("SystemSharedMemoryStatus", named, lambda: client.get_system_shared_memory_status("a")),
            (
                "SystemSharedMemoryRegister",
                region,
                lambda: client.register_system_shared_memory("a", "/a", 64),
            ),
            ("SystemSharedMemoryUnregister", {}, client.unregister_system_shared_memory),
            ("CudaSharedMemoryStatus", {}, client.get_cuda_shared_memory_status),
            ("CudaSharedMemoryUnregister", named, lambda: client.unregister_cuda_shared_memory("a")),
        ]
        for method, fields, call in calls:
            call()
            received = scripted.next()
            assert received.method == method
            assert received.request == json_format.ParseDict(fields, type(received.request)())


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("FAILED_PRECONDITION", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("UNKNOWN", 500),
        ("UNIMPLEMENTED", 501),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
    ],
)
def test_statuses(scripted: Scripted, port: int, code: str, status: int) -> None:
    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.abort(grpc.StatusCode[code], "what went wrong: ä")

    scripted.behaviours["ModelInfer"] = fail
    answer = ask(port, INFER, REQUEST)
    assert (answer.status, answer.error) == (status, "what went wrong: ä")
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_retry_info_becomes_retry_after(scripted: Scripted, port: int) -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 6, "nanos": 500_000_000}))
    status = status_pb2.Status(code=8, message="busy", details=[packed])

    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    scripted.behaviours["ServerMetadata"] = fail
    answer = ask(port, "/v2")
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")


def test_rights_and_traces_are_passed_on_and_no_other_headers(scripted: Scripted, port: int) -> None:
    passed = {"authorization": "Bearer t", "traceparent": "00-ab-cd-01"}
    ask(port, "/v2", None, {**passed, "Cookie": "c", "X-Forwarded-For": "x"})
    metadata = scripted.next().metadata
    assert passed.items() <= metadata.items()
    assert not {"cookie", "x-forwarded-for", "attention-client"} & metadata.keys()


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("token", "status", "error"),
    [
        # To repeat the request would not help, which 429 would say.
        ("x" * 7600, 431, "the headers that are passed on take 77"),
        ("\xe4", 400, "authorization: contains characters other than printable ASCII"),
        ("a\tb", 400, "authorization: contains characters other than printable ASCII"),
    ],
    ids=["large", "latin", "tab"],
)
def test_a_token_that_metadata_cannot_carry(port: int, token: str, status: int, error: str) -> None:
    answer = ask(port, INFER, REQUEST, {"Authorization": f"Bearer {token}"})
    assert answer.status == status
    assert answer.error.startswith(error)
    assert "retry-after" not in answer.headers
