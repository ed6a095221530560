"""Jobs whose servers fail and restart."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from attention_client.enrich import EnrichError, ServersUnavailableError, Summary, plan
from attention_client.enrich.backend import Role
from attention_client.enrich.options import read_options
from attention_client.enrich.servers import ServerBackend, resolve
from typer.testing import CliRunner

from attention_serving.enrich import enrich
from attention_serving.enrich.__main__ import app
from scripts.local_server import ServerProcess, serving
from tests.clients.enrich.tables import assert_enriched, read, write
from tests.server.samples import SELF

ROWS, CHUNK_ROWS = 24_000, 2_000
PATIENCE_SECONDS = 120
CHECKED_ROWS = 500
OPTIONS = read_options({"model": SELF, "column": "query"})


Start = Callable[..., ServerProcess]


@pytest.fixture
def start(artifacts: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers that a test kills."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(
            serving(artifacts, tmp_path / f"{time.monotonic_ns()}.log", *options)
        )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("servers"), ROWS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)


class Job:
    """A job on its own thread."""

    def __init__(self, source: Path, folder: Path, targets: list[str], **options: Any) -> None:
        self.source = source
        self.output = folder / "out.parquet"
        self._pool = ThreadPoolExecutor(1)
        wanted: dict[str, Any] = {"model": SELF, "column": "query", **options}
        self.done: Future[Summary] = self._pool.submit(
            enrich, str(self.source), str(self.output), servers=targets, **wanted
        )

    def wait_for_a_chunk(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(self.output.parent.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
            time.sleep(0.01)
        assert not self.done.done()

    def assert_correct(self) -> None:
        assert self.done.result(PATIENCE_SECONDS).rows == ROWS
        result, source = read(self.output), read(self.source)
        for start in (0, ROWS // 2, ROWS - CHECKED_ROWS):
            assert_enriched(
                result.slice(start, CHECKED_ROWS), source.slice(start, CHECKED_ROWS), SELF, ["query"]
            )
        assert result.select(source.column_names).equals(source)


def test_requests_of_a_killed_server_are_sent_to_another(tmp_path: Path, source: Path, start: Start) -> None:
    lost, kept = start(), start()
    job = Job(source, tmp_path, [lost.target, kept.target])
    job.wait_for_a_chunk()
    lost.process.kill()
    job.assert_correct()
    failures = job.done.result().server_failures
    assert set(failures) == {lost.target}
    assert failures[lost.target] >= 1


@pytest.mark.parametrize("position", [0, 1], ids=["first", "second"])
def test_a_job_goes_on_without_a_server_that_is_down_at_the_start(
    tmp_path: Path, sample_server: ServerProcess, start: Start, position: int
) -> None:
    lost = start()
    lost.process.kill()
    lost.process.wait()
    targets = [sample_server.target]
    targets.insert(position, lost.target)
    options = ["--model", SELF, "--column", "query", "--quiet"]
    arguments = [write(tmp_path, 20), tmp_path / "out.parquet", *options, "--server", ",".join(targets)]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.stderr
    assert_enriched(read(tmp_path / "out.parquet"), read(tmp_path / "table.parquet"), SELF, ["query"])
    assert re.search(rf"^server {lost.target} failed (1 time|\d+ times)$", done.stdout, re.MULTILINE)
    assert sample_server.target not in done.stdout


def test_a_job_continues_when_its_only_server_restarts(tmp_path: Path, source: Path, start: Start) -> None:
    lost = start()
    job = Job(source, tmp_path, [lost.target])
    job.wait_for_a_chunk()
    lost.process.kill()
    lost.process.wait()
    start(f"--port={lost.port}")
    job.assert_correct()


def test_a_job_whose_server_stays_away_ends_and_can_be_resumed(
    tmp_path: Path, source: Path, start: Start
) -> None:
    lost = start()
    job = Job(source, tmp_path, [lost.target], retry_seconds=0.5)
    job.wait_for_a_chunk()
    lost.process.kill()
    with pytest.raises(ServersUnavailableError, match=r"no server has answered for 0\.5 s; the last error: "):
        job.done.result(PATIENCE_SECONDS)
    assert not job.output.exists()
    again = Job(source, tmp_path, [start().target], resume=True)
    again.assert_correct()
    assert again.done.result().resumed_rows


def test_without_patience_a_job_uses_a_server_that_answers_and_ends_without_one(
    tmp_path: Path, sample_server: ServerProcess, start: Start
) -> None:
    table = write(tmp_path, 20)
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "retry_seconds": 0}
    assert enrich(str(table), str(tmp_path / "a.parquet"), **wanted, servers=sample_server.target).rows == 20
    lost = start()
    lost.process.kill()
    lost.process.wait()
    with pytest.raises(EnrichError, match=str(lost.port)):
        enrich(str(table), str(tmp_path / "b.parquet"), **wanted, servers=lost.target)
    with pytest.raises(EnrichError, match=str(lost.port)):
        enrich(str(table), str(tmp_path / "b.parquet"), **wanted, servers=[lost.target, sample_server.target])


def test_a_row_larger_than_a_message_is_refused_and_no_other(tmp_path: Path, start: Start) -> None:
    server = start("--max-message-bytes=1048576")
    rows = [[[1.0, 2.0, 3.0, 4.0]] * length for length in (2, 70_000, 3)]
    table, output = write(tmp_path, 3, query=rows), tmp_path / "out.parquet"
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "servers": [server.target]}
    summary = enrich(str(table), str(output), **wanted, on_error="skip")
    assert (summary.rows, summary.refused) == (3, 1)
    assert [cell and len(cell) for cell in read(output).column("context_vectors").to_pylist()] == [2, None, 3]


def test_an_unexpected_error_ends_the_job(sample_server: ServerProcess) -> None:
    with closing(ServerBackend(sample_server.target, OPTIONS, retry_seconds=10)) as backend:
        damaged = backend.submit({Role.QUERY: [None]})
        with pytest.raises(EnrichError, match=r"unexpected error in the stream to 127.*'NoneType'"):
            damaged()
        later = backend.submit({Role.QUERY: [None]})
        with pytest.raises(EnrichError, match="unexpected error"):
            later()


@pytest.mark.parametrize("target", ["127.0.0.1:8001", "localhost:8001", "unix:/tmp/socket", "dns:///host:1"])
def test_a_target_that_is_one_server_is_not_resolved(target: str) -> None:
    assert resolve(target) == [target]


def test_each_address_of_a_host_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("servers:8001") == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]


@pytest.mark.parametrize(
    ("target", "words"), [("missing.invalid:8001", "missing.invalid:8001: "), ("127.0.0.1:65536", "65536")]
)
def test_an_address_that_does_not_exist_is_an_error(target: str, words: str) -> None:
    with pytest.raises(EnrichError, match=words):
        ServerBackend(target, OPTIONS, retry_seconds=1)


def test_no_server_is_an_error() -> None:
    with pytest.raises(EnrichError, match="name at least one server as HOST:PORT"):
        ServerBackend([], OPTIONS, retry_seconds=1)
