"""A served repository: health, reflection, metrics, models that fail, and the drain."""

import shutil
import time
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, FailedPreconditionError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from attention_serving.model.presets import build_preset
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.protos.attention.v1.attention_pb2_grpc import AttentionServiceStub
from scripts.local_server import ServerProcess, serving, start
from tests.server.samples import CROSS, SELF, eager_module
from tests.support.eager import assert_parity, attend

SERVICES = ("", "attention.v1.AttentionService", "inference.GRPCInferenceService")
LONG = np.random.default_rng(0).standard_normal((1000, 768), dtype=np.float32)


@pytest.fixture
def copies(artifacts: Path, tmp_path: Path) -> Path:
    """Copies of two small models, to damage."""
    for name in (SELF, CROSS):
        shutil.copytree(artifacts / name, tmp_path / "models" / name)
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


def test_metrics_contain_requests_batches_and_parity(server: ServerProcess, client: AttentionClient) -> None:
    client.attend("self-attention", LONG[:5, :16])
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics").read().decode()
    method = "/attention.v1.AttentionService/Attend"
    assert f'attention_requests_total{{code="OK",method="{method}"}}' in text
    assert 'attention_batch_sequences_count{model="self-attention"}' in text
    assert 'attention_tokens_total{model="self-attention"}' in text
    assert 'attention_model_requests_total{code="OK",model="self-attention"}' in text
    parity = 'attention_parity_error{model="self-attention",version="1"}'
    (error,) = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(parity)]
    assert 0 < error < 1e-5


def test_a_damaged_model_fails_alone(copies: Path, tmp_path: Path) -> None:
    path = copies / SELF / "1" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    rng = np.random.default_rng(0)
    inputs = [
        rng.standard_normal((length, width), dtype=np.float32) for length, width in ((2, 4), (3, 6), (3, 5))
    ]
    with serving(copies, tmp_path / "log") as server, AttentionClient(server.target) as client:
        with pytest.raises(FailedPreconditionError, match=path.name):
            client.attend(SELF, inputs[0])
        served = client.attend(CROSS, *inputs).context_vectors
        states = {model.name: (model.state, model.state_reason) for model in client.models()}
    assert_parity(served, attend(eager_module(CROSS), *inputs)[0])
    assert states[CROSS] == ("ready", "")
    assert states[SELF][0] == "failed"
    assert path.name in states[SELF][1]
    log = (tmp_path / "log").read_text().splitlines()
    (failure,) = [line for line in log if " model failed to load " in line]
    assert f" ERROR model failed to load model={SELF} version=1 " in failure
    assert str(path) in failure


def test_a_server_without_a_model_does_not_start(copies: Path, tmp_path: Path) -> None:
    for manifest in copies.glob("*/*/manifest.json"):
        manifest.unlink()
    assert start(copies, tmp_path / "log").wait(timeout=60) == 1
    log = (tmp_path / "log").read_text()
    assert f"cannot serve reason='no model of {copies} can be served" in log


def test_the_port_of_another_server_is_refused(
    server: ServerProcess, artifacts: Path, tmp_path: Path
) -> None:
    process = start(artifacts, tmp_path / "log", f"--port={server.port}")
    assert process.wait(timeout=60) == 1
    log = (tmp_path / "log").read_text()
    assert f"cannot listen on 127.0.0.1:{server.port}" in log
    assert " loading " not in log


def wait_for_messages(server: ServerProcess) -> None:
    """Returns when the message of every call that has arrived was received."""
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    until = time.monotonic() + 60
    while "\nattention_waiting_calls 0.0\n" not in urllib.request.urlopen(url).read().decode():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_drain_answers_every_accepted_call(repository: Path, tmp_path: Path) -> None:
    model = "multi-head-768x12"
    shutil.copytree(repository / model, tmp_path / "models" / model)
    eager, _ = attend(build_preset(model), LONG)
    query = pb.VectorSequences(
        data_type=pb.DATA_TYPE_FP32, width=768, lengths=[len(LONG)], data=LONG.tobytes()
    )
    request = pb.AttendRequest(model_name=model, query=query)
    with (
        serving(tmp_path / "models", tmp_path / "log") as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = AttentionServiceStub(channel)
        sent = [stub.Attend.future(request, timeout=60) for _ in range(4)]
        # On one connection calls arrive in the order in which they are made; their messages come later.
        stub.GetModel(pb.GetModelRequest(name=model), timeout=60)
        wait_for_messages(server)
        assert server.stop() == 0
        for call in sent:
            vectors = call.result().context_vectors
            assert_parity(np.frombuffer(vectors.data, np.float32).reshape(LONG.shape), eager)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Attend(request, timeout=1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    log = (tmp_path / "log").read_text()
    assert [log.index(event) for event in (" draining ", " drained ", " stopped")] == sorted(
        log.index(event) for event in (" draining ", " drained ", " stopped")
    )
