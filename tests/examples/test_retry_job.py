"""The retry job: each run ends with its status: its server is away, is back, or has nothing left to do."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from examples import retry_job
from tests.clients.enrich.tables import write
from tests.server.samples import SELF
from tests.support.processes import serving_models

pytestmark = pytest.mark.thorough
ROWS = 500


def test_the_scheduler_learns_whether_to_run_the_job_again(
    tmp_path: Path, artifacts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write(tmp_path, ROWS), tmp_path / "out.parquet"
    command = [str(source), str(output), f"--model={SELF}", "--column=query"]
    nowhere = ["--server=127.0.0.1:9", "--retry-seconds=0"]
    assert retry_job.main([*command, *nowhere]) == os.EX_TEMPFAIL
    assert not output.exists()
    with serving_models(tmp_path, [artifacts / SELF]) as server:
        command.append(f"--server={server.target}")
        for computed in (ROWS, 0):
            assert retry_job.main(command) == 0
            assert f"{output}: {ROWS} rows, {computed} of them computed now" in capsys.readouterr().out
        assert pq.read_table(output)["context_vectors"].null_count == 0
        assert retry_job.main([*command, "--column=absent"]) == 1
