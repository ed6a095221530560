"""Which keys are taken out of a JWK set."""

import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from attention_serving.server.errors import IdentityError
from attention_serving.server.security.web_tokens import ALGORITHMS, find_key, read_keys
from tests.server.security.samples import key_set, private_key, public_jwk

OCT = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"}


def weak() -> dict[str, Any]:
    key = rsa.generate_private_key(65537, 1024).public_key()  # noqa: S505 - what must be refused
    return {**json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(key)), "kid": "weak"}


def private() -> dict[str, Any]:
    return {**json.loads(jwt.get_algorithm_by_name("RS256").to_jwk(private_key("RS256"))), "kid": "own"}


def test_no_algorithm_is_symmetric_or_none() -> None:
    assert {name[:2] for name in ALGORITHMS} == {"RS", "PS", "ES", "Ed"}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
        ({"alg": "PS256"}, ("PS256",)),
        ({"use": "sig"}, ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
    ],
)
def test_an_rsa_key_verifies_its_algorithms(members: dict[str, Any], expected: tuple[str, ...]) -> None:
    found = read_keys(key_set(public_jwk("RS256", **members))).get("one")
    assert found is not None
    assert found.algorithms == expected


@pytest.mark.parametrize("algorithm", ["ES256", "ES384", "EdDSA"])
def test_a_key_of_a_curve_verifies_one_algorithm(algorithm: str) -> None:
    found = read_keys(key_set(public_jwk(algorithm))).get("one")
    assert found is not None
    assert found.algorithms == (algorithm,)


def test_keys_for_other_purposes_are_left_out() -> None:
    others = [OCT, public_jwk("RS256", "other", use="enc"), public_jwk("RS256", "third", alg="HS256")]
    keys = read_keys(key_set(*others, public_jwk("ES256"), {"kty": "new"}))
    assert list(keys) == ["one"]


def test_a_token_without_an_identifier_has_the_only_key() -> None:
    assert find_key(read_keys(key_set(public_jwk("ES256"))), None) is not None
    assert find_key(read_keys(key_set(public_jwk("ES256"), public_jwk("ES256", "two"))), None) is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'must be an object with an array "keys"'),
        (b'{"keys": [7]}', 'must be an object with an array "keys"'),
        (key_set(), "has no key that verifies"),
        (key_set(OCT), "has no key that verifies"),
        (key_set(public_jwk("ES256"), public_jwk("ES256")), "keys[1]: its kid is that of another key"),
        (key_set({"kty": "RSA", "kid": "a", "n": "AQ", "e": 7}), "keys[0]: is damaged"),
        (key_set({"kty": "RSA", "kid": "a"}, public_jwk("ES256")), "keys[0]: is damaged"),
        (key_set(weak()), "keys[0]: has 1024 bits; must have 2048 to 8192"),
        (key_set(private()), "keys[0]: is a private key"),
        (b" " * (2 << 20), "is larger than"),
        (key_set(*[{}] * 200), "has 200 keys; the limit is 100"),
    ],
    ids=range(13),
)
def test_other_key_sets_are_refused(data: bytes, error: str) -> None:
    with pytest.raises(IdentityError) as raised:
        read_keys(data)
    assert error in str(raised.value)
