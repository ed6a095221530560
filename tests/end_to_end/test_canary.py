"""Weights that are damaged in the memory of a server while it serves: the model goes, its neighbour stays."""

import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from attention_client import AttentionClient, FailedPreconditionError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import build_preset
from scripts.local_server import ServerProcess, serving
from tests.end_to_end.test_live_repository import ask
from tests.server.observe.test_metrics import scrape
from tests.server.seams import wait_until
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.eager import assert_parity, attend

# Weights of 1 MiB and more lie in a file of their own, which the server maps into its memory.
MAPPED, NEIGHBOUR = "mapped", "self-attention"
WIDTH = 320
RATIO, FAILURES = "attention_canary_error_ratio", "attention_canary_failures_total"
READY = "attention_model_ready"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
QUERY = np.random.default_rng(3).standard_normal((5, WIDTH), np.float32)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


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


def sample(server: ServerProcess, name: str, model: str) -> float:
    return scrape(server.metrics_port).get((name, frozenset({("model", model), ("version", "1")})), -1.0)


def health(server: ServerProcess, model: str) -> int:
    with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        request = health_pb2.HealthCheckRequest(service=model)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=60).status)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_damaged_in_memory_is_taken_out_of_service_and_its_neighbour_goes_on(
    folder: Path, workers: int
) -> None:
    log, weights = folder.parent / "log", folder / MAPPED / "1" / "weights.bin"
    healthy = weights.read_bytes()
    mode = ("--model-control=explicit", "--load-model=*") if workers == 1 else ()
    options = ("--canary-seconds=0.5", f"--workers={workers}", *mode)
    with serving(folder, log, *options) as server, AttentionClient(server.target) as client:

        def both_answer() -> None:
            for name, query, module in (
                (MAPPED, QUERY, mapped_module()),
                (NEIGHBOUR, QUERY[:, :16], build_preset(NEIGHBOUR)),
            ):
                assert_parity(client.attend(name, query).context_vectors, attend(module, query)[0])
                assert health(server, name) == SERVING
                wait_until(lambda name=name: 0 < sample(server, RATIO, name) <= 1)  # type: ignore[misc]

        both_answer()
        assert (sample(server, FAILURES, MAPPED), sample(server, READY, MAPPED)) == (0, 1)

        overwrite(weights, flip_signs)
        wait_until(lambda: log.read_text().count(" ERROR model taken out of service ") == workers)
        assert sample(server, RATIO, MAPPED) > 1
        assert sample(server, READY, MAPPED) == 0
        assert sample(server, FAILURES, MAPPED) >= workers
        assert (health(server, MAPPED), health(server, NEIGHBOUR)) == (NOT_SERVING, SERVING)
        with pytest.raises(FailedPreconditionError, match="differs from eager PyTorch by ") as refused:
            client.attend(MAPPED, QUERY)
        assert str(folder) not in str(refused.value)
        assert (sample(server, FAILURES, NEIGHBOUR), sample(server, READY, NEIGHBOUR)) == (0, 1)

        if workers == 1:  # several are not told to load
            assert "SHA-256" in ask(server, "load_model", MAPPED)
            overwrite(weights, lambda _: healthy)
            assert ask(server, "load_model", MAPPED) is None
            both_answer()
