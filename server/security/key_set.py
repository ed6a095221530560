"""The public keys that verify JSON Web Tokens, as a JWK set (RFC 7517). Symmetric keys are never used."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt

from attention_serving.server.security.errors import SecurityFileError

# Asymmetric only. Each key verifies the algorithms of its kind, or the one that it states.
RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
BY_CURVE = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",), "Ed25519": ("EdDSA",)}
CURVE_TYPES = {"P-256": "EC", "P-384": "EC", "P-521": "EC", "Ed25519": "OKP"}
ALGORITHMS = frozenset({*RSA, *(name for names in BY_CURVE.values() for name in names)})
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_KEYS = 100
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key.

    Attributes:
        key: The key, as PyJWT takes it.
        algorithms: What it may verify.
    """

    key: Any
    algorithms: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KeySet:
    """Keys by their identifiers."""

    keys: Mapping[str, VerificationKey]

    def find(self, key_id: str | None) -> VerificationKey | None:
        """The key of an identifier; for a token without one, the only key of the set."""
        if key_id is None:
            return next(iter(self.keys.values())) if len(self.keys) == 1 else None
        return self.keys.get(key_id)


def read_keys(data: bytes) -> KeySet:
    """Reads a JWK set. Keys for other purposes than signatures, and of unknown kinds, are left out.

    Raises:
        SecurityFileError: It is not one, holds a private key or a weak one, or none that can be used.
    """
    if len(data) > MAX_BYTES:
        raise SecurityFileError(f"the key set is larger than {MAX_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SecurityFileError(f"the key set is not JSON: {error}") from None
    members = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise SecurityFileError('the key set must be an object with an array "keys" of objects')
    if len(members) > MAX_KEYS:
        raise SecurityFileError(f"the key set has {len(members)} keys; the limit is {MAX_KEYS}")
    keys: dict[str, VerificationKey] = {}
    for number, member in enumerate(members):
        found = _key(f"keys[{number}]", member)
        if found is None:
            continue
        key_id = str(member.get("kid", ""))
        if key_id in keys:
            raise SecurityFileError(f"keys[{number}]: its kid is that of another key")
        keys[key_id] = found
    if not keys:
        kinds = ", ".join(sorted(ALGORITHMS))
        raise SecurityFileError(f"the key set has no key that verifies signatures of {kinds}")
    return KeySet(keys)


def _key(where: str, member: Mapping[str, Any]) -> VerificationKey | None:
    """A key of the set; None if it is not for this purpose."""
    algorithms = _algorithms(member)
    if not algorithms or member.get("use", "sig") != "sig":
        return None
    if "d" in member:
        raise SecurityFileError(f"{where}: is a private key; publish the public key only")
    try:
        key = jwt.PyJWK(dict(member), algorithm=algorithms[0]).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        raise SecurityFileError(f"{where}: is not a key of type {member['kty']}") from None
    bits = getattr(key, "key_size", MIN_RSA_BITS) if member["kty"] == "RSA" else MIN_RSA_BITS
    if not MIN_RSA_BITS <= bits <= MAX_RSA_BITS:
        raise SecurityFileError(f"{where}: has {bits} bits; must have {MIN_RSA_BITS} to {MAX_RSA_BITS}")
    return VerificationKey(key, algorithms)


def _algorithms(member: Mapping[str, Any]) -> tuple[str, ...]:
    """What a key may verify; empty if it is of an unknown kind."""
    kind, curve, stated = member.get("kty"), member.get("crv"), member.get("alg")
    possible: tuple[str, ...] = ()
    if kind == "RSA":
        possible = RSA
    elif isinstance(curve, str) and CURVE_TYPES.get(curve) == kind:
        possible = BY_CURVE[curve]
    return possible if stated is None else tuple(name for name in possible if name == stated)
