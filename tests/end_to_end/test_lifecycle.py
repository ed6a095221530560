"""Starting, refusing to start, draining and ending."""

import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, FailedPreconditionError, UnavailableError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from model.presets import build_preset
from scripts.local_server import ServerProcess, serving, start
from tests.support.eager import assert_parity, attend

SERVICES = ("", "attention.v1.AttentionService", "inference.GRPCInferenceService")
LONG = np.random.default_rng(0).standard_normal((2000, 768), dtype=np.float32)


@pytest.fixture
def small_repository(repository: Path, tmp_path: Path) -> Path:
    """Copies of two models, to damage."""
    for name in ("self-attention", "cross-attention"):
        shutil.copytree(repository / name, tmp_path / "models" / name)
    return tmp_path / "models"


@pytest.mark.parametrize("service", SERVICES)
def test_health(server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(server.target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_every_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        found = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert found >= {*SERVICES[1:], "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_metrics_name_requests_batches_and_parity(server: ServerProcess, client: AttentionClient) -> None:
    client.attend("self-attention", LONG[:5, :16])
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read().decode()
    method = "/attention.v1.AttentionService/Attend"
    assert f'attention_requests_total{{code="OK",method="{method}"}}' in text
    assert 'attention_batch_sequences_count{model="self-attention"}' in text
    assert 'attention_tokens_total{model="self-attention"}' in text
    parity = (
        'attention_parity_max_abs_error{model="self-attention",provider="CPUExecutionProvider",version="1"}'
    )
    (error,) = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(parity)]
    assert 0 < error < 1e-5


@pytest.mark.parametrize("file", ["manifest.json", "model.onnx", "golden.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_model_stops_alone(small_repository: Path, tmp_path: Path, file: str, damage: str) -> None:
    path = small_repository / "self-attention/1" / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"#")
    with serving(small_repository, tmp_path / "log") as server, AttentionClient(server.target) as client:
        with pytest.raises(FailedPreconditionError, match=file):
            client.attend("self-attention", LONG[:2, :16])
        query, key = LONG[:2, :16], LONG[:3, :24]
        served = client.attend("cross-attention", query, key).context_vectors
        assert_parity(served, attend(build_preset("cross-attention"), query, key)[0])
        states = {model.name: (model.state, model.state_reason) for model in client.models()}
    assert states["cross-attention"] == ("ready", "")
    assert states["self-attention"][0] == "failed"
    assert file in states["self-attention"][1]
    failures = [line for line in (tmp_path / "log").read_text().splitlines() if " model failed " in line]
    assert len(failures) == 1
    assert " ERROR model failed model=self-attention version=1 " in failures[0]
    assert str(path) in failures[0]


def test_without_any_model_it_does_not_start(small_repository: Path, tmp_path: Path) -> None:
    for manifest in small_repository.glob("*/*/manifest.json"):
        manifest.unlink()
    assert start(small_repository, tmp_path / "log").wait(timeout=60) == 1
    assert "no model" in (tmp_path / "log").read_text()


def test_a_port_that_is_taken_is_an_error(
    server: ServerProcess, small_repository: Path, tmp_path: Path
) -> None:
    process = start(small_repository, tmp_path / "log", f"--port={server.port}")
    assert process.wait(timeout=60) == 1
    assert f"cannot listen on 127.0.0.1:{server.port}" in (tmp_path / "log").read_text()


def test_a_drain_answers_what_was_accepted(repository: Path, tmp_path: Path) -> None:
    eager, _ = attend(build_preset("multi-head-768x12"), LONG)
    with serving(repository, tmp_path / "log") as server, AttentionClient(server.target) as client:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(client.attend, "multi-head-768x12", LONG) for _ in range(4)]
            asked[0].result()  # the others are on their way
            assert server.stop() == 0
            answers = [one.exception() or one.result() for one in asked]
        with pytest.raises(UnavailableError):
            client.attend("multi-head-768x12", LONG[:1], timeout=1)
    assert len(answers) == 4
    for answer in answers:
        assert not isinstance(answer, BaseException), answer
        assert_parity(answer.context_vectors, eager)
    log = (tmp_path / "log").read_text()
    assert [log.index(event) for event in (" draining ", " drained ", " stopped")] == sorted(
        log.index(event) for event in (" draining ", " drained ", " stopped")
    )
