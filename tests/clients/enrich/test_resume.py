"""Jobs that are killed, go on, and give what an uninterrupted one gives."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from attention_client.enrich import EnrichError, make_options, plan
from attention_client.enrich.job import run_job
from attention_client.enrich.worker import run_chunks

from clients.enrich import enrich
from clients.enrich.local import LocalBackend
from tests.clients.enrich.tables import read, write
from tests.server.samples import ROOT, SELF

ROWS = 60_000
KILLS = 5
PATIENCE_SECONDS = 120


@dataclass(frozen=True)
class Job:
    """The command on one table."""

    source: Path
    output: Path
    artifacts: Path

    def command(self, *options: str) -> list[str]:
        where = ["--model-repository", str(self.artifacts), "--model", SELF, "--column", "query"]
        paths = [str(self.source), str(self.output)]
        return [sys.executable, "-m", "clients.enrich", *paths, *where, *options]

    def start(self, *options: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command(*options), cwd=ROOT, stderr=subprocess.PIPE)

    def run(self, *options: str) -> bytes:
        done = subprocess.run(
            self.command(*options), cwd=ROOT, check=True, capture_output=True, timeout=PATIENCE_SECONDS
        )
        return done.stdout

    @property
    def partial(self) -> Path:
        return self.output.with_name(self.output.name + ".partial")

    @property
    def done(self) -> int:
        """How many chunks are recorded."""
        return len(list(self.partial.glob("chunks/*.json")))

    def wait_for_a_chunk(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.done and time.monotonic() < until:
            time.sleep(0.01)
        assert self.done


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("resume"), ROWS, group_rows=25_000)


def test_a_job_that_is_killed_again_and_again_gives_the_same_bytes(
    tmp_path: Path, source: Path, artifacts: Path
) -> None:
    whole = Job(source, tmp_path / "whole.parquet", artifacts)
    job = Job(source, tmp_path / "output.parquet", artifacts)
    started = time.monotonic()
    whole.run()
    duration = time.monotonic() - started
    rng = np.random.default_rng(0)
    kills = 0
    while kills < KILLS and not job.output.exists():
        process = job.start("--resume")
        time.sleep(rng.uniform(0.2, duration))
        kills += process.poll() is None
        process.kill()
        process.communicate()
    if not job.output.exists():
        job.run("--resume")
    assert kills
    assert read(job.output).equals(read(whole.output), check_metadata=True)
    assert not job.partial.exists()


def test_what_is_done_is_not_done_again(tmp_path: Path, source: Path, artifacts: Path) -> None:
    job = Job(source, tmp_path / "output.parquet", artifacts)
    process = job.start()
    job.wait_for_a_chunk()
    process.kill()
    process.communicate()
    before = job.done
    paths = (str(source), str(job.output))
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "model_repository": artifacts, "quiet": True}
    with pytest.raises(EnrichError, match="holds an unfinished job: --resume goes on with it"):
        enrich(*paths, **wanted)
    with pytest.raises(EnrichError, match="holds a job with other options; it cannot be resumed"):
        enrich(*paths, **wanted, pool="mean", resume=True)
    summary = json.loads(job.run("--resume", "--json", "--quiet"))
    assert (summary["rows"], summary["resumed_rows"]) == (ROWS, before * plan.CHUNK_ROWS)
    with pytest.raises(EnrichError, match="exists; --overwrite replaces it"):
        enrich(*paths, **wanted, resume=True)


def test_two_jobs_do_not_write_one_output(tmp_path: Path, source: Path, artifacts: Path) -> None:
    job = Job(source, tmp_path / "output.parquet", artifacts)
    process = job.start("--quiet")
    job.wait_for_a_chunk()
    process.send_signal(signal.SIGSTOP)
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "model_repository": artifacts, "quiet": True}
    with pytest.raises(EnrichError, match="another job is at"):
        enrich(str(source), str(job.output), **wanted, resume=True)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (0, b"")
    assert read(job.output).num_rows == ROWS


def test_what_was_skipped_is_not_passed_off_as_done(
    tmp_path: Path, artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", 1)
    cells = pa.array([[[1.0]], [[1.0, 2.0, 3.0, 4.0]]], pa.list_(pa.list_(pa.float32())))
    source, output = str(write(tmp_path, 2, query=cells)), str(tmp_path / "out.parquet")
    backend = LocalBackend(artifacts, SELF)
    skip, fail = (make_options("query", None, None, "out", pool="none", weights=False, on_error=on_error)
                  for on_error in ("skip", "fail"))  # fmt: skip

    def one(made: plan.Plan, chunks: Iterable[plan.Chunk], *told: Any) -> Generator[plan.Chunk, None, None]:
        yield from islice(run_chunks(made, chunks, backend, skip, *told), 1)
        raise EnrichError("after the first")

    with closing(backend):
        with pytest.raises(EnrichError, match="after the first"):
            run_job(source, output, backend, skip, quiet=True, do=one)
        with pytest.raises(EnrichError, match="refused rows: 1; --on-error skip goes on"):
            run_job(source, output, backend, fail, quiet=True, resume=True)
        assert not Path(output).exists()
        summary = run_job(source, output, backend, skip, quiet=True, resume=True)
    assert (summary.rows, summary.resumed_rows, summary.refused) == (2, 2, 1)


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, source: Path, artifacts: Path) -> None:
    job = Job(source, tmp_path / "output.parquet", artifacts)
    process = job.start()
    job.wait_for_a_chunk()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    assert errors.decode().endswith("interrupted: --resume goes on\n")
    assert not job.output.exists()


def test_an_output_that_is_there_is_kept_until_the_new_one_is(tmp_path: Path, artifacts: Path) -> None:
    source, output = write(tmp_path, 100), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "model_repository": artifacts, "quiet": True}
    enrich(str(source), str(output), **wanted)
    before = output.stat()
    with pytest.raises(EnrichError, match="exists; --overwrite replaces it"):
        enrich(str(source), str(output), **wanted)
    with pytest.raises(EnrichError, match="nobody"):
        enrich(str(source), str(output), **{**wanted, "column": "nobody"}, overwrite=True)
    assert output.stat() == before
    enrich(str(source), str(output), **wanted, pool="mean", overwrite=True)
    assert output.stat().st_ino != before.st_ino
