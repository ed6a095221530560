"""Weights that are damaged in the memory of a server while it serves: the model goes, its neighbour stays."""

import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
from attention_client import AttentionClient, FailedPreconditionError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scripts.local_server import serving
from tests.server.samples import CROSS
from tests.server.seams import wait_until
from tests.support.eager import assert_parity, attend
from tests.support.prometheus import scrape, value
from tests.support.repository import ROTARY, rotary

pytestmark = pytest.mark.thorough
# Weights of 1 MiB and more lie in a file of their own, whose copy the server maps into its memory.
MAPPED = ROTARY
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
QUERY = np.random.default_rng(3).standard_normal((5, 320), np.float32)


def test_a_model_damaged_in_memory_is_taken_out_of_service_and_its_neighbour_goes_on(
    artifacts: Path, further: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, log = tmp_path / "models", tmp_path / "log"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shutil.copytree(further / MAPPED, models / MAPPED)
    shutil.copytree(artifacts / CROSS, models / CROSS)
    with (
        serving(models, log, "--canary-seconds=0.5") as server,
        AttentionClient(server.target) as client,
        grpc.insecure_channel(server.target) as channel,
    ):

        def health() -> list[int]:
            check = health_pb2_grpc.HealthStub(channel).Check
            requests = [health_pb2.HealthCheckRequest(service=model) for model in (MAPPED, CROSS)]
            return [check(request, timeout=60).status for request in requests]

        assert_parity(client.attend(MAPPED, QUERY).context_vectors, attend(rotary(), QUERY)[0])
        assert health() == [SERVING, SERVING]
        # The file is not replaced: the process that maps it sees the new bytes.
        (copy,) = tmp_path.glob("attention-models-*/*/weights.bin")
        with copy.open("r+b") as weights:
            values = np.frombuffer(weights.read(), np.float32)
            weights.seek(0)
            weights.write((-values).tobytes())
        wait_until(lambda: " ERROR model taken out of service " in log.read_text())
        labels = {"model": MAPPED, "version": "1"}
        assert value(scrape(server.metrics_port), "attention_canary_failures_total", **labels) == 1
        assert health() == [NOT_SERVING, SERVING]
        with pytest.raises(FailedPreconditionError, match="differs from eager PyTorch by "):
            client.attend(MAPPED, QUERY)
