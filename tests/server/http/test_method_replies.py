"""Every route but inference: the JSON and the status of a reply."""

from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from attention_serving.protos.inference import open_inference_pb2 as pb
from tests.server.http.clients import ask, tensor
from tests.server.http.scripted import Scripted
from tests.server.http.test_inference import QUERY

TraceReply = pb.TraceSettingResponse.SettingValue
LogReply = pb.LogSettingsResponse.SettingValue
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
    server: Scripted, front_port: int, path: str, body: object, method: str, reply: Message, expected: Any
) -> None:
    server.behaviours[method] = lambda _request, _context: reply
    answer = ask(front_port, path, body)
    assert (answer.status, answer.json) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


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


def test_rights_and_traces_are_passed_on(server: Scripted, front_port: int) -> None:
    headers = {
        "Authorization": "Bearer t",
        "Traceparent": "00-ab-cd-01",
        "Cookie": "c",
        "X-Forwarded-For": "x",
    }
    ask(front_port, "/v2", None, headers)
    metadata = server.next().metadata
    assert metadata["authorization"] == "Bearer t"
    assert metadata["traceparent"] == "00-ab-cd-01"
    assert not {"cookie", "x-forwarded-for"} & metadata.keys()
