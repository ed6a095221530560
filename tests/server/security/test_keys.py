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
from cryptography.hazmat.primitives.asymmetric import ed448, rsa

from attention_serving.server.errors import IdentityError
from attention_serving.server.security import web_tokens
from attention_serving.server.security.web_tokens import (
    ALGORITHMS,
    Keys,
    check_url,
    find_key,
    read_keys,
    shown,
)
from tests.server.security.samples import eventually, key_set, looking_often, private_key, public_jwk

OCT = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}


def jwk(algorithm: str, key: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(jwt.get_algorithm_by_name(algorithm).to_jwk(key))
    return found


WEAK = jwk("RS256", rsa.generate_private_key(65537, 1024).public_key())  # noqa: S505 - what must be refused
ED448 = jwk("EdDSA", ed448.Ed448PrivateKey.generate().public_key())


@pytest.mark.parametrize(
    ("algorithm", "members", "expected"),
    [
        ("RS256", {}, "RS256"),
        ("RS256", {"alg": "PS256", "use": "sig"}, "PS256"),
        ("ES384", {}, "ES384"),
        ("EdDSA", {}, "EdDSA"),
    ],
)
def test_a_key_verifies_one_algorithm(algorithm: str, members: dict[str, Any], expected: str) -> None:
    assert read_keys(key_set(public_jwk(algorithm, **members)))["one"].algorithm_name == expected
    assert {name[:2] for name in ALGORITHMS} == {"RS", "PS", "ES", "Ed"}  # none is symmetric


def test_keys_that_cannot_be_used_are_left_out_and_a_lone_key_needs_no_name() -> None:
    keys = read_keys(
        key_set(
            OCT,
            public_jwk("RS256", "other", use="enc"),
            public_jwk("RS256", "third", alg="HS256"),
            {"kty": "new"},
            {"kty": "RSA", "kid": "damaged"},
            {"kty": "RSA", "alg": ["RS256"]},
            {**ED448, "alg": "EdDSA"},
            public_jwk("ES256"),
        )
    )
    assert list(keys) == ["one"]
    assert find_key(keys, None) is keys["one"]
    assert find_key(read_keys(key_set(public_jwk("ES256"), public_jwk("ES256", "two"))), None) is None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([], "is not a JWK set"),
        ({"keys": 7}, "is not a JWK set"),
        ({"keys": [7]}, "is not a JWK set"),
        (key_set(OCT), "with a key that verifies"),
        (key_set(WEAK), "has 1024 bits; must have 2048 to 8192"),
        (key_set(jwk("RS256", private_key("RS256"))), "is a private key"),
        (key_set(jwk("ES256", private_key("ES256"))), "is a private key"),
    ],
    ids=range(7),
)
def test_other_key_sets_are_refused(content: Any, error: str) -> None:
    with pytest.raises(IdentityError) as raised:
        read_keys(content)
    assert error in str(raised.value)


class Issuer:
    """An HTTP server of a key set that the test changes."""

    def __init__(self) -> None:
        self.status, self.location, self.fetches = 200, "", 0
        self.keys: Any = key_set(public_jwk("ES256"))
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetches += 1
                data = json.dumps(issuer.keys).encode()
                self.send_response(issuer.status)
                if issuer.location:
                    self.send_header("Location", issuer.location)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

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


def test_keys_are_fetched_when_a_new_one_is_wanted_but_not_at_once_again_and_after_a_while(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.keys = key_set(public_jwk("ES256"), public_jwk("ES256", "two"))
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 1000)
        keys.want()
        keys._watched.look()
        assert issuer.fetches == 1
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 0)
        monkeypatch.setattr(web_tokens, "REFRESH_SECONDS", 0.1)
        keys.want()
        assert eventually(lambda: has(keys, "one", "two"))
        issuer.keys = key_set(public_jwk("ES256", "three"))
        assert eventually(lambda: has(keys, "three"))


@pytest.mark.parametrize(
    ("status", "content", "location"),
    [(503, {}, ""), (200, {"keys": []}, ""), (200, 7, ""), (302, {}, "http://127.0.0.1:1/")],
    ids=["error", "empty", "number", "redirected"],
)
def test_keys_stay_if_a_later_fetch_fails_and_those_of_an_issuer_that_comes_late_are_found(
    issuer: Issuer, status: int, content: Any, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = issuer.keys
    with keys_of(issuer.url) as keys:
        assert eventually(lambda: has(keys, "one"))
        issuer.status, issuer.keys, issuer.location = status, content, location
        before = issuer.fetches
        keys.want()
        assert eventually(lambda: issuer.fetches > before + 2)  # it is tried again without being asked
        assert has(keys, "one")
        assert eventually(lambda: "not reloaded" in caplog.text)
        with keys_of(issuer.url) as late:
            assert late.current is None
            issuer.status, issuer.keys, issuer.location = 200, good, ""
            assert eventually(lambda: has(late, "one"))


@pytest.mark.parametrize(
    "url", ["http://issuer.example/", "http://10.0.0.1/", "ftp://127.0.0.1/", "https:///keys"]
)
def test_keys_come_from_https_or_this_machine(url: str) -> None:
    for good in ("https://issuer.example/keys", "http://127.0.0.1:8/", "http://localhost/keys"):
        check_url(good)
    with pytest.raises(IdentityError, match="must begin with https://"):
        Keys(url)
    assert shown("https://user:t0p@issuer.example:8/keys?key=s3cret") == "https://issuer.example/keys"


def test_keys_of_a_file_are_rotated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "jwks.json"
    cases = (
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "this is not a JWK set"),
    )
    for content, error in cases:
        if content:
            path.write_text(content)
        with pytest.raises(IdentityError, match=rf"jwks\.json: {error}"):
            Keys(str(path))
    path.write_text(json.dumps(key_set(public_jwk("ES256"))))
    path.chmod(0o666)
    with keys_of(path) as keys:
        assert has(keys, "one")
        path.write_text(json.dumps(key_set(public_jwk("ES256", "two"))))
        assert eventually(lambda: has(keys, "two"))
    assert "other users may change the file" in caplog.text
