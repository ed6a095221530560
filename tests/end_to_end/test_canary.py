"""Weights that are damaged in the memory of a server while it serves: the model goes, its neighbour stays."""

import shutil
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, FailedPreconditionError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scripts.local_server import ServerProcess, serving
from tests.server.samples import CROSS
from tests.server.seams import wait_until
from tests.support.eager import assert_parity, attend
from tests.support.prometheus import scrape
from tests.support.repository import ROTARY, rotary
from tests.support.triton import ask

# Weights of 1 MiB and more lie in a file of their own, which the server maps into its memory.
MAPPED, WIDTH = ROTARY, 320
RATIO, FAILURES = "attention_canary_error_ratio", "attention_canary_failures_total"
READY = "attention_model_ready"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
QUERY = np.random.default_rng(3).standard_normal((5, WIDTH), np.float32)

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


@pytest.fixture
def folder(artifacts: Path, further: Path, tmp_path: Path) -> Path:
    """Copies, because the weights are overwritten in place."""
    shutil.copytree(further / MAPPED, tmp_path / "models" / MAPPED)
    shutil.copytree(artifacts / CROSS, tmp_path / "models" / CROSS)
    return tmp_path / "models"


def overwrite(file: Path, content: bytes) -> None:
    """Overwrites a file without replacing it: the processes that map it see the new bytes."""
    with file.open("r+b") as stream:
        stream.write(content)


def flip_signs(content: bytes) -> bytes:
    values = np.frombuffer(content, np.uint32).copy()
    values[::7] ^= np.uint32(1 << 31)
    return values.tobytes()


def sample(server: ServerProcess, name: str, model: str = MAPPED) -> float:
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

        def assert_serves() -> None:
            assert_parity(client.attend(MAPPED, QUERY).context_vectors, attend(rotary(), QUERY)[0])
            for model in (MAPPED, CROSS):
                assert health(server, model) == SERVING
                wait_until(lambda model=model: 0 < sample(server, RATIO, model) <= 1)  # type: ignore[misc]

        assert_serves()
        assert (sample(server, FAILURES), sample(server, READY)) == (0, 1)

        overwrite(weights, flip_signs(healthy))
        wait_until(lambda: log.read_text().count(" ERROR model taken out of service ") == workers)
        assert sample(server, RATIO) > 1
        assert sample(server, READY) == 0
        assert sample(server, FAILURES) >= workers
        assert (health(server, MAPPED), health(server, CROSS)) == (NOT_SERVING, SERVING)
        with pytest.raises(FailedPreconditionError, match="differs from eager PyTorch by ") as refused:
            client.attend(MAPPED, QUERY)
        assert str(folder) not in str(refused.value)
        assert (sample(server, FAILURES, CROSS), sample(server, READY, CROSS)) == (0, 1)

        if workers == 1:  # several are not told to load
            load = partial(ask, server.target, "load_model", MAPPED)
            assert "SHA-256" in load()
            overwrite(weights, healthy)
            assert load() is None
            assert_serves()
