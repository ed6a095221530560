"""Jobs that are killed, continued, and give the result of an uninterrupted job."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attention_client.enrich import EnrichError, plan
from attention_client.enrich.job import read_ahead

from attention_serving.enrich import enrich
from tests.clients.enrich.tables import read, vectors_of, write
from tests.server.samples import ROOT, SELF

ROWS, CHUNK_ROWS = 20_000, 1_000
KILLS = 2
PATIENCE_SECONDS = 120
QUERY: dict[str, Any] = {"model": SELF, "column": "query"}
GOOD, BAD = [[1.0, 2.0, 3.0, 4.0]], [[1.0]]
# The command in a process of its own, with chunks that are small enough for a short test.
COMMAND = f"""
from attention_client.enrich import plan
plan.CHUNK_ROWS = {CHUNK_ROWS}
from attention_serving.enrich.__main__ import app
app()
"""
Process = subprocess.Popen[bytes]


def start(source: Path, output: Path, artifacts: Path, *options: str) -> Process:
    where = ["--model-repository", str(artifacts), "--model", SELF, "--column", "query"]
    command = [sys.executable, "-c", COMMAND, str(source), str(output), *where, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def partial_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def finished(output: Path) -> int:
    """How many chunks are recorded."""
    return len(list(partial_folder(output).glob("chunks/*.json")))


def wait_for_a_chunk(output: Path, process: Process) -> None:
    """Returns when one more chunk is recorded, or when the process has ended."""
    before, until = finished(output), time.monotonic() + PATIENCE_SECONDS
    while finished(output) <= before and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Generator[None, None, None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("resume"), ROWS, group_rows=7_000)


def test_a_job_killed_again_and_again_gives_the_same_rows_and_figures(
    tmp_path: Path, source: Path, artifacts: Path
) -> None:
    whole, output = tmp_path / "whole.parquet", tmp_path / "output.parquet"
    uninterrupted = enrich(source, whole, **QUERY, model_repository=artifacts)
    kills = 0
    for _ in range(KILLS):
        process = start(source, output, artifacts, "--resume")
        wait_for_a_chunk(output, process)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    assert kills
    before = finished(output)
    process = start(source, output, artifacts, "--resume", "--json", "--quiet")
    printed, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    summary = json.loads(printed)
    assert read(output).equals(read(whole), check_metadata=True)
    assert not partial_folder(output).exists()
    for figure in ("rows", "tokens", "nulls", "refused"):
        assert summary[figure] == getattr(uninterrupted, figure)
    assert summary["resumed_rows"] == before * CHUNK_ROWS
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])


@pytest.mark.thorough
def test_a_running_job_is_locked_and_an_interrupted_job_continues(
    tmp_path: Path, source: Path, artifacts: Path
) -> None:
    output = tmp_path / "output.parquet"
    run = partial(enrich, source, output, **QUERY, model_repository=artifacts)
    process = start(source, output, artifacts, "--quiet")
    wait_for_a_chunk(output, process)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EnrichError, match="another process is writing"):
        run(resume=True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (130, b"interrupted; --resume continues the job\n")
    assert not output.exists()
    with pytest.raises(EnrichError, match="contains an unfinished job: continue it with --resume"):
        run()
    with pytest.raises(EnrichError, match="contains a job that differs in options and cannot be resumed"):
        run(pool="mean", resume=True)
    before = finished(output)
    elapsed = json.loads((partial_folder(output) / "elapsed.json").read_bytes())["seconds"]
    summary = run(resume=True)
    assert (summary.rows, summary.resumed_rows) == (ROWS, before * CHUNK_ROWS)
    assert summary.seconds > elapsed > 0


def test_resuming_a_finished_job_computes_nothing(tmp_path: Path, in_process: dict[str, Any]) -> None:
    source, output = write(tmp_path, 4, query=vectors_of(GOOD, BAD, None, [])), tmp_path / "out.parquet"
    run = partial(enrich, source, output, **QUERY, **in_process, on_error="skip")
    first, before = run(), output.stat()
    again = run(resume=True)
    assert again.already_complete
    assert (again.rows, again.resumed_rows, again.refused) == (4, 4, 1)
    assert (again.refusals, again.rejects) == (first.refusals, first.rejects)
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


def test_resuming_a_finished_job_of_a_folder_computes_nothing(
    tmp_path: Path, in_process: dict[str, Any]
) -> None:
    for name in ("a.parquet", "b.arrow"):
        write(tmp_path / "in", 3, name)
    run = partial(enrich, tmp_path / "in", tmp_path / "out", **QUERY, **in_process)
    assert not run().already_complete
    assert run(resume=True).already_complete
    (tmp_path / "out" / "b.arrow").unlink()
    with pytest.raises(EnrichError, match="is not the result of this job"):
        run(resume=True)


def test_items_are_read_one_ahead_on_a_thread_and_end_with_their_exception() -> None:
    began = [threading.Event() for _ in range(3)]
    threads: set[str] = set()

    def items() -> Generator[int, None, None]:
        for index, event in enumerate(began):
            threads.add(threading.current_thread().name)
            event.set()
            yield index
        raise OSError("the disk is gone")

    ahead = read_ahead(items())
    assert next(ahead) == 0
    assert began[1].wait(PATIENCE_SECONDS)  # without being asked for
    assert not began[2].is_set()
    assert [next(ahead), next(ahead)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert len(threads - {threading.current_thread().name}) == 1
    source = items()
    ahead = read_ahead(source)
    next(ahead)
    ahead.close()
    assert list(source) == []
