"""Jobs whose servers come and go."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attention_client.enrich import EnrichError, Summary
from attention_client.enrich.servers import resolve

from clients.enrich import enrich
from scripts.local_server import ServerProcess, serving
from tests.clients.enrich.tables import assert_enriched, read, write
from tests.server.samples import SELF

ROWS = 60_000
PATIENCE_SECONDS = 120
CHECKED_ROWS = 500


class Servers:
    """Servers that a test starts and kills."""

    def __init__(self, artifacts: Path, folder: Path, stack: ExitStack) -> None:
        self._artifacts = artifacts
        self._folder = folder
        self._stack = stack

    def start(self, *options: str) -> ServerProcess:
        log = self._folder / f"{time.monotonic_ns()}.log"
        return self._stack.enter_context(serving(self._artifacts, log, *options))


@pytest.fixture
def servers(artifacts: Path, tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(artifacts, tmp_path, stack)


class Job:
    """A job on its own thread."""

    def __init__(self, folder: Path, targets: list[str], **options: Any) -> None:
        existing = folder / "table.parquet"
        self.source = existing if existing.exists() else write(folder, ROWS)
        self.output = folder / "out.parquet"
        self._pool = ThreadPoolExecutor(1)
        wanted: dict[str, Any] = {"model": SELF, "column": "query", "quiet": True, **options}
        self.done: Future[Summary] = self._pool.submit(
            enrich, str(self.source), str(self.output), servers=targets, **wanted
        )

    def wait_for_a_chunk(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not list(self.output.parent.glob("*.partial/chunks/*.json")) and time.monotonic() < until:
            time.sleep(0.01)
        assert not self.done.done()

    def assert_right(self) -> None:
        assert self.done.result(PATIENCE_SECONDS).rows == ROWS
        result, source = read(self.output), read(self.source)
        for start in (0, ROWS // 2, ROWS - CHECKED_ROWS):
            assert_enriched(
                result.slice(start, CHECKED_ROWS), source.slice(start, CHECKED_ROWS), SELF, ["query"]
            )
        assert result.select(source.column_names).equals(source)


def test_what_a_server_leaves_undone_another_does(tmp_path: Path, servers: Servers) -> None:
    lost, kept = servers.start(), servers.start()
    job = Job(tmp_path, [lost.target, kept.target])
    job.wait_for_a_chunk()
    lost.process.kill()
    job.assert_right()


def test_a_job_waits_for_its_only_server_to_come_back(tmp_path: Path, servers: Servers) -> None:
    lost = servers.start()
    job = Job(tmp_path, [lost.target])
    job.wait_for_a_chunk()
    lost.process.kill()
    lost.process.wait()
    servers.start(f"--port={lost.port}")
    job.assert_right()


def test_a_job_whose_server_stays_away_ends_and_can_be_resumed(tmp_path: Path, servers: Servers) -> None:
    lost = servers.start()
    job = Job(tmp_path, [lost.target], retry_seconds=1.0)
    job.wait_for_a_chunk()
    lost.process.kill()
    with pytest.raises(EnrichError, match="no server has answered for 1 s; last: "):
        job.done.result(PATIENCE_SECONDS)
    assert not job.output.exists()
    again = Job(tmp_path, [servers.start().target], resume=True)
    again.assert_right()
    assert again.done.result().resumed_rows


def test_a_row_that_no_message_holds_is_refused_and_no_other(tmp_path: Path, servers: Servers) -> None:
    server = servers.start("--max-message-bytes=1048576")
    rows = [[[1.0, 2.0, 3.0, 4.0]] * length for length in (2, 70_000, 3)]
    source = write(tmp_path, 3, query=rows)
    output = tmp_path / "out.parquet"
    wanted: dict[str, Any] = {"model": SELF, "column": "query", "servers": [server.target], "quiet": True}
    summary = enrich(str(source), str(output), **wanted, on_error="skip")
    assert (summary.rows, summary.refused) == (3, 1)
    assert [cell and len(cell) for cell in read(output).column("context_vectors").to_pylist()] == [2, None, 3]


@pytest.mark.parametrize("target", ["127.0.0.1:8001", "localhost:8001", "unix:/tmp/socket", "dns:///host:1"])
def test_a_target_that_is_one_server_stays_as_it_is(target: str) -> None:
    assert resolve(target) == [target]


def test_a_name_with_several_addresses_is_as_many_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("servers:8001") == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]


def test_a_name_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(EnrichError, match=r"nobody\.invalid:8001"):
        resolve("nobody.invalid:8001")
