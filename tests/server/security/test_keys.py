"""Which keys are taken out of a JWK set, and from where: files and URLs, rotated or unreachable."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from attention_serving.server.errors import IdentityError
from attention_serving.server.security import web_tokens
from attention_serving.server.security.web_tokens import (
    ALGORITHMS,
    RSA,
    Keys,
    check_url,
    find_key,
    read_keys,
    shown,
)
from tests.server.security.samples import eventually, key_set, looking_often, private_key, public_jwk

OCT = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}


def jwk(key: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(key))
    return found


WEAK = jwk(rsa.generate_private_key(65537, 1024).public_key())  # noqa: S505 - what must be refused


@pytest.mark.parametrize(
    ("algorithm", "members", "expected"),
    [
        ("RS256", {}, RSA),
        ("RS256", {"alg": "PS256", "use": "sig"}, ("PS256",)),
        ("ES384", {}, ("ES384",)),
        ("EdDSA", {}, ("EdDSA",)),
    ],
)
def test_a_key_verifies_its_algorithms(
    algorithm: str, members: dict[str, Any], expected: tuple[str, ...]
) -> None:
    assert read_keys(key_set(public_jwk(algorithm, **members)))["one"].algorithms == expected
    assert {name[:2] for name in ALGORITHMS} == {"RS", "PS", "ES", "Ed"}  # none is symmetric


def test_keys_for_other_purposes_are_left_out_and_a_lone_key_needs_no_name() -> None:
    others = [OCT, public_jwk("RS256", "other", use="enc"), public_jwk("RS256", "third", alg="HS256")]
    keys = read_keys(key_set(*others, public_jwk("ES256"), {"kty": "new"}))
    assert list(keys) == ["one"]
    assert find_key(keys, None) is keys["one"]
    assert find_key(read_keys(key_set(public_jwk("ES256"), public_jwk("ES256", "two"))), None) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'must be an object with an array "keys"'),
        (b'{"keys": [7]}', 'must be an object with an array "keys"'),
        (key_set(OCT), "has no key that verifies"),
        (key_set(public_jwk("ES256"), public_jwk("ES256")), "keys[1]: its kid is that of another key"),
        (key_set({"kty": "RSA", "kid": "a"}, public_jwk("ES256")), "keys[0]: is damaged"),
        (key_set(WEAK), "keys[0]: has 1024 bits; must have 2048 to 8192"),
        (key_set(jwk(private_key("RS256"))), "keys[0]: is a private key"),
        (b" " * (2 << 20), "is larger than"),
        (key_set(*[{}] * 200), "has 200 keys; the limit is 100"),
    ],
    ids=range(11),
)
def test_other_key_sets_are_refused(data: bytes, error: str) -> None:
    with pytest.raises(IdentityError) as raised:
        read_keys(data)
    assert error in str(raised.value)


class Issuer:
    """An HTTP server of a key set that the test changes."""

    def __init__(self) -> None:
        self.data, self.status, self.location, self.fetches = key_set(public_jwk("ES256")), 200, "", 0
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

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/keys"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    """Its keys are fetched at once after a failure, or when an unknown one is wanted."""
    monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 0.01)
    issuer = Issuer()
    yield issuer
    issuer.server.shutdown()
    issuer.server.server_close()


@contextmanager
def keys_of(where: str | Path) -> Iterator[Keys]:
    with looking_often():
        keys = Keys(str(where))
    yield keys
    keys.close()


def has(keys: Keys, *key_ids: str) -> bool:
    return set(keys.current or ()) == set(key_ids)


def test_a_new_key_is_fetched_when_it_is_wanted_but_not_at_once_again(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256"), public_jwk("ES256", "two"))
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 1000)
        keys.want()
        keys._watched.look()
        assert issuer.fetches == 1
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 0)
        keys.want()
        assert eventually(lambda: has(keys, "one", "two"))
        assert issuer.fetches == 2


def test_keys_are_fetched_again_after_a_while(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_tokens, "REFRESH_SECONDS", 0.01)
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.data = key_set(public_jwk("ES256", "two"))
        assert eventually(lambda: has(keys, "two"))


@pytest.mark.parametrize(
    ("status", "data", "location"),
    [(500, b"", ""), (200, b'{"keys": []}', ""), (302, b"", "http://127.0.0.1:1/")],
    ids=["error", "empty", "redirected"],
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


def test_an_issuer_that_comes_late_is_found(issuer: Issuer) -> None:
    issuer.status = 503
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: issuer.fetches > 1)
        assert keys.current is None
        issuer.status = 200
        assert eventually(lambda: has(keys, "one"))


@pytest.mark.parametrize(
    "url", ["http://issuer.example/", "http://10.0.0.1/", "ftp://127.0.0.1/", "https:///keys"]
)
def test_keys_come_from_https_or_this_machine(url: str) -> None:
    for good in ("https://issuer.example/keys", "http://127.0.0.1:8/", "http://localhost/keys"):
        check_url(good)
    with pytest.raises(IdentityError, match="must begin with https://"):
        Keys(url)
    assert shown("https://user:t0p@issuer.example:8/keys?key=s3cret") == "https://issuer.example/keys"


def test_keys_of_a_file_are_rotated(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    for content, error in ((None, "cannot be read"), (b"{", "the key set is not JSON")):
        if content:
            path.write_bytes(content)
        with pytest.raises(IdentityError, match=rf"jwks\.json: {error}"):
            Keys(str(path))
    path.write_bytes(key_set(public_jwk("ES256")))
    with keys_of(path) as keys:
        assert has(keys, "one")
        path.write_bytes(key_set(public_jwk("ES256", "two")))
        assert eventually(lambda: has(keys, "two"))
