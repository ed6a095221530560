"""The retry job: its server goes away in the middle, comes back, and every run ends with its status."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from attention_client.enrich import plan

from examples import make_table, retry_job
from scripts.local_server import ServerProcess, serving
from tests.server.samples import SELF
from tests.support.artifacts import link_tree

pytestmark = pytest.mark.thorough
ROWS, CHUNK_ROWS = 20_000, 1_000
PATIENCE_SECONDS = 120


def test_the_job_survives_a_server_that_goes_away(
    tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
    models, source, output = (tmp_path / name for name in ("models", "table.parquet", "out.parquet"))
    link_tree(artifacts / SELF, models / SELF)
    assert make_table.main([str(source), f"--rows={ROWS}", "--width=4"]) == 0

    def start(*options: str) -> ServerProcess:
        log = tmp_path / f"{time.monotonic_ns()}.log"
        return stack.enter_context(serving(models, log, "--threads=1", *options))

    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        server = start()
        command = [str(source), str(output), f"--model={SELF}"]
        command += [f"--server={server.target}", "--retry-seconds=0.5"]
        # The server goes away for longer than the job waits.
        job = pool.submit(retry_job.main, [*command, "--attempts=1"])
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(tmp_path.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
            time.sleep(0.01)
        assert not job.done()
        server.process.kill()
        server.process.wait()
        assert job.result(PATIENCE_SECONDS) == os.EX_TEMPFAIL
        assert not output.exists()
        # The scheduler runs the job again, and the server comes back while it makes its attempts.
        job = pool.submit(retry_job.main, [*command, "--attempts=100", "--delay=0"])
        start(f"--port={server.port}")
        assert job.result(PATIENCE_SECONDS) == 0
        (computed,) = re.findall(
            rf"{output}: {ROWS} rows, (\d+) of them computed now\n", capsys.readouterr().out
        )
        assert 0 < int(computed) < ROWS
        assert pq.read_table(output)["context_vectors"].null_count == 0
        # Once more: nothing is left to compute.
        assert retry_job.main(command) == 0
        assert f"{ROWS} rows, 0 of them computed now" in capsys.readouterr().out
        assert retry_job.main([*command, "--column=absent"]) == 1
