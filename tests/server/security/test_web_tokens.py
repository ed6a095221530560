"""JSON Web Tokens: which are taken, and how often they are verified; and the keys, of files and URLs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.errors import ServerError
from attention_serving.server.security import web_tokens
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.rights import (
    ExpiredTokenError,
    Identity,
    InvalidTokenError,
    KeysUnavailableError,
    Rights,
)
from attention_serving.server.security.token_file import digest_of
from attention_serving.server.security.web_tokens import (
    LEEWAY_SECONDS,
    Keys,
    WebTokens,
    read_keys,
)
from tests.server.seams import PATIENCE_SECONDS, Served, wait_until
from tests.server.security.samples import (
    FixedKeys,
    issuer_tokens,
    jwk,
    key_set,
    looking_often,
    part,
    private_key,
    public_jwk,
    signed,
    signed_with_the_public_key,
    unsigned,
)


@pytest.fixture
def keys() -> FixedKeys:
    return FixedKeys(public_jwk("RS256"))


@pytest.fixture
def tokens(keys: FixedKeys) -> WebTokens:
    return issuer_tokens(keys)


def identity_of(tokens: WebTokens, token: str) -> Identity:
    return tokens.of_token(token, digest_of(token))


ALGORITHM = "The specified alg value is not allowed"
SIGNATURE = "Signature verification failed"


@pytest.mark.parametrize("algorithm", ["PS384", "ES256", "EdDSA"])
def test_a_good_token_is_taken(algorithm: str) -> None:
    tokens = issuer_tokens(FixedKeys(public_jwk(algorithm, alg=algorithm)))
    expires = int(time.time()) + 60
    found = identity_of(tokens, signed(algorithm, exp=expires, scope="openid infer:a-* admin"))
    assert (found.source, found.name) == ("jwt", "someone")
    assert found.rights == Rights.parse(["infer:a-*", "admin"])
    assert found.expires == expires + LEEWAY_SECONDS


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (unsigned, ALGORITHM),
        (signed_with_the_public_key, ALGORITHM),
        (lambda: signed(key="two", kid="one"), SIGNATURE),
        (lambda: signed(key="two"), "the key that signed the token is not one of the issuer's"),
        (lambda: signed("ES256", kid="one"), ALGORITHM),
        (lambda: signed(aud="other"), "Audience doesn't match"),
        (lambda: signed(aud=None), 'Token is missing the "aud" claim'),
        (lambda: signed(iss="https://other.example"), "Invalid issuer"),
        (lambda: signed(sub=""), "the claim sub must be a text of 1 to 200 characters"),
        (lambda: signed(sub=7), "Subject must be a string"),
        (lambda: signed(exp="soon"), "Expiration Time claim (exp) must be an integer"),
        (lambda: signed(sub="a\nb"), "the claim sub must be a text of 1 to 200 characters"),
        (lambda: signed(nbf=time.time() + 3600), "The token is not yet valid (nbf)"),
        (lambda: signed()[:-6] + "AAAAAA", SIGNATURE),
        (lambda: "a.b.c", "Invalid header padding"),
        (lambda: f"{part(b'[' * 3000)}.e30.", "Invalid header string"),
        (lambda: f"{part({'alg': ['RS256']})}.e30.", ALGORITHM),
        (lambda: f"{part({'alg': 'RS256', 'kid': 'one', 'crit': ['b64']})}.e30.", "Critical extension"),
        (lambda: f"{part({'alg': 'RS256', 'kid': 'one', 'b64': False})}..AA", "The 'b64' header"),
        (lambda: f"{part({'alg': 'RS256', 'kid': 'one', 'crit': [chr(0xD800)]})}.e30.", r"extension: \ud800"),
    ],
    ids=range(20),
)
def test_another_token_is_refused(tokens: WebTokens, token: Any, error: str) -> None:
    made = token()
    with pytest.raises(InvalidTokenError) as raised:
        identity_of(tokens, made)
    assert error in raised.value.message
    assert made not in raised.value.message


def test_a_token_expires_a_little_after_its_end(tokens: WebTokens) -> None:
    now = time.time()
    found = identity_of(tokens, signed(exp=now - LEEWAY_SECONDS + 5))
    found.check_expiry(now)
    with pytest.raises(ExpiredTokenError):
        found.check_expiry(now + 5)
    with pytest.raises(ExpiredTokenError):
        identity_of(tokens, signed(exp=now - LEEWAY_SECONDS - 5))
    assert identity_of(tokens, signed(exp=10**400)).expires > now  # of any size


def test_a_token_becomes_valid_later(tokens: WebTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    token = signed(nbf=int(time.time()) + LEEWAY_SECONDS + 1000)
    with pytest.raises(InvalidTokenError, match="not yet valid"):
        identity_of(tokens, token)
    monkeypatch.setattr(web_tokens, "LEEWAY_SECONDS", 2000)
    assert identity_of(tokens, token).name == "someone"


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """PyJWT's function, which counts the verifications."""
    found = Mock(wraps=jwt.decode)
    monkeypatch.setattr(jwt, "decode", found)
    return found


