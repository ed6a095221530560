"""Every route but inference: the message that the gRPC server receives, and the JSON of its reply."""

import base64
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from tritonclient import http as triton

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import HOST, ask, tensor
from tests.server.http.scripted import Scripted
from tests.server.http.test_inference import QUERY

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
FILE = base64.b64encode(b"\0\1").decode()
LOADED = {"parameters": {"config": "{}", "file:1/a": FILE, "n": 3}}
LOADED_MESSAGE = {
    "config": pb.ModelRepositoryParameter(string_param="{}"),
    "file:1/a": pb.ModelRepositoryParameter(bytes_param=b"\0\1"),
    "n": pb.ModelRepositoryParameter(int64_param=3),
}
UNLOADED = {"unload_dependents": pb.ModelRepositoryParameter(bool_param=True)}
TRACES = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9", "trace_file": None}
TRACES_MESSAGE = {"trace_level": {"value": ["TIMESTAMPS", "TENSORS"]}, "trace_rate": {"value": ["9"]}}
LOGS = {"log_info": True, "log_verbose_level": 2, "log_format": "default"}
LOGS_MESSAGE = {
    "log_info": pb.LogSettingsRequest.SettingValue(bool_param=True),
    "log_verbose_level": pb.LogSettingsRequest.SettingValue(uint32_param=2),
    "log_format": pb.LogSettingsRequest.SettingValue(string_param="default"),
}
# Path, body, method and the fields of its message.
REQUESTS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("/v2/health/live", None, "ServerLive", {}),
    ("/v2/health/ready", None, "ServerReady", {}),
    ("/v2", None, "ServerMetadata", {}),
    ("/v2/models/m", None, "ModelMetadata", {"name": "m"}),
    ("/v2/models/a%20b", None, "ModelMetadata", {"name": "a b"}),
    ("/v2/models/m/versions/2", None, "ModelMetadata", {"name": "m", "version": "2"}),
    ("/v2/models/m/ready", None, "ModelReady", {"name": "m"}),
    ("/v2/models/m/versions/2/ready", None, "ModelReady", {"name": "m", "version": "2"}),
    ("/v2/models/m/versions/2/config", None, "ModelConfig", {"name": "m", "version": "2"}),
    ("/v2/models/stats", None, "ModelStatistics", {}),
    ("/v2/models/m/stats", None, "ModelStatistics", {"name": "m"}),
    ("/v2/models/m/versions/2/stats", None, "ModelStatistics", {"name": "m", "version": "2"}),
    ("/v2/repository/index", b"", "RepositoryIndex", {}),
    ("/v2/repository/index", {"ready": True}, "RepositoryIndex", {"ready": True}),
    ("/v2/repository/r/index", {}, "RepositoryIndex", {"repository_name": "r"}),
    ("/v2/repository/models/m/load", b"", "RepositoryModelLoad", {"model_name": "m"}),
    (
        "/v2/repository/r/models/m/load",
        LOADED,
        "RepositoryModelLoad",
        {"repository_name": "r", "model_name": "m", "parameters": LOADED_MESSAGE},
    ),
    (
        "/v2/repository/models/m/unload",
        {"parameters": {"unload_dependents": True}},
        "RepositoryModelUnload",
        {"model_name": "m", "parameters": UNLOADED},
    ),
    (f"{SYSTEM}/status", None, "SystemSharedMemoryStatus", {}),
    (f"{SYSTEM}/region/a/status", None, "SystemSharedMemoryStatus", {"name": "a"}),
    (
        f"{SYSTEM}/region/a/register",
        {"key": "/a", "offset": 8, "byte_size": 2**64 - 1},
        "SystemSharedMemoryRegister",
        {"name": "a", "key": "/a", "offset": 8, "byte_size": 2**64 - 1},
    ),
    (f"{SYSTEM}/region/a/unregister", b"", "SystemSharedMemoryUnregister", {"name": "a"}),
    (f"{SYSTEM}/unregister", b"", "SystemSharedMemoryUnregister", {}),
    (f"{CUDA}/status", None, "CudaSharedMemoryStatus", {}),
    (
        f"{CUDA}/region/a/register",
        {"raw_handle": {"b64": FILE}, "device_id": 1, "byte_size": 64},
        "CudaSharedMemoryRegister",
        {"name": "a", "raw_handle": b"\0\1", "device_id": 1, "byte_size": 64},
    ),
    (f"{CUDA}/unregister", b"", "CudaSharedMemoryUnregister", {}),
    ("/v2/trace/setting", None, "TraceSetting", {}),
    (
        "/v2/models/m/trace/setting",
        TRACES,
        "TraceSetting",
        {"model_name": "m", "settings": {**TRACES_MESSAGE, "trace_file": {}}},
    ),
    ("/v2/logging", None, "LogSettings", {}),
    ("/v2/logging", LOGS, "LogSettings", {"settings": LOGS_MESSAGE}),
]


