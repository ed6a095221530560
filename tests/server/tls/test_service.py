"""A whole service with mutual TLS: renewal under load on its three faces; and files that end it."""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from attention_client import AttentionClient, TlsFiles

from tests.server.samples import SELF
from tests.server.security.samples import eventually
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

AUTHORITY, CLIENTS = Authority("server"), Authority("clients")
CLIENT = CLIENTS.issue("job.example")
QUERY = np.ones((3, 4), np.float32)
BODY = {"inputs": [{"name": "query", "shape": [1, 3, 4], "datatype": "FP32", "data": [1] * 12}]}

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]


class Service:
    """A running service, and the files of its certificates and of its clients'."""

    def __init__(self, running: Watched, mounted: Mounted, folder: Path) -> None:
        self.mounted = mounted
        found = running.until(r" serving .*\bport=(\d+) metrics_port=(\d+) .*\bhttp_port=(\d+)")
        self.grpc, self.metrics, self.http = (int(port) for port in found.groups())
        for name, content in (("ca", AUTHORITY.pem), ("crt", CLIENT.certificate), ("key", CLIENT.key)):
            (folder / name).write_bytes(content)
        self.files = TlsFiles(ca=folder / "ca", certificate=folder / "crt", key=folder / "key")
        self.context: ssl.SSLContext = client_context(AUTHORITY.pem, CLIENT, folder)

    def client(self) -> AttentionClient:
        return AttentionClient(f"{HOST}:{self.grpc}", credentials=self.files, timeout=30)

    def ask(self, port: int, method: str, path: str, body: object = None) -> tuple[int, str]:
        connection = http.client.HTTPSConnection(HOST, port, timeout=60, context=self.context)
        with closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()

    def infer(self) -> None:
        assert self.ask(self.http, "POST", f"/v2/models/{SELF}/infer", BODY)[0] == 200

    def metric(self, name: str) -> float:
        """The value of a sample; negative if there is none."""
        _, text = self.ask(self.metrics, "GET", "/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else -1

    def shows(self, pair: Pair) -> bool:
        """Whether all faces show a certificate; several workers are asked several times."""
        ports = (self.grpc,) * 8 + (self.http, self.metrics)
        return all(presented(port, self.context).split() == pair.certificate.split() for port in ports)


@pytest.fixture
def service(artifacts: Path, tmp_path: Path) -> Iterator[Service]:
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(), CLIENTS.pem)
    with watched(artifacts, tmp_path, "--workers=2", "--http-port=0", *mounted.options) as running:
        yield Service(running, mounted, tmp_path)


def test_renewals_under_load_fail_no_call(service: Service) -> None:
    ended, failed = threading.Event(), list[object]()
    done = {"kept": 0, "new": 0, "http": 0}

    def ask(what: str) -> None:
        with service.client() as kept:
            while not ended.is_set():
                try:
                    if what == "http":
                        service.infer()
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
    for _ in range(2):
        before, renewed = dict(done), AUTHORITY.issue(ends=3 * HOUR)
        service.mounted.write(renewed, CLIENTS.pem)
        shown = eventually(lambda renewed=renewed: service.shows(renewed))
        more = eventually(lambda before=before: failed or all(done[what] > before[what] + 1 for what in done))
    ended.set()
    for thread in threads:
        thread.join()
    assert (failed, shown, more) == ([], True, True)
    assert service.metric('attention_tls_reloads_total{result="ok"}') >= 2
    service.mounted.write(Pair(AUTHORITY.issue().certificate, key_pem(new_key())), CLIENTS.pem)
    assert eventually(lambda: service.metric('attention_tls_reloads_total{result="failed"}') >= 1)
    service.infer()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bad_pair_or_a_public_address_without_one_ends_the_server(
    artifacts: Path, tmp_path: Path, workers: str
) -> None:
    mounted = Mounted(tmp_path / "tls", AUTHORITY.issue(ends=-HOUR), CLIENTS.pem)
    common = ("--model-repository", str(artifacts), "--port=0", "--metrics-port=0", f"--workers={workers}")
    for options, message in (
        (mounted.server_options, "the certificate expired at"),
        (["--host=0.0.0.0"], "0.0.0.0 can be reached from other machines"),
    ):
        status, said = run_server(*common, *options)
        (line,) = said.splitlines()
        assert (status, " ERROR cannot serve " in line, message in line) == (1, True, True)