def test_a_token_is_verified_once_for_each_key_set(tokens: WebTokens, keys: FixedKeys, decode: Mock) -> None:
    token = signed()
    for _ in range(3):
        assert identity_of(tokens, token).name == "someone"
    assert decode.call_count == 1
    keys.keys = read_keys(key_set(public_jwk("RS256", "two")))
    for _ in range(2):  # its issuer may have published the key again since
        with pytest.raises(InvalidTokenError, match="not one of the issuer's"):
            identity_of(tokens, token)
    assert (decode.call_count, keys.wanted) == (1, 2)
    assert identity_of(tokens, signed(key="two")).name == "someone"


def test_what_is_kept_is_bounded(tokens: WebTokens, decode: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_tokens, "MAX_KNOWN", 4)
    made = [signed(sub=f"caller-{number}") for number in range(5)]
    for token in (*made, made[4], made[3]):
        identity_of(tokens, token)
    assert decode.call_count == 6  # the fifth was one too many: the fourth is verified again


def test_before_there_are_keys_callers_are_told_to_try_again() -> None:
    with pytest.raises(KeysUnavailableError):
        identity_of(issuer_tokens(FixedKeys()), signed())


def test_rights_are_in_the_claim_of_the_settings(keys: FixedKeys) -> None:
    tokens = issuer_tokens(keys, rights_claim="permissions")
    for claim, rights in (
        ("infer:a read openid", Rights.parse(["infer:a", "read"])),
        (["infer:a", 7, "email"], Rights.parse(["infer:a"])),
        ({"infer:a": True}, Rights.parse(())),
        (None, Rights.parse(())),
    ):
        assert identity_of(tokens, signed(scope="admin", permissions=claim)).rights == rights


def codes(channel: grpc.Channel, *tokens: str) -> list[grpc.StatusCode]:
    method: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
    metadata = [(("authorization", f"Bearer {token}"),) for token in tokens]
    return [method.future(b"", metadata=each, timeout=PATIENCE_SECONDS).code() for each in metadata]


def test_connections_of_forged_tokens_are_refused_for_a_second_and_a_newcomer_is_served(
    self_model: LoadedModel, tokens: WebTokens, decode: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [100.0]
    monkeypatch.setattr(web_tokens, "MAX_FAILURES", 3)
    monkeypatch.setattr(web_tokens, "time", SimpleNamespace(time=lambda: seconds[0]))
    ok, unauthenticated = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    forged = [f"{signed()[:-6]}{number:05d}A" for number in range(5)]
    known, new, later = (signed(sub=name) for name in ("known", "new", "later"))
    with (
        Served(self_model, guard=Guard(None, tokens)) as served,
        served.connect() as second,
        served.connect() as other,
    ):
        assert codes(served.channel, known) == [ok]
        assert codes(second, forged[0]) == [unauthenticated]
        assert codes(served.channel, *forged[1:]) == [*2 * [unauthenticated], *2 * [exhausted]]
        assert decode.call_count == 4  # what is refused for the others is not verified
        for channel in (served.channel, second):
            assert codes(channel, new, known) == [exhausted, ok]
        assert codes(other, new) == [ok]
        seconds[0] += 1
        assert codes(second, later) == [ok]


OCT = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}


