"""A job on a real Ray cluster, of which one node is killed."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from attention_client.enrich import plan
from ray.cluster_utils import Cluster

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import QUERY, read, write
from tests.server.samples import ROOT

pytestmark = pytest.mark.thorough
ROWS, CHUNK_ROWS = 40_000, 2_000
PATIENCE_SECONDS = 240
STORE_BYTES = 100 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster whose head computes nothing. Starting it is slow, so the tests share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/clients/python/src")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        yield cluster
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


def test_a_job_survives_the_loss_of_the_node_that_computes(
    tmp_path: Path, artifacts: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
    lost = add_node(cluster)
    source, output = write(tmp_path, ROWS), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {**QUERY, "model_repository": artifacts}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(enrich, source, output, **wanted, engine="ray")
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(tmp_path.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
            time.sleep(0.02)
        assert not job.done()
        cluster.remove_node(lost, allow_graceful=False)
        add_node(cluster)
        summary = job.result(PATIENCE_SECONDS)
    assert summary.rows == ROWS
    enrich(source, tmp_path / "in_process.parquet", **wanted)
    assert read(output).equals(read(tmp_path / "in_process.parquet"), check_metadata=True)
