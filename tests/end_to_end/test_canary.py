"""Weights that are damaged in the memory of a server while it serves: the model goes, its neighbour stays."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from attention_client import AttentionClient, FailedPreconditionError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from scripts.local_server import ServerProcess, serving
from tests.end_to_end.test_live_repository import ask
from tests.server.observe.test_metrics import Samples, scrape
from tests.server.test_canary import wait_until
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import assert_parity, attend

# Weights of 1 MiB and more lie in a file of their own, which the server maps into its memory.
MAPPED, NEIGHBOUR = "mapped", "self-attention"
WIDTH = 320
RATIO, FAILURES = "attention_canary_error_ratio", "attention_canary_failures_total"
READY = "attention_model_ready"
QUERY = np.random.default_rng(3).standard_normal((5, WIDTH), np.float32)
SMALL_QUERY = QUERY[:, :16]

pytestmark = pytest.mark.timeout(300)


def mapped_module() -> MultiHeadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(AttentionConfig(d_query=WIDTH, num_heads=4)).eval()


def export_models(folder: Path) -> None:
    write_artifact(mapped_module(), ModelId(MAPPED), folder)
    write_artifact(build_preset(NEIGHBOUR), ModelId(NEIGHBOUR), folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of both models, because the weights are overwritten in place."""
    (exported,) = cached_repositories(ModelSet("canary", [export_models], [Path(__file__)]))
    shutil.copytree(exported, tmp_path / "models")
    return tmp_path / "models"


def overwrite(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Overwrites a file without replacing it: the processes that map it see the new bytes."""
    with file.open("r+b") as stream:
        content = stream.read()
        stream.seek(0)
        stream.write(change(content))


def flip_signs(content: bytes) -> bytes:
    values = np.frombuffer(content, np.uint32).copy()
    values[::7] ^= np.uint32(1 << 31)
    return values.tobytes()


def of(samples: Samples, name: str, model: str) -> float | None:
    return samples.get((name, frozenset({("model", model), ("version", "1")})))


def health(server: ServerProcess, model: str) -> int:
    with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service=model)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_damaged_in_memory_is_taken_out_of_service_and_its_neighbour_goes_on(
    folder: Path, workers: int
) -> None:
    log = folder.parent / "log"
    weights = folder / MAPPED / "1" / "weights.bin"
    healthy = weights.read_bytes()
    mode = ("--model-control=explicit", "--load-model=*") if workers == 1 else ()
    options = ("--canary-seconds=0.5", f"--workers={workers}", *mode)
    with serving(folder, log, *options) as server, AttentionClient(server.target) as client:

        def sample(name: str, model: str) -> float:
            found = of(scrape(server.metrics_port), name, model)
            return -1.0 if found is None else found

        def neighbour_answers() -> None:
            vectors = client.attend(NEIGHBOUR, SMALL_QUERY).context_vectors
            assert_parity(vectors, attend(build_preset(NEIGHBOUR), SMALL_QUERY)[0])
            assert health(server, NEIGHBOUR) == health_pb2.HealthCheckResponse.SERVING

        wait_until(lambda: 0 < sample(RATIO, MAPPED) <= 1 and 0 < sample(RATIO, NEIGHBOUR) <= 1)
        assert_parity(client.attend(MAPPED, QUERY).context_vectors, attend(mapped_module(), QUERY)[0])
        assert (sample(FAILURES, MAPPED), sample(READY, MAPPED)) == (0, 1)
        assert health(server, MAPPED) == health_pb2.HealthCheckResponse.SERVING
        neighbour_answers()

        overwrite(weights, flip_signs)
        wait_until(lambda: log.read_text().count(" model taken out of service ") == workers)
        assert sample(RATIO, MAPPED) > 1
        assert sample(READY, MAPPED) == 0
        assert sample(FAILURES, MAPPED) >= workers
        assert health(server, MAPPED) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(FailedPreconditionError, match="was taken out of service: ") as refused:
            client.attend(MAPPED, QUERY)
        assert "differs from eager PyTorch by " in str(refused.value)
        assert str(folder) not in str(refused.value)
        (state,) = [model for model in client.models() if model.name == MAPPED]
        assert state.state == "failed"
        assert state.state_reason in str(refused.value)
        neighbour_answers()
        assert (sample(FAILURES, NEIGHBOUR), sample(READY, NEIGHBOUR)) == (0, 1)

        if workers == 1:  # several are not told to load
            assert "SHA-256" in ask(server, "load_model", MAPPED)
            overwrite(weights, lambda _: healthy)
            assert ask(server, "load_model", MAPPED) is None
            assert_parity(client.attend(MAPPED, QUERY).context_vectors, attend(mapped_module(), QUERY)[0])
            assert health(server, MAPPED) == health_pb2.HealthCheckResponse.SERVING
            wait_until(lambda: 0 < sample(RATIO, MAPPED) <= 1)
            neighbour_answers()
    errors = [line for line in log.read_text().splitlines() if " ERROR model taken out of service " in line]
    assert len(errors) == workers
    assert all(f"model={MAPPED} version=1 reason=" in line for line in errors)


def test_without_a_period_nothing_is_replayed(folder: Path) -> None:
    with serving(folder, folder.parent / "log", "--canary-seconds=0") as server:
        names = {name for name, _ in scrape(server.metrics_port)}
        threads = []
        for task in Path(f"/proc/{server.process.pid}/task").iterdir():
            with suppress(FileNotFoundError):  # it ended since the folder was listed
                threads.append((task / "comm").read_text().strip())
    assert RATIO not in names
    assert "canary" not in threads
    assert "scheduler" in threads
