"""Every route but inference: the message that the gRPC server receives."""

import base64

import pytest
from google.protobuf.message import Message
from tritonclient import http as triton

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import HOST, ask
from tests.server.http.scripted import Scripted

Repository = pb.ModelRepositoryParameter
Trace, Log = pb.TraceSettingRequest.SettingValue, pb.LogSettingsRequest.SettingValue


@pytest.mark.parametrize(
    ("path", "body", "method", "request_message"),
    [
        ("/v2/health/live", None, "ServerLive", pb.ServerLiveRequest()),
        ("/v2/health/ready", None, "ServerReady", pb.ServerReadyRequest()),
        ("/v2", None, "ServerMetadata", pb.ServerMetadataRequest()),
        ("/v2/models/m", None, "ModelMetadata", pb.ModelMetadataRequest(name="m")),
        ("/v2/models/a%20b", None, "ModelMetadata", pb.ModelMetadataRequest(name="a b")),
        ("/v2/models/m/versions/2", None, "ModelMetadata", pb.ModelMetadataRequest(name="m", version="2")),
        ("/v2/models/m/ready", None, "ModelReady", pb.ModelReadyRequest(name="m")),
        ("/v2/models/m/versions/2/ready", None, "ModelReady", pb.ModelReadyRequest(name="m", version="2")),
        ("/v2/models/m/versions/2/config", None, "ModelConfig", pb.ModelConfigRequest(name="m", version="2")),
        ("/v2/models/stats", None, "ModelStatistics", pb.ModelStatisticsRequest()),
        ("/v2/models/m/stats", None, "ModelStatistics", pb.ModelStatisticsRequest(name="m")),
        (
            "/v2/models/m/versions/2/stats",
            None,
            "ModelStatistics",
            pb.ModelStatisticsRequest(name="m", version="2"),
        ),
        ("/v2/repository/index", b"", "RepositoryIndex", pb.RepositoryIndexRequest()),
        ("/v2/repository/index", {"ready": True}, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
        ("/v2/repository/r/index", {}, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="r")),
        (
            "/v2/repository/models/m/load",
            b"",
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(model_name="m"),
        ),
        (
            "/v2/repository/r/models/m/load",
            {"parameters": {"config": "{}", "file:1/a": base64.b64encode(b"\0\1").decode(), "n": 3}},
            "RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(
                repository_name="r",
                model_name="m",
                parameters={
                    "config": Repository(string_param="{}"),
                    "file:1/a": Repository(bytes_param=b"\0\1"),
                    "n": Repository(int64_param=3),
                },
            ),
        ),
        (
            "/v2/repository/models/m/unload",
            {"parameters": {"unload_dependents": True}},
            "RepositoryModelUnload",
            pb.RepositoryModelUnloadRequest(
                model_name="m", parameters={"unload_dependents": Repository(bool_param=True)}
            ),
        ),
        (
            "/v2/systemsharedmemory/status",
            None,
            "SystemSharedMemoryStatus",
            pb.SystemSharedMemoryStatusRequest(),
        ),
        (
            "/v2/systemsharedmemory/region/a/status",
            None,
            "SystemSharedMemoryStatus",
            pb.SystemSharedMemoryStatusRequest(name="a"),
        ),
        (
            "/v2/systemsharedmemory/region/a/register",
            {"key": "/a", "offset": 8, "byte_size": 2**64 - 1},
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="a", key="/a", offset=8, byte_size=2**64 - 1),
        ),
        (
            "/v2/systemsharedmemory/region/a/unregister",
            b"",
            "SystemSharedMemoryUnregister",
            pb.SystemSharedMemoryUnregisterRequest(name="a"),
        ),
        (
            "/v2/systemsharedmemory/unregister",
            b"",
            "SystemSharedMemoryUnregister",
            pb.SystemSharedMemoryUnregisterRequest(),
        ),
        ("/v2/cudasharedmemory/status", None, "CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        (
            "/v2/cudasharedmemory/region/a/register",
            {"raw_handle": {"b64": "AAE="}, "device_id": 1, "byte_size": 64},
            "CudaSharedMemoryRegister",
            pb.CudaSharedMemoryRegisterRequest(name="a", raw_handle=b"\0\1", device_id=1, byte_size=64),
        ),
        (
            "/v2/cudasharedmemory/unregister",
            b"",
            "CudaSharedMemoryUnregister",
            pb.CudaSharedMemoryUnregisterRequest(),
        ),
        ("/v2/trace/setting", None, "TraceSetting", pb.TraceSettingRequest()),
        (
            "/v2/models/m/trace/setting",
            {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "9", "trace_file": None},
            "TraceSetting",
            pb.TraceSettingRequest(
                model_name="m",
                settings={
                    "trace_level": Trace(value=["TIMESTAMPS", "TENSORS"]),
                    "trace_rate": Trace(value=["9"]),
                    "trace_file": Trace(),
                },
            ),
        ),
        ("/v2/logging", None, "LogSettings", pb.LogSettingsRequest()),
        (
            "/v2/logging",
            {"log_info": True, "log_verbose_level": 2, "log_format": "default"},
            "LogSettings",
            pb.LogSettingsRequest(
                settings={
                    "log_info": Log(bool_param=True),
                    "log_verbose_level": Log(uint32_param=2),
                    "log_format": Log(string_param="default"),
                }
            ),
        ),
    ],
)
def test_requests(
    server: Scripted, front_port: int, path: str, body: object, method: str, request_message: Message
) -> None:
    answer = ask(front_port, path, body)
    received = server.next()
    assert (received.method, received.request) == (method, request_message)
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
        ("/v2/systemsharedmemory/region/a/register", {}, "key: is required"),
        (
            "/v2/systemsharedmemory/region/a/register",
            {"key": "/a", "byte_size": -1},
            "byte_size: is -1; must be greater than or equal to 0",
        ),
        ("/v2/cudasharedmemory/region/a/register", {"raw_handle": {}}, "raw_handle.b64: is required"),
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
        client.get_model_repository_index()
        client.load_model("m", config="{}")
        client.unload_model("m")
        client.get_inference_statistics("m", "1")
        client.get_trace_settings()
        client.update_trace_settings("m", {"trace_level": ["OFF"]})
        client.get_log_settings()
        client.update_log_settings({"log_info": True})
        client.get_system_shared_memory_status("a")
        client.register_system_shared_memory("a", "/a", 64)
        client.unregister_system_shared_memory()
        client.get_cuda_shared_memory_status()
        client.unregister_cuda_shared_memory("a")
    assert [server.next().method for _ in range(13)] == [
        "RepositoryIndex",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "ModelStatistics",
        "TraceSetting",
        "TraceSetting",
        "LogSettings",
        "LogSettings",
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryUnregister",
    ]