@pytest.mark.parametrize(("path", "body", "method", "fields"), REQUESTS)
def test_requests(
    server: Scripted, front_port: int, path: str, body: object, method: str, fields: dict[str, Any]
) -> None:
    if method == "TraceSetting":
        values = fields.get("settings", {})
        made = {name: pb.TraceSettingRequest.SettingValue(**value) for name, value in values.items()}
        fields = {**fields, "settings": made}
    answer = ask(front_port, path, body)
    received = server.next()
    assert (received.method, received.request) == (method, getattr(pb, f"{method}Request")(**fields))
    assert answer.status == (400 if method.endswith("Ready") else 200)  # the empty reply is "not ready"


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v2/repository/index", {"ready": 1}, "ready: must be true or false"),
        ("/v2/repository/index", [], "body: must be an object"),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"a": 1.5}},
            "parameters[a]: must be a value of the type",
        ),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:a": "?"}},
            "parameters[file:a]: is not base64",
        ),
        (f"{SYSTEM}/region/a/register", {}, "key: is required"),
        (
            f"{SYSTEM}/region/a/register",
            {"key": "/a", "byte_size": -1},
            "byte_size: is -1; must be greater than or equal to 0",
        ),
        (f"{CUDA}/region/a/register", {"raw_handle": {}}, "raw_handle.b64: is required"),
        ("/v2/trace/setting", {"a": [1]}, "a: must be a string"),
        ("/v2/logging", {"a": 2**32}, "a: must be a value of the type bool or uint32 or string"),
        ("/v2/logging", {"a": []}, "a: must be a value of the type bool or uint32 or string"),
    ],
)
def test_wrong_bodies(server: Scripted, front_port: int, path: str, body: object, error: str) -> None:
    answer = ask(front_port, path, body)
    assert answer.status == 400
    assert answer.error.startswith(error)
    assert server.calls.empty()


def test_tritonclient_calls_every_method(server: Scripted, front_port: int) -> None:
    with triton.InferenceServerClient(f"{HOST}:{front_port}") as client:
        calls = {
            "RepositoryIndex": client.get_model_repository_index,
            "RepositoryModelLoad": lambda: client.load_model("m", config="{}"),
            "RepositoryModelUnload": lambda: client.unload_model("m"),
            "ModelStatistics": lambda: client.get_inference_statistics("m", "1"),
            "TraceSetting": lambda: client.update_trace_settings("m", {"trace_level": ["OFF"]}),
            "LogSettings": lambda: client.update_log_settings({"log_info": True}),
            "SystemSharedMemoryStatus": lambda: client.get_system_shared_memory_status("a"),
            "SystemSharedMemoryRegister": lambda: client.register_system_shared_memory("a", "/a", 64),
            "SystemSharedMemoryUnregister": client.unregister_system_shared_memory,
            "CudaSharedMemoryStatus": client.get_cuda_shared_memory_status,
            "CudaSharedMemoryUnregister": lambda: client.unregister_cuda_shared_memory("a"),
        }
        for method, call in calls.items():
            call()
            assert server.next().method == method


