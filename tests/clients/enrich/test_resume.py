"""Jobs that are killed, continued, and give the result of an uninterrupted job."""

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attention_client._values import AnyResult
from attention_client.enrich import EnrichError, plan
from attention_client.enrich.backends import BackendRequest
from attention_client.enrich.cli import _text
from attention_client.enrich.options import Role

from attention_serving.enrich import enrich
from attention_serving.enrich.local import LocalBackend
from tests.clients.enrich.tables import QUERY, read, vectors_of, write
from tests.server.samples import ROOT, SELF
from tests.server.seams import wait_until

CHUNK_ROWS = 500
PATIENCE_SECONDS = 120
GOOD, BAD = [[1.0, 2.0, 3.0, 4.0]], [[1.0]]
# The command in a process of its own, with chunks that are small enough for a short test. It may kill itself
# when a file is complete and not yet renamed into place.
COMMAND = f"""
import os, sys
from attention_client.enrich import journal, plan, tables
plan.CHUNK_ROWS = {CHUNK_ROWS}
journal.KEEP_SECONDS = float(sys.argv.pop())
last, move = sys.argv.pop(), tables.Location.move
def moving(file, target):
    if last and target.path.endswith(last):
        os.kill(os.getpid(), 9)
    move(file, target)
tables.Location.move = moving
from attention_serving.enrich.__main__ import app
app()
"""


def start(
    source: Path, output: Path, where: str, last: str = "", keep_seconds: float = 10
) -> subprocess.Popen[bytes]:
    """Starts the command. It kills itself instead of renaming a file to a name that ends so."""
    options = [where, "--model", SELF, "--column", "query", "--quiet"]
    command = [sys.executable, "-c", COMMAND, str(source), str(output), *options, last, str(keep_seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(output: Path, suffix: str = "json") -> int:
    """How many chunks are recorded."""
    return len(list(output.with_name(output.name + ".partial").glob(f"chunks/*.{suffix}")))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)


@pytest.mark.parametrize(
    ("last", "recorded"),
    [
        pytest.param("000003-0000.json", 3, id="between a part and its record"),
        pytest.param("out.parquet", 6, id="before the result", marks=pytest.mark.thorough),
    ],
)
def test_a_job_that_was_killed_continues_with_the_same_rows_and_figures(
    tmp_path: Path, artifacts: Path, last: str, recorded: int
) -> None:
    source, output = write(tmp_path, 6 * CHUNK_ROWS, group_rows=1_100), tmp_path / "out.parquet"
    process = start(source, output, f"--model-repository={artifacts}", last)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL, errors
    assert not output.exists()
    assert finished(output) == recorded
    wanted: dict[str, Any] = {**QUERY, "model_repository": artifacts}
    summary = enrich(source, output, **wanted, resume=True)
    whole = enrich(source, tmp_path / "whole.parquet", **wanted)
    assert read(output).equals(read(tmp_path / "whole.parquet"), check_metadata=True)
    assert not list(tmp_path.glob("*.partial"))
    assert summary.resumed_rows == recorded * CHUNK_ROWS
    for figure in ("rows", "tokens", "nulls", "refused"):
        assert getattr(summary, figure) == getattr(whole, figure)


@pytest.mark.parametrize(
    ("last", "batch_rows", "recorded", "saved", "rows"),
    [
        pytest.param("000000-0002.json", 60, 2, 1, 180, id="within a chunk"),
        pytest.param("000000-0002.npz", 200, 0, 2, 128, id="within a batch"),
    ],
)
def test_finished_work_is_kept_whatever_its_rows(
    tmp_path: Path,
    artifacts: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    batch_rows: int,
    recorded: int,
    saved: int,
    rows: int,
) -> None:
    source, output = write(tmp_path, 400, group_rows=batch_rows), tmp_path / "out.parquet"
    process = start(source, output, f"--model-repository={artifacts}", last, keep_seconds=0)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL, errors
    assert (finished(output), finished(output, "npz")) == (recorded, saved)
    options: dict[str, Any] = {**QUERY, "model_repository": artifacts}
    with pytest.raises(EnrichError, match=f"job, of which {rows} of 400 rows are kept: continue"):
        enrich(source, output, **options)
    computed: list[int] = []
    submit = LocalBackend.submit

    def counting(backend: LocalBackend, request: BackendRequest) -> Callable[[], AnyResult]:
        computed.append(len(request[Role.QUERY]))
        return submit(backend, request)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "submit", counting)
        summary = enrich(source, output, **options, resume=True)
    assert sum(computed) == 400 - rows
    whole = enrich(source, tmp_path / "whole.parquet", **options)
    assert (summary.resumed_rows, summary.tokens) == (recorded * batch_rows, whole.tokens)
    now = summary.tokens - summary.resumed_tokens
    assert (now < whole.tokens) == bool(recorded)
    assert f"\n{now:,} tokens in {summary.seconds:,.1f} s, {summary.tokens_per_second:,.0f} " in _text(
        summary
    )
    assert read(output).equals(read(tmp_path / "whole.parquet"), check_metadata=True)


@pytest.mark.thorough
def test_a_running_job_is_locked_and_an_interrupted_job_continues(tmp_path: Path, artifacts: Path) -> None:
    source, output = write(tmp_path, 40 * CHUNK_ROWS), tmp_path / "out.parquet"
    run = partial(enrich, source, output, **QUERY, model_repository=artifacts)
    process = start(source, output, f"--model-repository={artifacts}")
    wait_until(lambda: finished(output) or process.poll() is not None)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EnrichError, match="another process is writing"):
        run(resume=True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    kept = f"{finished(output) * CHUNK_ROWS:,} of {40 * CHUNK_ROWS:,} rows are kept"
    assert (process.returncode, errors.decode()) == (
        130,
        f"interrupted: {kept}; --resume continues the job\n",
    )
    assert not output.exists()
    with pytest.raises(EnrichError, match=f"an unfinished job, of which {kept}: continue it with --resume"):
        run()
    with pytest.raises(EnrichError, match="contains a job that differs in pool and cannot be resumed"):
        run(pool="mean", resume=True)
    before = finished(output)
    summary = run(resume=True)
    assert (summary.rows, summary.resumed_rows) == (40 * CHUNK_ROWS, before * CHUNK_ROWS)


def test_resuming_a_finished_job_computes_nothing(tmp_path: Path, in_process: dict[str, Any]) -> None:
    source, output = write(tmp_path, 4, query=vectors_of(GOOD, BAD, None, [])), tmp_path / "out.parquet"
    run = partial(enrich, source, output, **QUERY, **in_process, on_error="skip")
    run()
    before = output.stat()
    again = run(resume=True)
    assert (again.already_complete, again.rows, again.resumed_rows) == (True, 4, 4)
    with pytest.raises(EnrichError, match=r"exists: --overwrite \(overwrite=True\) replaces it"):
        run()
    with pytest.raises(EnrichError, match="missing"):
        run(column="missing", overwrite=True)
    write(tmp_path, 5)
    with pytest.raises(EnrichError, match="exists and is not the result of this job"):
        run(resume=True)
    # Not the time of the last access: to resume, the file is read.
    after = output.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    run(overwrite=True)
    assert output.stat().st_ino != before.st_ino
