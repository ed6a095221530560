"""The public keys that verify JSON Web Tokens: a JWK set (RFC 7517) in a file, or behind a URL.

PyJWT reads the keys. Its client for URLs is not used: it fetches on the thread that asks, here the one that
takes calls, for each token that names an unknown key; follows redirections; and reads answers of any size.
"""

import ipaddress
import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import jwt

from attention_serving.server.errors import IdentityError
from attention_serving.server.security.token_file import read_bytes, warn_if_others_may_write
from attention_serving.server.watched import Watched

# Asymmetric only. An RSA key that does not state its algorithm verifies all of its kind.
RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = frozenset({*RSA, "ES256", "ES384", "ES512", "EdDSA"})
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_KEYS = 100
MAX_BYTES = 1 << 20
FETCH_SECONDS = 10.0
CURVES = frozenset({"P-256", "P-384", "P-521", "Ed25519"})
# How often a URL is fetched; and how soon after one fetch an unknown key, or a failure, may cause the next.
REFRESH_SECONDS, PAUSE_SECONDS = 3600.0, 10.0


class VerificationKey(NamedTuple):
    """A public key, as PyJWT takes it, and the algorithms that it may verify."""

    key: Any
    algorithms: tuple[str, ...]


KeySet: TypeAlias = Mapping[str, VerificationKey]


class Keys:
    """The keys as they are now, by their identifiers. Changes are taken by a thread of their own."""

    def __init__(self, where: str, changed: Callable[[KeySet | None], object] | None = None) -> None:
        """Reads a file. A URL is fetched by the thread first.

        Args:
            where: A file, or a URL; https, or http on this machine.
            changed: Called with keys that have changed; with None if they cannot be used.

        Raises:
            IdentityError: The file cannot be used, or the URL must not be.
        """
        self._url = where
        self._data = b""
        self._error: IdentityError | None = None
        self._fetched, self._next = -math.inf, math.inf
        is_url = "://" in where
        if is_url:
            check_url(where)
        path = Path(where)
        read = self._fetch_if_due if is_url else partial(read_bytes, path, MAX_BYTES)
        self._watched = Watched("jwks", read, partial(_parsed, where), changed)
        if not is_url:
            warn_if_others_may_write(path)
        self._next = -math.inf
        self._watched.start()

    @property
    def current(self) -> KeySet | None:
        """The keys; None as long as they could not be fetched. Another object after each change."""
        return self._watched.value

    def want(self) -> None:
        """A token names a key that is not there: it may be new. Returns at once. For any thread."""
        self._next = min(self._next, self._fetched + PAUSE_SECONDS)

    def close(self) -> None:
        """Ends the thread. A fetch in progress is not waited for."""
        self._watched.close()

    def _fetch_if_due(self) -> bytes:
        """What the URL returned last.

        Raises:
            IdentityError: The last fetch failed.
        """
        if (now := time.monotonic()) >= self._next:
            self._fetched, self._next = now, now + REFRESH_SECONDS
            try:
                data = _fetch(self._url)
                read_keys(data)
                self._data, self._error = data, None
            except (OSError, HTTPException, ValueError, IdentityError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                self._next = now + PAUSE_SECONDS
                self._error = IdentityError(f"{shown(self._url)}: {error}")
        if self._error is not None:
            raise self._error
        return self._data


def find_key(keys: KeySet, key_id: str | None) -> VerificationKey | None:
    """The key of an identifier; for a token without one, the only key of the set."""
    if key_id is None:
        return next(iter(keys.values())) if len(keys) == 1 else None
    return keys.get(key_id)


def read_keys(data: bytes) -> KeySet:
    """Reads a JWK set. Keys for other purposes than signatures, and of unknown kinds, are left out.

    Raises:
        IdentityError: It is not one, holds a private key or a weak one, or none that can be used.
    """
    if len(data) > MAX_BYTES:
        raise IdentityError(f"the key set is larger than {MAX_BYTES} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IdentityError(f"the key set is not JSON: {error}") from None
    members = content.get("keys") if isinstance(content, dict) else None
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise IdentityError('the key set must be an object with an array "keys" of objects')
    if len(members) > MAX_KEYS:
        raise IdentityError(f"the key set has {len(members)} keys; the limit is {MAX_KEYS}")
    keys: dict[str, VerificationKey] = {}
    for number, member in enumerate(members):
        key_id, found = str(member.get("kid", "")), _key(f"keys[{number}]", member)
        if found is not None and keys.setdefault(key_id, found) is not found:
            raise IdentityError(f"keys[{number}]: its kid is that of another key")
    if not keys:
        kinds = ", ".join(sorted(ALGORITHMS))
        raise IdentityError(f"the key set has no key that verifies signatures of {kinds}")
    return keys


def check_url(url: str) -> None:
    """Checks that keys may come from a URL: whoever can change them on their way can make any token.

    Raises:
        IdentityError: It is neither https, nor http on this machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if (parts.scheme == "https" and host) or (parts.scheme == "http" and _is_loopback(host)):
        return
    raise IdentityError(f"{shown(url)}: must begin with https://, or with http:// and a loopback address")


def shown(url: str) -> str:
    """A URL for the log, without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection could lead to another host, or away from https."""

    def redirect_request(self, *_arguments: Any) -> None:
        """Follows none."""


def _fetch(url: str) -> bytes:
    with urllib.request.build_opener(_NoRedirects).open(url, timeout=FETCH_SECONDS) as response:
        data: bytes = response.read(MAX_BYTES + 1)
        return data


def _parsed(where: str, data: bytes) -> KeySet | None:
    """The keys; None before the first fetch."""
    try:
        return read_keys(data) if data else None
    except IdentityError as error:
        raise IdentityError(f"{where}: {error}") from None


def _key(where: str, member: dict[str, Any]) -> VerificationKey | None:
    """A key of the set; None if it is not for this purpose."""
    if member.get("use", "sig") != "sig":
        return None
    try:
        found = jwt.PyJWK(member)
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        is_ours = member.get("kty") == "RSA" or member.get("crv") in CURVES
        if is_ours and member.get("alg") in (None, *ALGORITHMS):
            # Without the message, which may contain the key.
            raise IdentityError(f"{where}: is damaged, or its alg is not one of its kind of key") from None
        return None
    if found.algorithm_name not in ALGORITHMS or member.get("crv") == "Ed448":
        return None
    if hasattr(found.key, "private_bytes"):
        raise IdentityError(f"{where}: is a private key; publish the public key only")
    if found.key_type != "RSA":
        return VerificationKey(found.key, (found.algorithm_name,))
    if not MIN_RSA_BITS <= found.key.key_size <= MAX_RSA_BITS:
        raise IdentityError(
            f"{where}: has {found.key.key_size} bits; must have {MIN_RSA_BITS} to {MAX_RSA_BITS}"
        )
    return VerificationKey(found.key, RSA if member.get("alg") is None else (found.algorithm_name,))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