Trace, Log = pb.TraceSettingResponse.SettingValue, pb.LogSettingsResponse.SettingValue
DURATION = {"count": 2, "ns": 2**63}
STATISTICS = {
    **dict.fromkeys(("inference_count", "execution_count"), 0),
    "name": "m",
    "version": "1",
    "last_inference": 2**53 + 1,
    "inference_stats": {"success": DURATION},
    "batch_stats": [{"batch_size": 4, "compute_infer": DURATION}],
}
MODEL_STATISTICS = {"model_stats": [STATISTICS]}
INDEX = {"name": "m", "version": "1", "state": "READY", "reason": ""}
REGION = {"name": "a", "key": "/a", "offset": 8, "byte_size": 64}
CUDA_REGION = {"name": "a", "device_id": 1, "byte_size": 64}
SYSTEM_STATUS = pb.SystemSharedMemoryStatusResponse.RegionStatus(**REGION)  # type: ignore[arg-type]
CUDA_STATUS = pb.CudaSharedMemoryStatusResponse.RegionStatus(**CUDA_REGION)  # type: ignore[arg-type]
SERVER = {"name": "s", "version": "1", "extensions": ["a"]}
# Path, body, method, the fields of its reply, and the JSON.
REPLIES: list[tuple[str, Any, str, dict[str, Any], Any]] = [
    ("/v2/health/ready", None, "ServerReady", {"ready": True}, {"ready": True}),
    ("/v2", None, "ServerMetadata", SERVER, SERVER),
    ("/v2/models/m/stats", None, "ModelStatistics", MODEL_STATISTICS, MODEL_STATISTICS),
    ("/v2/repository/index", b"", "RepositoryIndex", {"models": [INDEX]}, [INDEX]),
    (f"{SYSTEM}/status", None, "SystemSharedMemoryStatus", {"regions": {"a": SYSTEM_STATUS}}, [REGION]),
    (f"{CUDA}/status", None, "CudaSharedMemoryStatus", {"regions": {"a": CUDA_STATUS}}, [CUDA_REGION]),
    (
        "/v2/trace/setting",
        {"trace_rate": "9"},
        "TraceSetting",
        {"settings": {"trace_level": Trace(value=["OFF"]), "trace_rate": Trace(value=["9"])}},
        {"trace_level": ["OFF"], "trace_rate": "9"},
    ),
    (
        "/v2/logging",
        None,
        "LogSettings",
        {"settings": {"a": Log(bool_param=False), "b": Log(uint32_param=0), "c": Log()}},
        {"a": False, "b": 0, "c": None},
    ),
    ("/v2/repository/models/m/load", b"", "RepositoryModelLoad", {}, {}),
]


@pytest.mark.parametrize(("path", "body", "method", "fields", "expected"), REPLIES)
def test_replies(
    server: Scripted,
    front_port: int,
    path: str,
    body: object,
    method: str,
    fields: dict[str, Any],
    expected: Any,
) -> None:
    server.behaviours[method] = lambda _request, _context: getattr(pb, f"{method}Response")(**fields)
    answer = ask(front_port, path, body)
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


STATUSES = {
    400: ("INVALID_ARGUMENT", "FAILED_PRECONDITION"),
    401: ("UNAUTHENTICATED",),
    403: ("PERMISSION_DENIED",),
    404: ("NOT_FOUND",),
    409: ("ALREADY_EXISTS",),
    429: ("RESOURCE_EXHAUSTED",),
    500: ("INTERNAL", "UNKNOWN", "DATA_LOSS"),
    501: ("UNIMPLEMENTED",),
    503: ("UNAVAILABLE",),
    504: ("DEADLINE_EXCEEDED",),
}


@pytest.mark.parametrize(
    ("code", "status"), [(code, status) for status, codes in STATUSES.items() for code in codes]
)
@pytest.mark.parametrize("path", ["/v2", "/v2/models/m/infer"])
def test_statuses(server: Scripted, front_port: int, path: str, code: str, status: int) -> None:
    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.abort(grpc.StatusCode[code], "what went wrong: ä")

    server.behaviours |= {"ServerMetadata": fail, "ModelInfer": fail}
    answer = ask(front_port, path, None if path == "/v2" else {"inputs": [tensor("query", QUERY)]})
    assert (answer.status, answer.error) == (status, "what went wrong: ä")
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_retry_info_becomes_retry_after(server: Scripted, front_port: int) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(6500)
    packed = any_pb2.Any()
    packed.Pack(retry)
    status = status_pb2.Status(code=8, message="busy", details=[packed])

    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    server.behaviours["ServerMetadata"] = fail
    answer = ask(front_port, "/v2")
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")


def test_rights_and_traces_are_passed_on_and_no_other_headers(server: Scripted, front_port: int) -> None:
    passed = {"authorization": "Bearer t", "traceparent": "00-ab-cd-01"}
    ask(front_port, "/v2", None, {**passed, "Cookie": "c", "X-Forwarded-For": "x"})
    metadata = server.next().metadata
    assert passed.items() <= metadata.items()
    assert not {"cookie", "x-forwarded-for"} & metadata.keys()
