"""Jobs that are killed, continued, and give the result of an uninterrupted job."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from attention_client.enrich import EnrichError, Summary, plan
from attention_client.enrich.job import run_chunks, run_job
from attention_client.enrich.options import read_options

from attention_serving.enrich import enrich
from attention_serving.enrich.local import LocalBackend
from tests.clients.enrich.tables import read, vectors_of, write
from tests.server.samples import ROOT, SELF

ROWS, CHUNK_ROWS = 60_000, 4_000
KILLS = 3
PATIENCE_SECONDS = 120
QUERY: dict[str, Any] = {"model": SELF, "column": "query"}
# The command in a process of its own, with chunks that are small enough for a short test.
COMMAND = f"""
from attention_client.enrich import plan
plan.CHUNK_ROWS = {CHUNK_ROWS}
from attention_serving.enrich.__main__ import app
app()
"""


@dataclass(frozen=True)
class Job:
    """The command on one table."""

    source: Path
    output: Path
    artifacts: Path

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        where = ["--model-repository", str(self.artifacts), "--model", SELF, "--column", "query"]
        command = [sys.executable, "-c", COMMAND, str(self.source), str(self.output), *where, *options]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *options: str) -> bytes:
        process = self.start(*options)
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, errors
        return output

    @property
    def partial(self) -> Path:
        return self.output.with_name(self.output.name + ".partial")

    @property
    def finished(self) -> int:
        """How many chunks are recorded."""
        return len(list(self.partial.glob("chunks/*.json")))

    def wait_for_a_chunk(self, process: "subprocess.Popen[bytes]") -> None:
        """Returns when one more chunk is recorded, or when the process has ended."""
        before, until = self.finished, time.monotonic() + PATIENCE_SECONDS
        while self.finished <= before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("resume"), ROWS, group_rows=25_000)


@pytest.fixture(scope="module")
def whole(source: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """The result of an uninterrupted job with the same chunks."""
    output = tmp_path_factory.mktemp("whole") / "whole.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
        return output, enrich(source, output, **QUERY, model_repository=artifacts)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)


def test_a_job_killed_again_and_again_gives_the_same_bytes_and_figures(
    tmp_path: Path, source: Path, artifacts: Path, whole: tuple[Path, Summary]
) -> None:
    expected, uninterrupted = whole
    job = Job(source, tmp_path / "output.parquet", artifacts)
    kills = 0
    for _ in range(KILLS):
        process = job.start("--resume")
        job.wait_for_a_chunk(process)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    assert kills
    before = job.finished
    summary = json.loads(job.run("--resume", "--json", "--quiet"))
    assert read(job.output).equals(read(expected), check_metadata=True)
    assert not job.partial.exists()
    for figure in ("rows", "tokens", "nulls", "refused"):
        assert summary[figure] == getattr(uninterrupted, figure)
    assert summary["resumed_rows"] == before * CHUNK_ROWS
    assert summary["tokens_per_second"] == pytest.approx(summary["tokens"] / summary["seconds"])


def test_a_running_job_is_locked_and_an_interrupted_job_continues(
    tmp_path: Path, source: Path, artifacts: Path
) -> None:
    job = Job(source, tmp_path / "output.parquet", artifacts)
    wanted: dict[str, Any] = {**QUERY, "model_repository": artifacts}
    process = job.start("--quiet")
    job.wait_for_a_chunk(process)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(EnrichError, match="another process is writing"):
        enrich(source, job.output, **wanted, resume=True)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (130, b"interrupted; --resume continues the job\n")
    assert not job.output.exists()
    with pytest.raises(EnrichError, match="contains an unfinished job: continue it with --resume"):
        enrich(source, job.output, **wanted)
    with pytest.raises(EnrichError, match="contains a job that differs in options and cannot be resumed"):
        enrich(source, job.output, **wanted, pool="mean", resume=True)
    before = job.finished
    elapsed = json.loads((job.partial / "elapsed.json").read_bytes())["seconds"]
    summary = enrich(source, job.output, **wanted, resume=True)
    assert (summary.rows, summary.resumed_rows) == (ROWS, before * CHUNK_ROWS)
    assert summary.seconds > elapsed > 0


def written(file: Path) -> tuple[int, int, int]:
    """Identifies what was written to a file, and when."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def test_resuming_a_finished_job_computes_nothing(tmp_path: Path, in_process: dict[str, Any]) -> None:
    source = write(tmp_path, 4, query=vectors_of([[1.0, 2.0, 3.0, 4.0]], [[1.0]], None, []))
    output = tmp_path / "out.parquet"
    wanted: dict[str, Any] = {**QUERY, **in_process, "on_error": "skip"}
    first = enrich(source, output, **wanted)
    # Not the time of the last access: to resume, the file is read.
    before = written(output)
    again = enrich(source, output, **wanted, resume=True)
    assert again.already_complete
    assert (again.rows, again.resumed_rows, again.refused) == (4, 4, 1)
    assert (again.refusals, again.rejects) == (first.refusals, first.rejects)
    assert written(output) == before
    with pytest.raises(EnrichError, match="exists and is not the result of this job: --overwrite"):
        enrich(source, output, **wanted, pool="mean", resume=True)
    with pytest.raises(EnrichError, match="exists: --overwrite"):
        enrich(source, output, **wanted)
    write(tmp_path, 5)
    with pytest.raises(EnrichError, match="exists and is not the result of this job"):
        enrich(source, output, **wanted, resume=True)


