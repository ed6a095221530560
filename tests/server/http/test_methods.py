"""Every route but inference: the message that the gRPC server receives, and the JSON of its reply."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from tritonclient import http as triton

from protos.inference import open_inference_pb2 as pb
from server.http.methods import INFER_PATHS, METHODS
from server.http.openapi import document
from tests.server.http.clients import HOST, ask, binary_body, tensor
from tests.server.http.scripted import SERVICE, Front, Scripted, front
from tests.server.http.test_inference import QUERY

Repository = pb.ModelRepositoryParameter
Trace, TraceReply = pb.TraceSettingRequest.SettingValue, pb.TraceSettingResponse.SettingValue
Log, LogReply = pb.LogSettingsRequest.SettingValue, pb.LogSettingsResponse.SettingValue
DURATION = {"count": 2, "ns": 2**63}
STATISTICS = pb.ModelStatistics(
    name="m",
    version="1",
    last_inference=2**53 + 1,
    inference_stats=pb.InferStatistics(success=pb.StatisticDuration(**DURATION)),
    batch_stats=[pb.InferBatchStatistics(batch_size=4, compute_infer=pb.StatisticDuration(**DURATION))],
)
INDEX = pb.RepositoryIndexResponse.ModelIndex(name="m", version="1", state="READY")
SYSTEM = pb.SystemSharedMemoryStatusResponse.RegionStatus(name="a", key="/a", offset=8, byte_size=64)
CUDA = pb.CudaSharedMemoryStatusResponse.RegionStatus(name="a", device_id=1, byte_size=64)


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def running(server: Scripted) -> Iterator[Front]:
    with front(f"{HOST}:{server.port}") as process:
        yield process


@pytest.fixture
def port(running: Front) -> int:
    return running.port


@pytest.fixture(autouse=True)
def _empty(server: Scripted) -> None:
    server.behaviours.clear()
    while not server.calls.empty():
        server.calls.get()


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
    server: Scripted, port: int, path: str, body: object, method: str, request_message: Message
) -> None:
    answer = ask(port, path, body)
    received = server.next()
    assert (received.method, received.request) == (method, request_message)
    assert answer.status == (400 if method.endswith("Ready") else 200)  # the empty reply is "not ready"


@pytest.mark.parametrize(
    ("path", "body", "method", "reply", "expected"),
    [
        ("/v2/health/ready", None, "ServerReady", pb.ServerReadyResponse(ready=True), {"ready": True}),
        (
            "/v2",
            None,
            "ServerMetadata",
            pb.ServerMetadataResponse(name="s", version="1", extensions=["a"]),
            {"name": "s", "version": "1", "extensions": ["a"]},
        ),
        (
            "/v2/models/m/stats",
            None,
            "ModelStatistics",
            pb.ModelStatisticsResponse(model_stats=[STATISTICS]),
            {
                "model_stats": [
                    {
                        "name": "m",
                        "version": "1",
                        "last_inference": 2**53 + 1,
                        "inference_count": 0,
                        "execution_count": 0,
                        "inference_stats": {"success": DURATION},
                        "batch_stats": [{"batch_size": 4, "compute_infer": DURATION}],
                    }
                ]
            },
        ),
        (
            "/v2/repository/index",
            b"",
            "RepositoryIndex",
            pb.RepositoryIndexResponse(models=[INDEX]),
            [{"name": "m", "version": "1", "state": "READY", "reason": ""}],
        ),
        (
            "/v2/systemsharedmemory/status",
            None,
            "SystemSharedMemoryStatus",
            pb.SystemSharedMemoryStatusResponse(regions={"a": SYSTEM}),
            [{"name": "a", "key": "/a", "offset": 8, "byte_size": 64}],
        ),
        (
            "/v2/cudasharedmemory/status",
            None,
            "CudaSharedMemoryStatus",
            pb.CudaSharedMemoryStatusResponse(regions={"a": CUDA}),
            [{"name": "a", "device_id": 1, "byte_size": 64}],
        ),
        (
            "/v2/trace/setting",
            {"trace_rate": "9"},
            "TraceSetting",
            pb.TraceSettingResponse(
                settings={"trace_level": TraceReply(value=["OFF"]), "trace_rate": TraceReply(value=["9"])}
            ),
            {"trace_level": ["OFF"], "trace_rate": "9"},
        ),
        (
            "/v2/logging",
            None,
            "LogSettings",
            pb.LogSettingsResponse(
                settings={"a": LogReply(bool_param=False), "b": LogReply(uint32_param=0), "c": LogReply()}
            ),
            {"a": False, "b": 0, "c": None},
        ),
        (
            "/v2/repository/models/m/load",
            b"",
            "RepositoryModelLoad",
            pb.RepositoryModelLoadResponse(),
            {},
        ),
    ],
)
def test_replies(
    server: Scripted, port: int, path: str, body: object, method: str, reply: Message, expected: Any
) -> None:
    server.behaviours[method] = lambda _request, _context: reply
    answer = ask(port, path, body)
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v2/repository/index", {"ready": 1}, "ready: must be true or false"),
        ("/v2/repository/index", [], "body: must be an object"),
        ("/v2/repository/models/m/load", {"parameters": {"a": 1.5}}, "parameters[a]: must be a boolean,"),
        (
            "/v2/repository/models/m/load",
            {"parameters": {"file:a": "?"}},
            "parameters[file:a]: is not base64",
        ),
        ("/v2/systemsharedmemory/region/a/register", {}, "key: is required and must be a string"),
        (
            "/v2/systemsharedmemory/region/a/register",
            {"key": "/a", "byte_size": -1},
            "byte_size: is -1; must lie in 0..18446744073709551615",
        ),
        ("/v2/cudasharedmemory/region/a/register", {"raw_handle": {}}, "raw_handle.b64: is required"),
        ("/v2/trace/setting", {"a": [1]}, "a: must be a string"),
        ("/v2/logging", {"a": 2**32}, "a: is 4294967296; must lie in 0..4294967295"),
        ("/v2/logging", {"a": []}, "a: must be a boolean, an integer or a string"),
    ],
)
def test_wrong_bodies(server: Scripted, port: int, path: str, body: object, error: str) -> None:
    answer = ask(port, path, body)
    assert answer.status == 400
    assert answer.error.startswith(error)
    assert server.calls.empty()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("FAILED_PRECONDITION", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("ALREADY_EXISTS", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("UNIMPLEMENTED", 501),
        ("UNAVAILABLE", 503),
        ("DEADLINE_EXCEEDED", 504),
        ("INTERNAL", 500),
        ("UNKNOWN", 500),
        ("DATA_LOSS", 500),
    ],
)
@pytest.mark.parametrize("path", ["/v2", "/v2/models/m/infer"])
def test_statuses(server: Scripted, port: int, path: str, code: str, status: int) -> None:
    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.abort(grpc.StatusCode[code], "what went wrong: ä")

    server.behaviours |= {"ServerMetadata": fail, "ModelInfer": fail}
    answer = ask(port, path, None if path == "/v2" else {"inputs": [tensor("query", QUERY)]})
    assert (answer.status, answer.error) == (status, "what went wrong: ä")
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)


def test_retry_info_becomes_retry_after(server: Scripted, port: int) -> None:
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(6500)
    packed = any_pb2.Any()
    packed.Pack(retry)
    status = status_pb2.Status(code=8, message="busy", details=[packed])

    def fail(_request: object, context: grpc.ServicerContext) -> Message:
        context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    server.behaviours["ServerMetadata"] = fail
    answer = ask(port, "/v2")
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")


def test_rights_and_traces_are_passed_on(server: Scripted, port: int) -> None:
    headers = {
        "Authorization": "Bearer t",
        "Traceparent": "00-ab-cd-01",
        "Cookie": "c",
        "X-Forwarded-For": "x",
    }
    ask(port, "/v2", None, headers)
    metadata = server.next().metadata
    assert metadata["authorization"] == "Bearer t"
    assert metadata["traceparent"] == "00-ab-cd-01"
    assert not {"cookie", "x-forwarded-for"} & metadata.keys()


def test_inference_becomes_raw_contents(server: Scripted, port: int) -> None:
    shared = {"shared_memory_region": "a", "shared_memory_byte_size": 96, "shared_memory_offset": 4}
    described = {"shape": [2, 3, 4], "datatype": "FP32"}
    body, headers = binary_body(
        {
            "id": "7",
            "parameters": {
                "timeout": 5,
                "a": True,
                "b": 1.5,
                "c": "x",
                "d": 2**64 - 1,
                "binary_data_output": True,
            },
            "inputs": [
                tensor("json", QUERY),
                {"name": "shared", **described, "parameters": shared},
                {"name": "binary", **described, "parameters": {"binary_data_size": 96, "p": -3}},
                {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["ä", ""]},
            ],
            "outputs": [
                {"name": "x", "parameters": {"binary_data": False, "datatype": "FP16"}},
                {"name": "y", "parameters": shared},
            ],
        },
        (-QUERY).tobytes(),
    )
    assert ask(port, "/v2/models/m/versions/2/infer", body, headers).status == 200
    request: pb.ModelInferRequest = server.next().request
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "7")
    values = {name: (each.WhichOneof("parameter_choice"), each) for name, each in request.parameters.items()}
    assert {name: choice for name, (choice, _) in values.items()} == {
        "timeout": "int64_param",
        "a": "bool_param",
        "b": "double_param",
        "c": "string_param",
        "d": "uint64_param",
    }
    assert [each.name for each in request.inputs] == ["json", "shared", "binary", "text"]
    assert request.inputs[1].parameters["shared_memory_offset"].int64_param == 4
    assert dict(request.inputs[2].parameters) == {"p": pb.InferParameter(int64_param=-3)}
    assert list(request.raw_input_contents) == [
        QUERY.tobytes(),
        (-QUERY).tobytes(),
        b"\x02\0\0\0\xc3\xa4\0\0\0\0",
    ]
    assert dict(request.outputs[0].parameters) == {"datatype": pb.InferParameter(string_param="FP16")}
    assert set(request.outputs[1].parameters) == set(shared)


def test_outputs_of_every_kind(server: Scripted, port: int) -> None:
    output = pb.ModelInferResponse.InferOutputTensor
    region = {"shared_memory_region": pb.InferParameter(string_param="a")}
    reply = pb.ModelInferResponse(
        model_name="m",
        model_version="2",
        id="7",
        parameters={"p": pb.InferParameter(int64_param=2)},
        outputs=[
            output(name="shared", datatype="FP32", shape=[3], parameters=region),
            output(name="binary", datatype="FP16", shape=[2]),
            output(name="text", datatype="BYTES", shape=[2]),
            output(name="flags", datatype="BOOL", shape=[2]),
            output(name="large", datatype="UINT64", shape=[1]),
        ],
        raw_output_contents=[
            b"",
            b"abcd",
            b"\x02\0\0\0\xc3\xa4\0\0\0\0",
            b"\1\0",
            b"\xff" * 8,
        ],
    )
    server.behaviours["ModelInfer"] = lambda _request, _context: reply
    outputs = [
        {"name": "shared", "parameters": {"shared_memory_region": "a"}},
        {"name": "binary", "parameters": {"binary_data": True}},
        *({"name": name} for name in ("text", "flags", "large")),
    ]
    answer = ask(port, "/v2/models/m/infer", {"inputs": [], "outputs": outputs})
    size = int(answer.headers["inference-header-content-length"])
    assert answer.body[size:] == b"abcd"
    assert triton.InferResult.from_response_body(answer.body, header_length=size).get_response() == {
        "model_name": "m",
        "model_version": "2",
        "id": "7",
        "parameters": {"p": 2},
        "outputs": [
            {"name": "shared", "datatype": "FP32", "shape": [3], "parameters": {"shared_memory_region": "a"}},
            {"name": "binary", "datatype": "FP16", "shape": [2], "parameters": {"binary_data_size": 4}},
            {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["ä", ""]},
            {"name": "flags", "datatype": "BOOL", "shape": [2], "data": [True, False]},
            {"name": "large", "datatype": "UINT64", "shape": [1], "data": [2**64 - 1]},
        ],
    }


def test_tritonclient_calls_every_method(server: Scripted, port: int) -> None:
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
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


def test_every_method_of_the_service_has_a_route() -> None:
    streamed = {"ModelStreamInfer"}
    assert {method.rpc for method in METHODS} | {"ModelInfer"} | streamed == set(SERVICE.methods_by_name)


def test_the_description_names_every_route_and_its_references_exist(port: int) -> None:
    answer = ask(port, "/openapi.json")
    assert answer.json == document()
    described = answer.json["paths"]
    expected = {(path, method.verb.lower()) for method in METHODS for path in method.paths}
    expected |= {(path, "post") for path in INFER_PATHS}
    assert {(path, verb) for path, verbs in described.items() for verb in verbs} == expected
    operations = [operation for verbs in described.values() for operation in verbs.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for reference in re.findall(rb'"\$ref": "#/components/(\w+)/(\w+)"', answer.body):
        kind, name = (part.decode() for part in reference)
        assert name in answer.json["components"][kind]


def test_the_page_needs_no_other_host(port: int) -> None:
    answer = ask(port, "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none';")
    assert b"//" not in answer.body
