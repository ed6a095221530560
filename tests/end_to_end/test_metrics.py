"""The metrics of real servers: named by the conventions, documented, and bounded in number."""

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
from tests.support.metric_conventions import problems
from tests.support.prometheus import check_metrics, page

UNKNOWN_MODELS = 10_000
MOST_SERIES_OF_A_MODEL = 100
PATIENCE_SECONDS = 120
CANARY = "attention_canary_"
CALLS, STREAM = "attention_requests_total", ("method", "/attention.v1.AttentionService/AttendStream")
FAMILY = re.compile(r"^# TYPE (\S+) (\S+)$", re.MULTILINE)
DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\w+) \| [^|]* \| ([\w ]+) \|", re.MULTILINE)
# Name and type.
Family = tuple[str, str]


@pytest.fixture(scope="module")
def one(server: ServerProcess, client: AttentionClient) -> str:
    """The metrics of a single process that has answered requests."""
    client.attend_text(TEXT, "Life is short")
    return page(server.metrics_port)


@pytest.fixture(scope="module")
def workers(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of two workers that have answered requests."""
    with (
        serving(artifacts, tmp_path_factory.mktemp("workers") / "log", "--workers=2") as server,
        AttentionClient(server.target) as client,
    ):
        client.attend_text(TEXT, "Life is short")
        return page(server.metrics_port)


def documented(*, supervisor: bool) -> set[Family]:
    """The metrics of every server in docs/operations.md, and those of the supervisor of workers."""
    rows = DOCUMENTED.findall(PAGE.read_text())
    return {(name, kind) for name, kind, workers in rows if supervisor or workers != SUPERVISOR}


def test_every_metric_that_is_served_is_documented_and_the_other_way_round(one: str) -> None:
    assert set(FAMILY.findall(one)) == documented(supervisor=False)


def test_the_metrics_of_workers_are_documented(workers: str) -> None:
    """A metric of workers is served once it has a value in one of them."""
    found, everything = set(FAMILY.findall(workers)), documented(supervisor=True)
    assert found <= everything
    assert everything - documented(supervisor=False) <= found
    assert len(found) > len(everything) / 2


@pytest.mark.parametrize("kind", ["one", "workers"])
def test_the_metrics_follow_the_conventions(kind: str, request: pytest.FixtureRequest) -> None:
    assert problems(request.getfixturevalue(kind)) == []


@pytest.mark.parametrize("kind", ["one", "workers"])
def test_promtool_finds_nothing(promtool: str, kind: str, request: pytest.FixtureRequest) -> None:
    assert check_metrics(promtool, request.getfixturevalue(kind)) == ""


def test_the_processes_of_workers_are_told_apart(workers: str) -> None:
    found = re.findall(r'^process_resident_memory_bytes\{process="([^"]+)"\} \d', workers, re.MULTILINE)
    assert sorted(found) == ["supervisor", "worker-0", "worker-1"]


def test_the_series_of_a_model_are_bounded(one: str) -> None:
    series = re.findall(rf'^attention_\w+\{{.*\bmodel="{TEXT}"', one, re.MULTILINE)
    assert 0 < len(series) <= MOST_SERIES_OF_A_MODEL


def test_unknown_names_of_models_add_no_series(server: ServerProcess) -> None:
    streams = ended_streams(scrape(server.metrics_port))
    with grpc.insecure_channel(server.target) as channel:
        ask(channel, "warm")
        before = once_counted(server.metrics_port, streams + 1)
        ask(channel, "unknown")
        after = once_counted(server.metrics_port, streams + 2)
    # The canary adds the series of a model when it replays the first time, which may be now.
    assert {name for name in after.keys() - before.keys() if not name[0].startswith(CANARY)} == set()
    assert before.keys() <= after.keys()
    assert not any("unknown-" in label for _, labels in after for _, label in labels)


def ended_streams(samples: Samples) -> float:
    """How many streams of attention.v1 have ended."""
    ended = (value for (name, labels), value in samples.items() if name == CALLS and STREAM in labels)
    return sum(ended)


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