WEAK = jwk("RS256", rsa.generate_private_key(65537, 1024).public_key())  # noqa: S505 - what must be refused


def test_keys_that_cannot_be_used_are_left_out_and_a_lone_key_needs_no_name() -> None:
    keys = read_keys(
        key_set(
            OCT,
            public_jwk("RS256", "other", use="enc"),
            public_jwk("RS256", "third", alg="HS256"),
            {"kty": "new"},
            {"kty": "RSA", "kid": "damaged"},
            public_jwk("ES256"),
        )
    )
    assert list(keys) == ["one"]
    assert web_tokens.find_key(keys, None) is keys["one"]
    two = read_keys(key_set(public_jwk("ES256"), public_jwk("ES256", "two")))
    assert web_tokens.find_key(two, None) is None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ([], "is not a JWK set"),
        ({"keys": 7}, "is not a JWK set"),
        ({"keys": [7]}, "is not a JWK set"),
        (key_set(OCT), "with a public key that verifies"),
        (key_set(WEAK), "with a public key that verifies"),
        (key_set(jwk("RS256", private_key("RS256"))), "with a public key that verifies"),
        (key_set(jwk("ES256", private_key("ES256"))), "with a public key that verifies"),
    ],
    ids=range(7),
)
def test_other_key_sets_are_refused(content: Any, error: str) -> None:
    with pytest.raises(ServerError, match=error):
        read_keys(content)


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
    keys._watched.close()


def has(keys: Keys, *key_ids: str) -> bool:
    return set(keys.current or ()) == set(key_ids)


def test_keys_are_fetched_on_demand_and_periodically(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    with keys_of(issuer.url) as keys:
        wait_until(lambda: has(keys, "one"))
        issuer.keys = key_set(public_jwk("ES256"), public_jwk("ES256", "two"))
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 1000)
        keys.want()
        keys._watched.poll_once()
        assert issuer.fetches == 1
        monkeypatch.setattr(web_tokens, "PAUSE_SECONDS", 0)
        monkeypatch.setattr(web_tokens, "REFRESH_SECONDS", 0.1)
        keys.want()
        wait_until(lambda: has(keys, "one", "two"))
        issuer.keys = key_set(public_jwk("ES256", "three"))
        wait_until(lambda: has(keys, "three"))


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
        wait_until(lambda: has(keys, "one"))
        issuer.status, issuer.keys, issuer.location = status, content, location
        before = issuer.fetches
        keys.want()
        wait_until(lambda: issuer.fetches > before + 2)  # it is tried again without being asked
        assert has(keys, "one")
        wait_until(lambda: "not reloaded" in caplog.text)
        with keys_of(issuer.url) as late:
            assert late.current is None
            issuer.status, issuer.keys, issuer.location = 200, good, ""
            wait_until(lambda: has(late, "one"))


@pytest.mark.parametrize(
    "url",
    [
        "http://issuer.example/",
        "http://10.0.0.1/",
        "ftp://127.0.0.1/",
        "https:///keys",
        "http://localhost:8@issuer.example/",
    ],
)
def test_keys_come_from_https_or_this_machine(url: str) -> None:
    for good in ("https://issuer.example/keys", "http://127.0.0.1:8/", "http://localhost/keys"):
        assert web_tokens.URL.match(good)
    with pytest.raises(ServerError, match="--jwt-jwks must be https, or http on this machine"):
        Keys(url)


def test_keys_of_a_file_are_rotated(tmp_path: Path) -> None:
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
        with pytest.raises(ServerError, match=rf"jwks\.json: {error}"):
            Keys(str(path))
    path.write_text(json.dumps(key_set(public_jwk("ES256"))))
    with keys_of(path) as keys:
        assert has(keys, "one")
        path.write_text(json.dumps(key_set(public_jwk("ES256", "two"))))
        wait_until(lambda: has(keys, "two"))