def test_resuming_a_finished_job_of_a_folder_computes_nothing(
    tmp_path: Path, in_process: dict[str, Any]
) -> None:
    for name in ("a.parquet", "b.arrow"):
        write(tmp_path / "in", 3, name)
    wanted: dict[str, Any] = {**QUERY, **in_process}
    assert not enrich(tmp_path / "in", tmp_path / "out", **wanted).already_complete
    assert enrich(tmp_path / "in", tmp_path / "out", **wanted, resume=True).already_complete
    (tmp_path / "out" / "b.arrow").unlink()
    with pytest.raises(EnrichError, match="is not the result of this job"):
        enrich(tmp_path / "in", tmp_path / "out", **wanted, resume=True)


def test_rows_skipped_by_an_earlier_run_must_be_accepted(
    tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", 1)
    source = write(tmp_path, 2, query=vectors_of([[1.0]], [[1.0, 2.0, 3.0, 4.0]]))
    output = tmp_path / "out.parquet"
    skip = read_options({"model": SELF, "column": "query", "on_error": "skip"})
    resume = read_options({"model": SELF, "column": "query", "on_error": "skip", "resume": True})
    fail = read_options({"model": SELF, "column": "query", "resume": True})
    backend = LocalBackend(artifacts, skip, "cpu")

    def one(
        made: plan.JobPlan, chunks: Iterable[plan.Chunk], *rest: Any
    ) -> Generator[plan.Chunk, None, None]:
        yield from islice(partial(run_chunks, backend=backend)(made, chunks, *rest), 1)
        raise EnrichError("after the first")

    with closing(backend):
        with pytest.raises(EnrichError, match="after the first"):
            run_job(source, output, backend, skip, runner=one)
        with pytest.raises(EnrichError, match="1 row was refused and skipped by an earlier run"):
            run_job(source, output, backend, fail)
        assert not output.exists()
        summary = run_job(source, output, backend, resume)
    assert (summary.rows, summary.resumed_rows, summary.refused) == (2, 2, 1)


def test_an_existing_output_is_kept_until_the_new_one_is_complete(tmp_path: Path, artifacts: Path) -> None:
    source, output = write(tmp_path, 100), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {**QUERY, "model_repository": artifacts}
    enrich(str(source), str(output), **wanted)
    before = output.stat()
    with pytest.raises(EnrichError, match=r"exists: --overwrite \(overwrite=True\) replaces it"):
        enrich(str(source), str(output), **wanted)
    with pytest.raises(EnrichError, match="missing"):
        enrich(str(source), str(output), **{**wanted, "column": "missing"}, overwrite=True)
    assert output.stat() == before
    enrich(str(source), str(output), **wanted, pool="mean", overwrite=True)
    assert output.stat().st_ino != before.st_ino
