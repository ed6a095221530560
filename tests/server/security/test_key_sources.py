"""Keys of a URL and of a file: rotated, unreachable, and fetched no more often than allowed."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attention_serving.server.security.errors import SecurityFileError
from attention_serving.server.security.key_sources import FileKeys, UrlKeys, check_url, shown
from attention_serving.server.security.watched_file import NullSecurityObserver
from tests.server.security.samples import LOOK_SECONDS, eventually, key_set, public_jwk

OBSERVER = NullSecurityObserver()


class Issuer:
    """An HTTP server of a key set that the test changes."""

    def __init__(self) -> None:
        self.data, self.status, self.location, self.fetches = b"", 200, "", 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetches += 1
                self.send_response(issuer.status)
                if issuer.location:
                    self.send_header("Location", issuer.location)
                self.send_header("Content-Length", str(len(issuer.data)))
                self.end_headers()
                self.wfile.write(issuer.data)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    issuer.data = key_set(public_jwk("ES256"))
    yield issuer
    issuer.close()


def has(keys: UrlKeys | FileKeys, key_id: str) -> bool:
    return keys.keys is not None and keys.keys.find(key_id) is not None


def test_a_new_key_is_fetched_when_it_is_wanted(issuer: Issuer) -> None:
    keys = UrlKeys(issuer.url, OBSERVER, pause_seconds=0.01)
    try:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256"), public_jwk("ES256", "two"))
        keys.want()
        assert eventually(lambda: has(keys, "two"))
    finally:
        keys.close()


def test_keys_are_fetched_again_after_a_while(issuer: Issuer) -> None:
    keys = UrlKeys(issuer.url, OBSERVER, refresh_seconds=0.01, pause_seconds=0.01)
    try:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256", "two"))
        assert eventually(lambda: has(keys, "two") and not has(keys, "one"))
    finally:
        keys.close()


def test_unknown_keys_do_not_make_the_server_ask_again_and_again(issuer: Issuer) -> None:
    keys = UrlKeys(issuer.url, OBSERVER, pause_seconds=3600)
    try:
        assert eventually(lambda: has(keys, "one"))
        for _ in range(100):
            keys.want()
        assert issuer.fetches == 1
    finally:
        keys.close()


@pytest.mark.parametrize(
    ("status", "data", "location"),
    [(500, b"", ""), (200, b"{", ""), (200, b'{"keys": []}', ""), (302, b"", "http://127.0.0.1:1/")],
    ids=["error", "damaged", "empty", "redirected"],
)
def test_keys_stay_if_a_later_fetch_fails(issuer: Issuer, status: int, data: bytes, location: str) -> None:
    keys = UrlKeys(issuer.url, OBSERVER, refresh_seconds=0.01, pause_seconds=0.01)
    try:
        assert eventually(lambda: has(keys, "one"))
        issuer.status, issuer.data, issuer.location = status, data, location
        before = issuer.fetches
        assert eventually(lambda: issuer.fetches > before + 2)
        assert has(keys, "one")
    finally:
        keys.close()


def test_an_issuer_that_comes_late_is_found() -> None:
    issuer = Issuer()
    issuer.status = 503
    keys = UrlKeys(issuer.url, OBSERVER, pause_seconds=0.01)
    try:
        assert eventually(lambda: issuer.fetches > 1)
        assert keys.keys is None
        issuer.status, issuer.data = 200, key_set(public_jwk("ES256"))
        assert eventually(lambda: has(keys, "one"))
    finally:
        keys.close()
        issuer.close()


@pytest.mark.parametrize(
    "url", ["https://issuer.example/keys", "http://127.0.0.1:8/", "http://[::1]/", "http://localhost/keys"]
)
def test_these_urls_may_be_used(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://issuer.example/keys",
        "http://10.0.0.1/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "https:///keys",
    ],
)
def test_other_urls_may_not(url: str) -> None:
    with pytest.raises(SecurityFileError, match="must begin with https://"):
        UrlKeys(url, OBSERVER)


def test_the_log_shows_no_password_of_a_url() -> None:
    assert shown("https://user:t0p@issuer.example:8/keys?key=s3cret") == "https://issuer.example/keys"


def test_keys_of_a_file_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set(public_jwk("ES256")))
    keys = FileKeys(path, OBSERVER, look_seconds=LOOK_SECONDS)
    try:
        assert has(keys, "one")
        path.write_bytes(b"{")
        path.with_suffix(".new").write_bytes(key_set(public_jwk("ES256", "two")))
        path.with_suffix(".new").replace(path)
        assert eventually(lambda: has(keys, "two"))
        assert not has(keys, "one")
    finally:
        keys.close()
