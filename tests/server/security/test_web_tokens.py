"""JSON Web Tokens: which are taken, for how long, and how often they are verified."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import jwt
import pytest

from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security import web_tokens
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.rights import (
    ExpiredTokenError,
    Identity,
    InvalidTokenError,
    KeysUnavailableError,
    Rights,
    Source,
)
from attention_serving.server.security.token_file import digest_of
from attention_serving.server.security.web_tokens import LEEWAY_SECONDS, MAX_FAILURES, WebTokens, read_keys
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import (
    AUDIENCE,
    ISSUER,
    FixedKeys,
    key_set,
    part,
    public_jwk,
    signed,
    signed_with_the_public_key,
    unsigned,
)

OK, UNAUTHENTICATED = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def keys() -> FixedKeys:
    return FixedKeys(public_jwk("RS256"))


@pytest.fixture
def tokens(keys: FixedKeys) -> WebTokens:
    return WebTokens(keys, issuer=ISSUER, audience=AUDIENCE)


def identity_of(tokens: WebTokens, token: str, client: str = "10.0.0.1:1") -> Identity:
    return tokens.of_token(token, digest_of(token), lambda: client)


DAMAGED = "the token is damaged, or its signature is wrong"
ALGORITHM = "the token is not valid: The specified alg value is not allowed"


@pytest.mark.parametrize("algorithm", ["PS384", "ES256", "EdDSA"])
def test_a_good_token_is_taken(algorithm: str) -> None:
    tokens = WebTokens(FixedKeys(public_jwk(algorithm, alg=algorithm)), issuer=ISSUER, audience=AUDIENCE)
    expires = int(time.time()) + 60
    found = identity_of(tokens, signed(algorithm, exp=expires, scope="openid infer:a-* admin"))
    assert (found.source, found.name) == (Source.WEB_TOKEN, "someone")
    assert found.rights == Rights(infer=("a-*",), admin=("*",))
    assert found.expires == expires + LEEWAY_SECONDS


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (unsigned, ALGORITHM),
        (signed_with_the_public_key, ALGORITHM),
        (lambda: signed(key="two", kid="one"), DAMAGED),
        (lambda: signed(key="two"), "the key that signed the token is not one of the issuer's"),
        (lambda: signed("ES256", kid="one"), ALGORITHM),
        (lambda: signed(aud="other"), "the token is not valid: Audience doesn't match"),
        (lambda: signed(aud=None), 'the token is not valid: Token is missing the "aud" claim'),
        (lambda: signed(iss="https://other.example"), "the token is not valid: Invalid issuer"),
        (lambda: signed(sub=""), "the claim sub must be a text of 1 to 200 characters"),
        (lambda: signed(sub=7), DAMAGED),
        (lambda: signed(exp="soon"), DAMAGED),
        (lambda: signed(sub="a\nb"), "the claim sub must be a text of 1 to 200 characters"),
        (lambda: signed(nbf=time.time() + 3600), "the token is not valid yet"),
        (lambda: signed()[:-6] + "AAAAAA", DAMAGED),
        (lambda: "a.b.c", DAMAGED),
        (lambda: f"{part(b'[' * 3000)}.e30.", DAMAGED),
        (lambda: f"{part({'alg': ['RS256']})}.e30.", ALGORITHM),
        (lambda: f"{part({'alg': 'RS256', 'kid': 'one', 'crit': ['b64']})}.e30.", DAMAGED),
        (lambda: f"{part({'alg': 'RS256', 'kid': 'one', 'b64': False})}..AA", DAMAGED),
    ],
    ids=range(19),
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


def test_a_token_that_is_not_valid_yet_becomes_valid(
    tokens: WebTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = signed(nbf=int(time.time()) + LEEWAY_SECONDS + 1000)
    with pytest.raises(InvalidTokenError, match="not valid yet"):
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
    token, wrong = signed(), signed(key="two", kid="one")
    for _ in range(3):
        assert identity_of(tokens, token).name == "someone"
        with pytest.raises(InvalidTokenError):
            identity_of(tokens, wrong)
    assert decode.call_count == 2
    keys.keys = read_keys(key_set(public_jwk("RS256", "two")))
    for _ in range(2):  # its issuer may have published the key again since
        with pytest.raises(InvalidTokenError, match="not one of the issuer's"):
            identity_of(tokens, token)
    assert (decode.call_count, keys.wanted) == (2, 2)
    assert identity_of(tokens, signed(key="two")).name == "someone"
    assert decode.call_count == 3


def test_failed_verifications_are_limited_for_the_connections_of_an_address_that_they_came_from(
    tokens: WebTokens, decode: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = time.time()
    monkeypatch.setattr(time, "time", lambda: second)
    good = signed()
    identity_of(tokens, good)
    decode.reset_mock()
    stem = signed()[:-6]
    wrong = [f"{stem}{number:05d}A" for number in range(MAX_FAILURES + 1)]
    clients = ["10.0.0.1:1", "10.0.0.1:2"]
    for number, token in enumerate(wrong[:MAX_FAILURES]):
        with pytest.raises(InvalidTokenError):
            identity_of(tokens, token, clients[number % 2])
    for client in clients:
        with pytest.raises(OverloadedError):
            identity_of(tokens, wrong[MAX_FAILURES], client)
        assert identity_of(tokens, good, client).name == "someone"
    assert decode.call_count == MAX_FAILURES
    assert identity_of(tokens, signed(sub="neighbour"), "10.0.0.1:3").name == "neighbour"
    assert identity_of(tokens, signed(sub="other"), "10.0.0.2:1").name == "other"
    monkeypatch.setattr(time, "time", lambda: second + 1)
    assert identity_of(tokens, signed(sub="another"), clients[0]).name == "another"


def test_what_is_kept_is_bounded(tokens: WebTokens, decode: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_tokens, "MAX_KNOWN", 4)
    made = [signed(sub=f"caller-{number}") for number in range(5)]
    for token in (*made, made[4], made[3]):
        identity_of(tokens, token)
    assert decode.call_count == 6  # the fifth was one too many: the fourth is verified again


def test_before_there_are_keys_callers_are_told_to_try_again() -> None:
    with pytest.raises(KeysUnavailableError):
        identity_of(WebTokens(FixedKeys(), issuer=ISSUER, audience=AUDIENCE), signed())


def test_rights_are_in_the_claim_of_the_settings(keys: FixedKeys) -> None:
    tokens = WebTokens(keys, issuer=ISSUER, audience=AUDIENCE, rights_claim="permissions")
    for claim, rights in (
        ("infer:a read openid", Rights(("a",), ("*",))),
        (["infer:a", 7, "email"], Rights(("a",))),
        ({"infer:a": True}, Rights()),
        (None, Rights()),
    ):
        assert identity_of(tokens, signed(scope="admin", permissions=claim)).rights == rights


def codes(channel: grpc.Channel, *tokens: str) -> list[grpc.StatusCode]:
    method: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
    metadata = [(("authorization", f"Bearer {token}"),) for token in tokens]
    return [method.future(b"", metadata=each, timeout=PATIENCE_SECONDS).code() for each in metadata]


def test_over_grpc_the_connection_of_forged_tokens_is_refused_and_a_newcomer_is_served(
    self_model: LoadedModel, tokens: WebTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_tokens, "MAX_FAILURES", 3)
    monkeypatch.setattr(web_tokens, "time", SimpleNamespace(time=lambda: 100.0))  # all in one second
    forged = [f"{signed()[:-6]}{number:05d}A" for number in range(4)]
    with Served(self_model, guard=Guard(None, tokens)) as served, served.connect() as other:
        known, new = (signed(sub=name) for name in ("known", "new"))
        assert codes(served.channel, known) == [OK]
        assert codes(served.channel, *forged) == [*3 * [UNAUTHENTICATED], EXHAUSTED]
        assert codes(served.channel, new, known) == [EXHAUSTED, OK]
        assert codes(other, new) == [OK]
