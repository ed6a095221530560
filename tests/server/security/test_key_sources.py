"""Keys of a URL and of a file: rotated, unreachable, and fetched no more often than allowed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attention_serving.server.errors import IdentityError
from attention_serving.server.security import web_tokens as module
from attention_serving.server.security.web_tokens import Keys, check_url, shown
from tests.server.security.samples import eventually, key_set, looking_often, public_jwk


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


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure or an unknown key has the keys fetched at once."""
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)


@contextmanager
def keys_of(where: str | Path) -> Iterator[Keys]:
    with looking_often():
        keys = Keys(str(where))
    yield keys
    keys.close()


def has(keys: Keys, *key_ids: str) -> bool:
    return set(keys.current or ()) == set(key_ids)


@pytest.mark.usefixtures("often")
def test_a_new_key_is_fetched_when_it_is_wanted(issuer: Issuer) -> None:
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256"), public_jwk("ES256", "two"))
        keys.want()
        assert eventually(lambda: has(keys, "one", "two"))
        assert issuer.fetches == 2


def test_keys_are_fetched_again_after_a_while(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.01)
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256", "two"))
        assert eventually(lambda: has(keys, "two"))


def test_unknown_keys_do_not_make_the_server_ask_again_and_again(issuer: Issuer) -> None:
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        for _ in range(100):
            keys.want()
            keys._watched.look()
        assert issuer.fetches == 1


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("status", "data", "location"),
    [(500, b"", ""), (200, b"{", ""), (200, b'{"keys": []}', ""), (302, b"", "http://127.0.0.1:1/")],
    ids=["error", "damaged", "empty", "redirected"],
)
def test_keys_stay_if_a_later_fetch_fails(
    issuer: Issuer, status: int, data: bytes, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.status, issuer.data, issuer.location = status, data, location
        before = issuer.fetches
        keys.want()
        assert eventually(lambda: issuer.fetches > before + 2)  # it is tried again without being asked
        assert has(keys, "one")
        assert eventually(lambda: "not reloaded" in caplog.text)


@pytest.mark.usefixtures("often")
def test_an_issuer_that_comes_late_is_found(issuer: Issuer) -> None:
    issuer.status = 503
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: issuer.fetches > 1)
        assert keys.current is None
        issuer.status = 200
        assert eventually(lambda: has(keys, "one"))


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
    with pytest.raises(IdentityError, match="must begin with https://"):
        Keys(url)


def test_the_log_shows_no_password_of_a_url() -> None:
    assert shown("https://user:t0p@issuer.example:8/keys?key=s3cret") == "https://issuer.example/keys"


def test_keys_of_a_file_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(key_set(public_jwk("ES256")))
    with keys_of(path) as keys:
        assert has(keys, "one")
        path.write_bytes(b"{")
        path.with_suffix(".new").write_bytes(key_set(public_jwk("ES256", "two")))
        path.with_suffix(".new").replace(path)
        assert eventually(lambda: has(keys, "two"))


def test_a_bad_file_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"jwks\.json: cannot be read"):
        Keys(str(tmp_path / "jwks.json"))
    (tmp_path / "jwks.json").write_bytes(b"{")
    with pytest.raises(IdentityError, match=r"jwks\.json: the key set is not JSON"):
        Keys(str(tmp_path / "jwks.json"))
