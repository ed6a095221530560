"""Identities, keys and tokens that tests make."""

import base64
import hashlib
import hmac
import json
import time
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from attention_serving.server.security.token_file import TokenTable, digest_of, parse_table
from attention_serving.server.security.web_tokens import Keys, KeySet, WebTokens, read_keys
from attention_serving.server.threads import Watched, read_bytes

ISSUER, AUDIENCE = "https://issuer.example", "attention"
# How often tests look at what changes.
POLL_SECONDS = 0.01


def entry(name: str, token: str | None = None, *rights: str, **fields: Any) -> dict[str, Any]:
    """One identity of a tokens file, with a token of its own unless another proof is given."""
    proof = {"sha256": digest_of(token).hex()} if token is not None else {}
    return {"name": name, "rights": list(rights), **proof, **fields}


def write_tokens(path: Path, *entries: dict[str, Any]) -> Path:
    """Writes a tokens file in one step, as the command does."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"identities": entries}))
    temporary.replace(path)
    return path


def table_in(path: Path) -> TokenTable:
    """The identities of a tokens file."""
    return parse_table(path, read_bytes(path))


def looking_often() -> AbstractContextManager[object]:
    """What is watched from within the block on is looked at often."""
    return patch("attention_serving.server.threads.POLL_SECONDS", POLL_SECONDS)


def watched(path: Path) -> Watched[bytes, TokenTable]:
    """A tokens file that is looked at often."""
    with looking_often():
        found = Watched("tokens", partial(read_bytes, path), partial(parse_table, path))
    found.start()
    return found


class FixedKeys(Keys):
    """Keys that the test states and changes, and how often others were wanted."""

    def __init__(self, *members: dict[str, Any]) -> None:
        self.keys: KeySet | None = read_keys(key_set(*members)) if members else None
        self.wanted = 0

    @property
    def current(self) -> KeySet | None:
        return self.keys

    def want(self) -> None:
        self.wanted += 1


def issuer_tokens(keys: FixedKeys, **options: Any) -> WebTokens:
    """What takes the tokens of the issuer."""
    return WebTokens(keys, issuer=ISSUER, audience=AUDIENCE, **options)


@cache
def private_key(algorithm: str, name: str = "one") -> Any:
    """A key of the issuer; another for each name."""
    del name
    if algorithm.startswith("ES"):
        return ec.generate_private_key({"ES256": ec.SECP256R1, "ES384": ec.SECP384R1}[algorithm]())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, 2048)


def jwk(algorithm: str, key: Any) -> dict[str, Any]:
    """A key as a member of a key set, without a name."""
    member: dict[str, Any] = json.loads(jwt.get_algorithm_by_name(algorithm).to_jwk(key))
    return member


def public_jwk(algorithm: str, name: str = "one", **members: Any) -> dict[str, Any]:
    """The public part of a key, as a member of a key set."""
    return {**jwk(algorithm, private_key(algorithm, name).public_key()), "kid": name, **members}


def key_set(*members: dict[str, Any]) -> dict[str, Any]:
    """A JWK set."""
    return {"keys": [*members]}


def signed(algorithm: str = "RS256", key: str = "one", kid: str | None = "", **claims: Any) -> str:
    """A good token, of which some claims are changed; None removes a claim."""
    good = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "someone",
        "exp": int(time.time()) + 600,
        "scope": "infer:* read",
    }
    payload = {name: value for name, value in {**good, **claims}.items() if value is not None}
    headers = {} if kid is None else {"kid": kid or key}
    return jwt.encode(payload, private_key(algorithm, key), algorithm, headers=headers)


def part(content: Any) -> str:
    """One part of a hand-made token."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unsigned() -> str:
    """A good token without a signature: the algorithm is none."""
    return f"{part({'alg': 'none', 'kid': 'one'})}.{signed().split('.')[1]}."


def signed_with_the_public_key() -> str:
    """A token that a verifier takes which lets the token choose HMAC, with the public key as its secret."""
    public = private_key("RS256").public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    text = f"{part({'alg': 'HS256', 'kid': 'one'})}.{signed().split('.')[1]}"
    return f"{text}.{part(hmac.new(pem, text.encode(), hashlib.sha256).digest())}"
