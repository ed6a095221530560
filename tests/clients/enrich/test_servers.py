"""Jobs whose servers fail and restart, refuse a row, or need certificates."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from attention_client.enrich import plan
from attention_client.enrich.backends import resolve
from typer.testing import CliRunner

from attention_serving.enrich import enrich
from attention_serving.enrich.__main__ import app
from scripts.local_server import ServerProcess, serving
from tests.clients.enrich.tables import QUERY, assert_enriched, read, write
from tests.clients.enrich.test_resume import finished
from tests.clients.tls_server import tls_server
from tests.server.samples import SELF
from tests.server.seams import wait_until
from tests.support.certificates import Authority, Mounted

ROWS, CHUNK_ROWS = 24_000, 1_000
PATIENCE_SECONDS = 120
CLIENTS = Authority("clients")
Start = Callable[..., ServerProcess]
thorough = pytest.mark.thorough


@pytest.fixture
def start(artifacts: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts servers that a test kills."""
    with ExitStack() as stack:
        yield lambda *options: stack.enter_context(
            serving(artifacts, tmp_path / f"{time.monotonic_ns()}.log", *options)
        )


@thorough
def test_a_job_continues_on_another_server_and_when_its_only_server_restarts(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_ROWS", CHUNK_ROWS)
    source, output = write(tmp_path, ROWS), tmp_path / "out.parquet"

    def wait_for_chunks(more: int) -> None:
        expected = more + finished(output)
        wait_until(lambda: finished(output) >= expected or job.done())
        assert not job.done()

    lost, kept = start(), start()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(enrich, source, output, **QUERY, servers=[lost.target, kept.target])
        wait_for_chunks(1)
        lost.process.kill()
        wait_for_chunks(2)
        kept.process.kill()
        kept.process.wait()
        start(f"--port={kept.port}")
        summary = job.result(PATIENCE_SECONDS)
    assert summary.rows == ROWS
    assert set(summary.server_failures) == {lost.target, kept.target}
    for first in (0, ROWS // 2, ROWS - 500):
        result, given = (read(path).slice(first, 500) for path in (output, source))
        assert_enriched(result, given)


@thorough
def test_a_row_larger_than_a_message_is_refused_and_no_other(tmp_path: Path, start: Start) -> None:
    server = start("--max-message-bytes=1048576")
    rows = [[[1.0, 2.0, 3.0, 4.0]] * length for length in (2, 70_000, 3)]
    table, output = write(tmp_path, 3, query=rows), tmp_path / "out.parquet"
    summary = enrich(table, output, **QUERY, servers=[server.target], on_error="skip")
    assert (summary.rows, summary.refused) == (3, 1)
    assert [cell and len(cell) for cell in read(output).column("context_vectors").to_pylist()] == [2, None, 3]


def test_each_address_of_a_host_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("127.0.0.1:8001", "localhost:8001", "unix:/tmp/socket", "dns:///host:1"):
        assert resolve(target) == [target]
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8001)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8001)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8001, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("servers:8001") == ["10.0.0.1:8001", "10.0.0.2:8001", "[fd00::1]:8001"]


@thorough
@pytest.mark.parametrize(
    ("name", "expected"),
    [("server.example", "no model tiny-self"), ("other.example", "(?i)verif|hostname|peer name")],
)
def test_the_command_shows_a_certificate_and_verifies_the_name_of_a_server_not_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
) -> None:
    with tls_server(CLIENTS.pem, "server.example") as server:
        monkeypatch.setattr("attention_client.enrich.backends.resolve", lambda _: [server.target])
        client = Mounted(tmp_path / "client", CLIENTS.issue("job.example"), server.ca)
        given = [write(tmp_path, 1), tmp_path / "out.parquet", "--model", SELF, "--column", "query"]
        given += ["--server", f"{name}:{server.target.partition(':')[2]}", "--retry-seconds", "3"]
        given += ["--ca", client.ca, "--certificate", client.certificate, "--key", client.key]
        done = CliRunner().invoke(app, list(map(str, given)))
    assert done.exit_code == 1
    assert re.search(expected, done.stderr)
