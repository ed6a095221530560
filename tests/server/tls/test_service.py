"""A whole service with mutual TLS: its three faces, with one and two workers."""

import http.client
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, DeadlineExceededError, TlsFiles, UnavailableError

from tests.server.samples import SELF, WIDTHS
from tests.server.test_settings import run_server
from tests.server.watched import Watched, watched
from tests.support.certificates import (
    HOST,
    HOUR,
    Authority,
    Mounted,
    Pair,
    client_context,
    key_pem,
    new_key,
    presented,
)

AUTHORITY, CLIENTS, OTHER = Authority("server"), Authority("clients"), Authority("other")
CLIENT = CLIENTS.issue("job.example")
WIDTH = WIDTHS["query"]
QUERY = np.arange(3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)
PATIENCE_SECONDS = 60
PATH = f"/v2/models/{SELF}/infer"

pytestmark = pytest.mark.timeout(300)


def ask(port: int, method: str, path: str, context: ssl.SSLContext, body: object = None) -> tuple[int, bytes]:
    """Status and body of the answer to one request."""
    connection = http.client.HTTPSConnection(HOST, port, timeout=60, context=context)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Service:
    """A running service, and the files of its certificates and of its clients'."""

    def __init__(self, running: Watched, mounted: Mounted, folder: Path) -> None:
        self.running, self.mounted = running, mounted
        found = running.until(r" serving .*\bport=(\d+) metrics_port=(\d+) .*\bhttp_port=(\d+)")
        self.grpc, self.metrics, self.http = (int(port) for port in found.groups())
        for name, content in (("ca", AUTHORITY.pem), ("crt", CLIENT.certificate), ("key", CLIENT.key)):
            (folder / name).write_bytes(content)
        self.files = TlsFiles(ca=folder / "ca", certificate=folder / "crt", key=folder / "key")
        self.context = client_context(AUTHORITY.pem, CLIENT, folder)

    def client(self, files: TlsFiles | None = None) -> AttentionClient:
        return AttentionClient(f"{HOST}:{self.grpc}", credentials=files or self.files, timeout=30)

    def infer(self) -> int:
        tensor = {"name": "query", "shape": [1, 3, WIDTH], "datatype": "FP32", "data": QUERY.ravel().tolist()}
        return ask(self.http, "POST", PATH, self.context, {"inputs": [tensor]})[0]

    def metric(self, name: str) -> float:
        """The value of a sample; negative if there is none."""
        _, text = ask(self.metrics, "GET", "/metrics", self.context)
        found = re.search(rf"^{re.escape(name)} (\S+)$", text.decode(), re.MULTILINE)
        return float(found[1]) if found else -1

    def until_renewed(self, pair: Pair) -> None:
        """Waits until all three faces show a certificate; several workers are asked several times."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for port in (self.grpc,) * 8 + (self.http, self.metrics):
            while presented(port, self.context).split() != pair.certificate.split():
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.fixture(params=[1, 2], ids=["one worker", "two workers"])
def service(artifacts: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)
    options = [f"--workers={request.param}", "--http-port=0", *mounted.options]
    with watched(artifacts, tmp_path, *options) as running:
        yield Service(running, mounted, tmp_path)


def test_a_service(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        expected = client.attend(SELF, QUERY).context_vectors
    assert expected.shape == (3, WIDTH)
    assert service.infer() == 200
    assert service.metric('attention_tls_certificate_expiry_timestamp_seconds{certificate="server"}') > 0
    _refuses_other_clients(service, tmp_path)
    _renews_under_load(service)
    _keeps_the_old_pair(service)
    service.running.stop()
    assert service.running.process.wait(timeout=60) == 0


def _refuses_other_clients(service: Service, tmp_path: Path) -> None:
    for files in (TlsFiles(ca=service.files.ca), _files(tmp_path, OTHER.issue("job.example"))):
        with service.client(files) as client, pytest.raises((UnavailableError, DeadlineExceededError)):
            client.models(timeout=1)
    wrong = tmp_path / "wrong-ca"
    wrong.write_bytes(OTHER.pem)
    files = TlsFiles(ca=wrong, certificate=service.files.certificate, key=service.files.key)
    with service.client(files) as client, pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
        client.models(timeout=3)
    for port in (service.http, service.metrics):
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            ask(port, "GET", "/", client_context(AUTHORITY.pem))


def _files(folder: Path, pair: Pair) -> TlsFiles:
    certificate, key = folder / "other.crt", folder / "other.key"
    certificate.write_bytes(pair.certificate)
    key.write_bytes(pair.key)
    return TlsFiles(ca=folder / "ca", certificate=certificate, key=key)


def _renews_under_load(service: Service) -> None:
    ended = threading.Event()
    done = {"kept": 0, "new": 0, "http": 0}
    failed: list[object] = []

    def ask(what: str) -> None:
        with service.client() as kept:
            while not ended.is_set():
                try:
                    if what == "http":
                        assert service.infer() == 200
                    elif what == "kept":
                        kept.attend(SELF, QUERY)
                    else:
                        with service.client() as client:
                            client.attend(SELF, QUERY)
                    done[what] += 1
                except Exception as error:
                    failed.append((what, error))

    threads = [threading.Thread(target=ask, args=(what,)) for what in done]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            before = dict(done)
            renewed = AUTHORITY.issue(ends=3 * HOUR)
            service.mounted.write(renewed, CLIENTS.pem)
            service.until_renewed(renewed)
            while not failed and any(done[what] - before[what] < 2 for what in done):
                ended.wait(0.01)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failed == []
    assert service.metric('attention_tls_reloads_total{result="ok"}') >= 2


def _keeps_the_old_pair(service: Service) -> None:
    pair = Pair(OTHER.issue().certificate, key_pem(new_key()))
    service.mounted.write(pair, CLIENTS.pem)
    service.running.until(r" WARNING not reloaded; what is in use is kept .*does not belong to")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while service.metric('attention_tls_reloads_total{result="failed"}') < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with service.client() as client:
        client.attend(SELF, QUERY)
    assert service.infer() == 200


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (AUTHORITY.issue(ends=-HOUR), "the certificate expired at"),
        (Pair(AUTHORITY.issue().certificate, key_pem(new_key())), "the key does not belong to the"),
        (Pair(b"x", b"y"), "does not contain a certificate in PEM"),
    ],
    ids=["expired", "mismatched", "not PEM"],
)
def test_a_bad_pair_ends_the_server(
    artifacts: Path, tmp_path: Path, workers: str, pair: Pair, message: str
) -> None:
    mounted = Mounted(tmp_path / "tls", pair, CLIENTS.pem)
    options = ["--port=0", "--metrics-port=0", f"--workers={workers}", *mounted.server_options]
    status, said = run_server("--model-repository", str(artifacts), *options)
    assert status == 1
    (line,) = said.splitlines()
    assert " ERROR cannot serve " in line
    assert message in line
