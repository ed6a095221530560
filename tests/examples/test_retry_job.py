"""The retry job: its server goes away in the middle, comes back, and every run ends with its status."""

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from attention_client.enrich import plan

from attention_serving.enrich import enrich
from examples import make_table, retry_job
from scripts.local_server import ServerProcess, serving
from tests.server.samples import SELF
from tests.support.artifacts import link_tree
from tests.support.eager import assert_parity

ROWS, CHUNK_ROWS = 20_000, 1_000
PATIENCE_SECONDS = 120


@pytest.fixture
def models(artifacts: Path, tmp_path: Path) -> Path:
    link_tree(artifacts / SELF, tmp_path / "models" / SELF)
    return tmp_path / "models"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, models: Path, *options: str) -> ServerProcess:
    log = models.parent / f"{time.monotonic_ns()}.log"
    return stack.enter_context(serving(models, log, "--threads=1", *options))


def wait_for_a_chunk(folder: Path, job: "Future[int]") -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not list(folder.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
        time.sleep(0.01)
    assert not job.done()


def test_the_job_survives_a_server_that_goes_away(
    tmp_path: Path,
    models: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
    source, output = tmp_path / "table.parquet", tmp_path / "out.parquet"
    assert make_table.main([str(source), f"--rows={ROWS}", "--width=4"]) == 0
    server = start(stack, models)
    command = [str(source), str(output), f"--model={SELF}", f"--server={server.target}"]
    command.append("--retry-seconds=0.5")
    pool = stack.enter_context(ThreadPoolExecutor(1))

    # The server goes away for longer than the job waits.
    job = pool.submit(retry_job.main, [*command, "--attempts=1"])
    wait_for_a_chunk(tmp_path, job)
    server.process.kill()
    server.process.wait()
    assert job.result(PATIENCE_SECONDS) == os.EX_TEMPFAIL
    assert not output.exists()

    # The scheduler runs the job again, and the server comes back while it makes its attempts.
    job = pool.submit(retry_job.main, [*command, "--attempts=100", "--delay=0"])
    start(stack, models, f"--port={server.port}")
    assert job.result(PATIENCE_SECONDS) == 0
    printed = capsys.readouterr().out
    (computed,) = re.findall(rf"{output}: {ROWS} rows, (\d+) of them computed now\n", printed)
    assert 0 < int(computed) < ROWS
    wanted: dict[str, Any] = {"model": SELF, "column": "embeddings", "pool": "mean"}
    enrich(source, tmp_path / "expected.parquet", **wanted, model_repository=models)
    found, expected = (pq.read_table(path) for path in (output, tmp_path / "expected.parquet"))
    assert found.select(["id", "embeddings"]).equals(expected.select(["id", "embeddings"]))
    vectors = (np.stack(table["context_vectors"].to_numpy()) for table in (found, expected))
    assert_parity(*vectors)

    # Once more: nothing is left to compute.
    assert retry_job.main(command) == 0
    assert f"{ROWS} rows, 0 of them computed now" in capsys.readouterr().out
    assert retry_job.main([*command, "--column=absent"]) == 1
