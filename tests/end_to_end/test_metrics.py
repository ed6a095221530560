"""The metrics of real servers: documented, and bounded in number."""

import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from attention_client import AttentionClient
from google.protobuf.message import Message

from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from attention_serving.protos.inference import open_inference_pb2 as inference_pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from scripts.generate_operations_page import PAGE
from scripts.local_server import ServerProcess, serving
from scripts.operations_tables import SUPERVISOR
from tests.server.observe.test_metrics import Samples, scrape
from tests.server.samples import TEXT
from tests.support.prometheus import check_metrics, page

UNKNOWN_MODELS = 2000
MOST_SERIES_OF_A_MODEL = 100
PATIENCE_SECONDS = 120
CANARY = "attention_canary_"
CALLS, STREAM = "attention_requests_total", ("method", "/attention.v1.AttentionService/AttendStream")
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([\w ]+) \|", re.MULTILINE)


def documented(*, supervisor: bool) -> set[tuple[str, str]]:
    """Names and types of the metrics of every server in docs/reference.md, and those of a supervisor."""
    rows = DOCUMENTED.findall(PAGE.read_text())
    return {(name, kind) for name, kind, workers in rows if supervisor or workers != SUPERVISOR}


def test_the_metrics_of_a_server_are_those_of_the_page(
    server: ServerProcess, client: AttentionClient
) -> None:
    client.attend_text("sentence-self-attention", "Life is short")
    text = page(server.metrics_port)
    assert set(FAMILY.findall(text)) == documented(supervisor=False)
    series = re.findall(r'^attention_\w+\{.*\bmodel="sentence-self-attention"', text, re.MULTILINE)
    assert 0 < len(series) <= MOST_SERIES_OF_A_MODEL


def test_promtool_finds_nothing(promtool: str, server: ServerProcess) -> None:
    assert check_metrics(promtool, page(server.metrics_port)) == ""
    assert "attention_x_ms" in check_metrics(
        promtool, "# HELP attention_x_ms X.\n# TYPE attention_x_ms counter\nattention_x_ms 1\n"
    )


@pytest.mark.thorough
def test_the_metrics_of_workers_are_those_of_the_page(artifacts: Path, tmp_path: Path) -> None:
    """A metric of workers is served once it has a value in one of them."""
    with (
        serving(artifacts, tmp_path / "log", "--workers=2") as server,
        AttentionClient(server.target) as client,
    ):
        client.attend_text(TEXT, "Life is short")
        text = page(server.metrics_port)
    found, everything = set(FAMILY.findall(text)), documented(supervisor=True)
    assert found <= everything
    assert everything - documented(supervisor=False) <= found
    assert len(found) > len(everything) / 2
    processes = re.findall(r'^process_resident_memory_bytes\{process="([^"]+)"\} \d', text, re.MULTILINE)
    assert sorted(processes) == ["supervisor", "worker-0", "worker-1"]


@pytest.mark.thorough
def test_unknown_names_of_models_add_no_series(server: ServerProcess) -> None:
    streams = ended_streams(scrape(server.metrics_port))
    with grpc.insecure_channel(server.target) as channel:
        ask(channel, "warm")
        before = once_counted(server.metrics_port, streams + 1)
        ask(channel, "unknown")
        after = once_counted(server.metrics_port, streams + 2)
    # The canary adds the series of a model when it replays the first time, which may be now.
    assert {name for name in after.keys() - before.keys() if not name[0].startswith(CANARY)} == set()
    assert not any("unknown-" in label for _, labels in after for _, label in labels)


def ended_streams(samples: Samples) -> float:
    """How many streams of attention.v1 have ended."""
    return sum(value for (name, labels), value in samples.items() if name == CALLS and STREAM in labels)


def once_counted(port: int, streams: float) -> Samples:
    """The samples once so many streams have ended: a call is counted after its reply has been sent."""
    until = time.monotonic() + PATIENCE_SECONDS
    while ended_streams(samples := scrape(port)) < streams:
        assert time.monotonic() < until
    return samples


def ask(channel: grpc.Channel, prefix: str) -> None:
    """Asks for many models that do not exist, on a stream and by calls of every kind that names a model."""
    names = (f"{prefix}-{number}" for number in range(UNKNOWN_MODELS))
    typed, open_inference = AttentionServiceStub(channel), GRPCInferenceServiceStub(channel)
    for name in islice(names, 25):
        version = {"name": name, "version": "1"}
        requests: tuple[tuple[Any, Message], ...] = (
            (typed.Attend, pb.AttendRequest(model_name=name)),
            (typed.GetModel, pb.GetModelRequest(name=name)),
            (open_inference.ModelInfer, inference_pb.ModelInferRequest(model_name=name)),
            (open_inference.ModelMetadata, inference_pb.ModelMetadataRequest(**version)),
            (open_inference.ModelStatistics, inference_pb.ModelStatisticsRequest(**version)),
            (open_inference.RepositoryModelLoad, inference_pb.RepositoryModelLoadRequest(model_name=name)),
        )
        for call, request in requests:
            with pytest.raises(grpc.RpcError):
                call(request, timeout=PATIENCE_SECONDS)
    replies = typed.AttendStream(streamed(names), timeout=PATIENCE_SECONDS)
    assert {reply.error.reason for reply in replies} == {"MODEL_NOT_FOUND"}


def streamed(names: Iterator[str]) -> Iterator[pb.AttendStreamRequest]:
    for name in names:
        yield pb.AttendStreamRequest(request=pb.AttendRequest(model_name=name))
