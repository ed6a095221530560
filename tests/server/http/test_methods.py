"""Every route but inference: the message that the gRPC server receives, the JSON of its reply, and errors.

Also the description of the routes, its page, and the examples of docs/http.md.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2, json_format
from google.rpc import error_details_pb2, status_pb2
from tritonclient import http as triton

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.http.routes import ROUTES
from scripts.local_server import serving
from tests.server.http.clients import HOST, INFER, REQUEST, ask, tensor
from tests.server.http.scripted import SERVICE, Scripted
from tests.server.samples import ROOT
from tests.support.artifacts import cached_repositories
from tests.support.repository import DEMO

LOAD = "/v2/repository/models/m/load"
REGION: dict[str, Any] = {"name": "a", "key": "/a", "offset": 8, "byte_size": 64}
Choice = pb.ModelRepositoryParameter
LOADED = {"config": Choice(string_param="{}"), "file:1/a": Choice(string_param="AAE=")}
UNLOADED = {"unload_dependents": Choice(bool_param=False)}
# A message, and the method of tritonclient that makes it, with its arguments.
CALLS: list[tuple[Any, ...]] = [
    (pb.ServerLiveRequest(), "is_server_live"),
    (pb.ServerReadyRequest(), "is_server_ready"),
    (pb.ServerMetadataRequest(), "get_server_metadata"),
    (pb.ModelReadyRequest(name="a"), "is_model_ready", "a"),
    (pb.ModelMetadataRequest(name="a b"), "get_model_metadata", "a b"),
    (pb.ModelConfigRequest(name="a", version="2"), "get_model_config", "a", "2"),
    (pb.ModelStatisticsRequest(), "get_inference_statistics"),
    (pb.ModelStatisticsRequest(name="a"), "get_inference_statistics", "a"),
    (pb.RepositoryIndexRequest(), "get_model_repository_index"),
    (pb.RepositoryModelUnloadRequest(model_name="a", parameters=UNLOADED), "unload_model", "a"),
    (pb.SystemSharedMemoryStatusRequest(name="a"), "get_system_shared_memory_status", "a"),
    (pb.SystemSharedMemoryRegisterRequest(**REGION), "register_system_shared_memory", "a", "/a", 64, 8),
    (pb.SystemSharedMemoryUnregisterRequest(), "unregister_system_shared_memory"),
    (pb.CudaSharedMemoryStatusRequest(), "get_cuda_shared_memory_status"),
    (pb.CudaSharedMemoryUnregisterRequest(name="a"), "unregister_cuda_shared_memory", "a"),
    (pb.TraceSettingRequest(model_name="m"), "get_trace_settings", "m"),
    (pb.LogSettingsRequest(), "get_log_settings"),
]


def test_every_method_of_tritonclient(scripted: Scripted, port: int) -> None:
    with triton.InferenceServerClient(f"{HOST}:{port}") as client:
        for message, name, *arguments in CALLS:
            getattr(client, name)(*arguments)
            assert scripted.next().request == message
        client.load_model("a", config="{}", files={"file:1/a": b"\0\1"})
        assert scripted.next().request == pb.RepositoryModelLoadRequest(model_name="a", parameters=LOADED)
        client.register_cuda_shared_memory("a", b"AAE=", 1, 64)
        assert scripted.next().request == pb.CudaSharedMemoryRegisterRequest(name="a")


def test_what_tritonclient_does_not_send(scripted: Scripted, port: int) -> None:
    ask(port, LOAD, {"parameters": {"n": 3}})
    request = scripted.next().request
    assert (request.model_name, request.parameters["n"].int64_param) == ("m", 3)
    ask(port, "/v2/repository/index", {"ready": True})
    assert scripted.next().request == pb.RepositoryIndexRequest(ready=True)
    ask(port, "/v2/models/a%2Fb%20c/config")
    assert scripted.next().request == pb.ModelConfigRequest(name="a/b c")


def test_members_that_are_null_count_as_absent(scripted: Scripted, port: int) -> None:
    query, key = {**REQUEST["inputs"][0], "parameters": {"a": None}}, tensor("key", np.ones((6, 4)))
    bodies: dict[str, dict[str, Any]] = {
        INFER: {"inputs": [query], "id": None, "outputs": None},
        "/v2/models/m/contexts": {"inputs": [key], "parameters": {"ttl_seconds": None}},
        "/v2/repository/index": {"ready": None},
        LOAD: {"parameters": None},
        "/v2/systemsharedmemory/region/a/register": {"key": "a", "offset": None, "byte_size": 8},
    }
    for path, body in bodies.items():
        requests = []
        for members in (body, {name: value for name, value in body.items() if value}):
            assert ask(port, path, members).status == 200
            requests.append(scripted.next().request)
        assert requests[0] == requests[1]


COUNTED = {
    **dict.fromkeys(("inference_count", "execution_count"), 0),
    "name": "m",
    "version": "1",
    "last_inference": 2**53 + 1,
    "inference_stats": {"success": {"count": 2, "ns": 2**63}},
    "batch_stats": [{"batch_size": 4, "compute_infer": {"count": 2, "ns": 2**63}}],
}
STATISTICS = {"model_stats": [COUNTED]}
INDEX = {"name": "m", "version": "1", "state": "READY", "reason": ""}
TRACES_KEPT = {"settings": {"trace_level": {"value": ["OFF"]}}}
LOGS_KEPT = {"settings": {"a": {"bool_param": False}, "b": {"uint32_param": 0}, "c": {}}}


@pytest.mark.parametrize(
    ("path", "method", "fields", "expected"),
    [
        ("/v2/models/m/stats", "ModelStatistics", STATISTICS, STATISTICS),
        ("/v2/systemsharedmemory/status", "SystemSharedMemoryStatus", {"regions": {"a": REGION}}, [REGION]),
        ("/v2/trace/setting", "TraceSetting", TRACES_KEPT, {"trace_level": ["OFF"]}),
        ("/v2/logging", "LogSettings", LOGS_KEPT, {"a": False, "b": 0, "c": None}),
        ("/v2/repository/index", "RepositoryIndex", {"models": [INDEX]}, [INDEX]),
    ],
)
def test_replies(scripted: Scripted, port: int, path: str, method: str, fields: Any, expected: Any) -> None:
    scripted.answer(method, json_format.ParseDict(fields, getattr(pb, f"{method}Response")()))
    answer = ask(port, path, {} if method == "RepositoryIndex" else None)
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


def test_not_ready_is_400_and_a_head_has_no_body(scripted: Scripted, port: int) -> None:
    answer = ask(port, "/v2/health/ready")
    assert (answer.status, answer.json) == (400, {"ready": False})
    only_head = ask(port, "/v2/health/ready", method="HEAD")
    assert (only_head.status, only_head.body) == (400, b"")
    assert only_head.headers["content-length"] == str(len(answer.body))
    assert (ask(port, "/health").status, ask(port, "/health").json) == (503, {})
    scripted.answer("ServerReady", pb.ServerReadyResponse(ready=True))
    assert (ask(port, "/health").status, ask(port, "/health").json) == (200, {})


@pytest.mark.parametrize(
    ("code", "status", "header"),
    [
        ("FAILED_PRECONDITION", 400, None),
        ("NOT_FOUND", 404, None),
        ("UNAUTHENTICATED", 401, ("www-authenticate", "Bearer")),
        ("UNKNOWN", 500, None),
        ("UNAVAILABLE", 503, ("retry-after", "1")),
    ],
)
def test_statuses(scripted: Scripted, port: int, code: str, status: int, header: Any) -> None:
    scripted.behaviours["ModelInfer"] = lambda _, context: context.abort(grpc.StatusCode[code], "wrong: ä")
    answer = ask(port, INFER, REQUEST)
    assert (answer.status, answer.error) == (status, "wrong: ä")
    names = {"retry-after", "www-authenticate"} & answer.headers.keys()
    assert {(name, answer.headers[name]) for name in names} == ({header} if header else set())


def test_retry_info_becomes_retry_after(scripted: Scripted, port: int) -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay={"seconds": 6, "nanos": 500_000_000}))
    status = status_pb2.Status(code=8, message="busy", details=[packed])

    def fail(_request: object, context: grpc.ServicerContext) -> Any:
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


def test_every_method_of_the_service_has_a_route() -> None:
    methods = {method.name for method in SERVICE.methods} - {"ModelStreamInfer"}
    assert methods <= {route.name for route in ROUTES}


def test_the_description_names_every_route_and_its_references_exist(port: int) -> None:
    answer = ask(port, "/openapi.json")
    described, components = answer.json["paths"], answer.json["components"]
    expected = {(path, route.http_method.lower()) for route in ROUTES for path in route.paths}
    assert {(path, method) for path, methods in described.items() for method in methods} == expected
    names = [operation["operationId"] for verbs in described.values() for operation in verbs.values()]
    assert len(set(names)) == len(names)
    references = re.findall(r'"\$ref": ?"#/components/(\w+)/(\w+)"', answer.body.decode())
    assert ("schemas", "InferenceRequest") in references
    assert not [name for kind, name in references if name not in components[kind]]
    for name in ("infer", "contexts"):
        body = described[f"/v2/models/{{model}}/{name}"]["post"]["requestBody"]
        assert set(body["content"]) == {"application/json", "application/octet-stream"}


def test_the_page_of_the_description_needs_no_other_host(port: int) -> None:
    answer = ask(port, "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert b'http-equiv="Content-Security-Policy" content="default-src \'none\';' in answer.body
    assert b"//" not in answer.body


@pytest.mark.thorough
def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs/http.md").read_text()
    (shell,) = (block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "curl " in block)
    python = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    (models,) = cached_repositories(DEMO)
    with serving(models, tmp_path / "log", "--http-port=0") as server:
        here = f"127.0.0.1:{server.http_port}"
        for command in (
            ["/bin/sh", "-e", "-c", shell.replace("curl ", "curl --fail ").replace("127.0.0.1:8000", here)],
            [sys.executable, "-c", python.replace("127.0.0.1:8000", here)],
        ):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
    assert done.stdout == "(2, 3, 16) [3 3]\n3 (1, 2, 28)\n"
