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
from tests.server.http.clients import HOST, INFER, REQUEST, ask
from tests.server.http.scripted import Scripted

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
FILE = base64.b64encode(b"\0\1").decode()
Load = pb.ModelRepositoryParameter
SetTrace, Trace = pb.TraceSettingRequest.SettingValue, pb.TraceSettingResponse.SettingValue
SetLog, Log = pb.LogSettingsRequest.SettingValue, pb.LogSettingsResponse.SettingValue
# Path, body, method and the fields of its message.
REQUESTS: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("/v2/health/live", None, "ServerLive", {}),
    ("/v2/models/a%20b", None, "ModelMetadata", {"name": "a b"}),
    ("/v2/models/m/versions/2", None, "ModelMetadata", {"name": "m", "version": "2"}),
    ("/v2/models/m/ready", None, "ModelReady", {"name": "m"}),
    ("/v2/models/m/versions/2/config", None, "ModelConfig", {"name": "m", "version": "2"}),
    ("/v2/models/stats", None, "ModelStatistics", {}),
    ("/v2/models/m/stats", None, "ModelStatistics", {"name": "m"}),
    ("/v2/repository/index", {"ready": True}, "RepositoryIndex", {"ready": True}),
    ("/v2/repository/r/index", b"", "RepositoryIndex", {"repository_name": "r"}),
    (
        "/v2/repository/r/models/m/load",
        {"parameters": {"config": "{}", "file:1/a": FILE, "n": 3}},
        "RepositoryModelLoad",
        {
            "repository_name": "r",
            "model_name": "m",
            "parameters": {
                "config": Load(string_param="{}"),
                "file:1/a": Load(bytes_param=b"\0\1"),
                "n": Load(int64_param=3),
            },
        },
    ),
    (
        "/v2/repository/models/m/unload",
        {"parameters": {"unload_dependents": True}},
        "RepositoryModelUnload",
        {"model_name": "m", "parameters": {"unload_dependents": Load(bool_param=True)}},
    ),
    (f"{SYSTEM}/region/a/status", None, "SystemSharedMemoryStatus", {"name": "a"}),
    (
        f"{SYSTEM}/region/a/register",
        {"key": "/a", "offset": 8, "byte_size": 2**64 - 1},
        "SystemSharedMemoryRegister",
        {"name": "a", "key": "/a", "offset": 8, "byte_size": 2**64 - 1},
    ),
    (f"{SYSTEM}/region/a/unregister", b"", "SystemSharedMemoryUnregister", {"name": "a"}),
    (
        f"{CUDA}/region/a/register",
        {"raw_handle": {"b64": FILE}, "device_id": 1, "byte_size": 64},
        "CudaSharedMemoryRegister",
        {"name": "a", "raw_handle": b"\0\1", "device_id": 1, "byte_size": 64},
    ),
    (f"{CUDA}/unregister", b"", "CudaSharedMemoryUnregister", {}),
    (
        "/v2/models/m/trace/setting",
        {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9", "trace_file": None},
        "TraceSetting",
        {
            "model_name": "m",
            "settings": {
                "trace_level": SetTrace(value=["TIMESTAMPS", "TENSORS"]),
                "trace_rate": SetTrace(value=["9"]),
                "trace_file": SetTrace(),
            },
        },
    ),
    (
        "/v2/logging",
        {"log_info": True, "log_verbose_level": 2, "log_format": "default"},
        "LogSettings",
        {
            "settings": {
                "log_info": SetLog(bool_param=True),
                "log_verbose_level": SetLog(uint32_param=2),
                "log_format": SetLog(string_param="default"),
            }
        },
    ),
]


@pytest.mark.parametrize(("path", "body", "method", "fields"), REQUESTS)
def test_requests(
    scripted: Scripted, port: int, path: str, body: object, method: str, fields: dict[str, Any]
) -> None:
    answer = ask(port, path, body)
    received = scripted.next()
    assert (received.method, received.request) == (method, getattr(pb, f"{method}Request")(**fields))
    assert answer.status == (400 if method.endswith("Ready") else 200)  # the empty reply is "not ready"


REGION = {"name": "a", "key": "/a", "offset": 8, "byte_size": 64}
STATUS = pb.SystemSharedMemoryStatusResponse.RegionStatus(**REGION)  # type: ignore[arg-type]
INDEX = {"name": "m", "version": "1", "state": "READY", "reason": ""}
STATISTICS = {
    **dict.fromkeys(("inference_count", "execution_count"), 0),
    "name": "m",
    "version": "1",
    "last_inference": 2**53 + 1,
    "inference_stats": {"success": {"count": 2, "ns": 2**63}},
    "batch_stats": [{"batch_size": 4, "compute_infer": {"count": 2, "ns": 2**63}}],
}
# Path, the fields of the reply, and the JSON.
REPLIES: list[tuple[str, Any, str, dict[str, Any], Any]] = [
    ("/v2/health/ready", None, "ServerReady", {"ready": True}, {"ready": True}),
    (
        "/v2/models/m/stats",
        None,
        "ModelStatistics",
        {"model_stats": [STATISTICS]},
        {"model_stats": [STATISTICS]},
    ),
    ("/v2/models/m/config", None, "ModelConfig", {}, {}),
    ("/v2/repository/index", b"", "RepositoryIndex", {"models": [INDEX]}, [INDEX]),
    (f"{SYSTEM}/status", None, "SystemSharedMemoryStatus", {"regions": {"a": STATUS}}, [REGION]),
    (
        "/v2/trace/setting",
        None,
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
]


@pytest.mark.parametrize(("path", "body", "method", "fields", "expected"), REPLIES)
def test_replies(
    scripted: Scripted, port: int, path: str, body: object, method: str, fields: dict[str, Any], expected: Any
) -> None:
    scripted.answer(method, getattr(pb, f"{method}Response")(**fields))
    answer = ask(port, path, body)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    if expected:
        assert answer.json == expected


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
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
        calls = {
            "ModelMetadata": lambda: client.get_model_metadata("m"),
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
            assert scripted.next().method == method


STATUSES = {
    400: ("INVALID_ARGUMENT", "FAILED_PRECONDITION"),
    401: ("UNAUTHENTICATED",),
    403: ("PERMISSION_DENIED",),
    404: ("NOT_FOUND",),
    409: ("ALREADY_EXISTS",),
    429: ("RESOURCE_EXHAUSTED",),
    500: ("INTERNAL", "UNKNOWN"),
    501: ("UNIMPLEMENTED",),
    503: ("UNAVAILABLE",),
    504: ("DEADLINE_EXCEEDED",),
}


@pytest.mark.parametrize(
    ("code", "status"), [(code, status) for status, codes in STATUSES.items() for code in codes]
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
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(6500)
    packed = any_pb2.Any()
    packed.Pack(retry)
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
