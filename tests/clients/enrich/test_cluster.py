"""A job on a real Ray cluster of two nodes, one of which is killed in the middle."""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
from attention_client.enrich import EnrichError
from ray.cluster_utils import Cluster

from clients.enrich import enrich
from tests.clients.enrich.tables import read, write
from tests.server.samples import ROOT, SELF, TEXT

ROWS = 130_000
PATIENCE_SECONDS = 240
STORE_BYTES = 100 << 20


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


def add_node(cluster: Cluster) -> Any:
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)


def test_a_job_outlives_one_of_its_nodes(tmp_path: Path, artifacts: Path, cluster: Cluster) -> None:
    nodes = [add_node(cluster) for _ in range(2)]
    source, output = write(tmp_path, ROWS), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "model_repository": artifacts, "quiet": True}
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(enrich, str(source), str(output), **wanted, engine="ray")
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(tmp_path.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
            time.sleep(0.05)
        assert not job.done()
        cluster.remove_node(nodes[0], allow_graceful=False)
        summary = job.result(PATIENCE_SECONDS)
    assert summary.rows == ROWS
    assert not [thread.name for thread in threading.enumerate() if "usage" in thread.name]
    enrich(str(source), str(tmp_path / "here.parquet"), **wanted)
    assert read(output).equals(read(tmp_path / "here.parquet"), check_metadata=True)


def test_what_a_row_is_refused_for_comes_back_from_its_node(
    tmp_path: Path, artifacts: Path, cluster: Cluster
) -> None:
    add_node(cluster)
    source = write(tmp_path, 2, text=["Life is short", "unheard"])
    with pytest.raises(EnrichError, match=r"row 1 is refused: .*unheard"):
        enrich(
            str(source), str(tmp_path / "out.parquet"), model=TEXT, column="text", model_repository=artifacts,
            engine="ray", quiet=True,
        )  # fmt: skip
