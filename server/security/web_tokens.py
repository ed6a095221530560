"""Verifies JSON Web Tokens (RFC 7519), with public keys of a JWK set (RFC 7517) in a file or behind a URL.

Each token is verified once: the result is kept until the token expires. The first verification runs on the
thread that takes calls. It takes 70 us (RS256) to 500 us (ES384); to hand it to another thread and back costs
about as much, and both would need the interpreter. How many tokens may fail is limited for each address: see
`_Failures`. No lock is held: single reads and writes of dictionaries are atomic, and two threads that verify
the same token at the same time store the same result.

PyJWT fetches and reads the keys. Its cache is not used: it fetches on the thread that asks for a key, which
is the one that takes calls.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import jwt

from attention_serving.server.addresses import is_loopback_address
from attention_serving.server.engine.errors import OverloadedError
from attention_serving.server.errors import IdentityError
from attention_serving.server.security.rights import (
    CredentialsError,
    ExpiredTokenError,
    Identity,
    InvalidTokenError,
    KeysUnavailableError,
    Rights,
    Source,
)
from attention_serving.server.security.token_file import read_bytes, warn_if_others_may_write
from attention_serving.server.threads import Reloaded, Watched, unreported

# Asymmetric only. An RSA key that does not state its algorithm verifies all of its kind.
RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
ALGORITHMS = frozenset({*RSA, "ES256", "ES384", "ES512", "EdDSA"})
MIN_RSA_BITS, MAX_RSA_BITS = 2048, 8192
MAX_FILE_BYTES = 1 << 20
FETCH_SECONDS = 10.0
# How often a URL is fetched; and how soon after one fetch an unknown key, or a failure, may cause the next.
REFRESH_SECONDS, PAUSE_SECONDS = 3600.0, 10.0
# How far the clocks of the issuer and of this machine may differ, in seconds.
LEEWAY_SECONDS = 30.0
REQUIRED = ["exp", "iss", "aud", "sub"]
# Tokens that are kept: verified ones, and ones that failed.
MAX_VERIFIED, MAX_FAILED = 10_000, 4096
# Failed verifications of an address a second: 100 of 500 us take a twentieth of the thread that takes calls.
MAX_FAILURES = 100
MAX_SUBJECT = 200
# Seconds since 1970 that a float holds exactly.
FOREVER = 2**53
# All that parsing and verifying what a stranger wrote may raise.
BROKEN = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class VerificationKey(NamedTuple):
    """A public key, as PyJWT takes it, and the algorithms that it may verify."""

    key: Any
    algorithms: tuple[str, ...]


KeySet: TypeAlias = Mapping[str, VerificationKey]


class Keys:
    """The keys as they are now, by their identifiers. Changes are taken by a thread of their own."""

    def __init__(self, where: str, reloaded: Reloaded = unreported) -> None:
        """Reads a file. A URL is fetched by the thread first.

        Args:
            where: A file, or a URL; https, or http on this machine.
            reloaded: Called when keys have changed.

        Raises:
            IdentityError: The file cannot be used, or the URL must not be.
        """
        # What the URL returned last, and why the last fetch failed.
        self._content: dict[str, Any] | None = None
        self._error: IdentityError | None = None
        self._fetched, self._next = -math.inf, math.inf
        if "://" in where:
            check_url(where)
            self._client = jwt.PyJWKClient(where, cache_jwk_set=False, timeout=FETCH_SECONDS)
            read: Callable[[], Any] = self._fetch_if_due
        else:
            read = partial(_read_file, Path(where))
            warn_if_others_may_write(Path(where))
        self._watched = Watched("jwks", read, partial(_parsed, where), reloaded)
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

    def _fetch_if_due(self) -> dict[str, Any] | None:
        """What the URL returned last; None before the first fetch.

        Raises:
            IdentityError: The last fetch failed.
        """
        if (now := time.monotonic()) >= self._next:
            self._fetched, self._next = now, now + REFRESH_SECONDS
            try:
                found = self._client.fetch_data()
                read_keys(found)
                self._content, self._error = found, None
            except (*BROKEN, OSError, IdentityError) as error:
                self._next = now + PAUSE_SECONDS
                self._error = IdentityError(f"{shown(self._client.uri)}: {error}")
        if self._error is not None:
            raise self._error
        return self._content


def find_key(keys: KeySet, key_id: str | None) -> VerificationKey | None:
    """The key of an identifier; for a token without one, the only key of the set."""
    if key_id is None:
        return next(iter(keys.values())) if len(keys) == 1 else None
    return keys.get(key_id)


def read_keys(content: Any) -> KeySet:
    """Reads a JWK set. Keys for other purposes than signatures, of unknown kinds, or damaged are left out.

    Raises:
        IdentityError: It is not one, holds a private key or a weak one, or none that can be used.
    """
    members = content.get("keys") if isinstance(content, dict) else None
    keys: dict[str, VerificationKey] = {}
    for member in members if isinstance(members, list) else ():
        try:
            found = jwt.PyJWK(member)
        except (*BROKEN, AttributeError, KeyError):
            continue
        if found.public_key_use not in (None, "sig") or found.algorithm_name not in ALGORITHMS:
            continue
        if hasattr(found.key, "private_bytes"):
            raise IdentityError(f"the key {found.key_id} is a private key; publish the public key only")
        algorithms: tuple[str, ...] = (found.algorithm_name,)
        if found.key_type == "RSA":
            bits = found.key.key_size
            if not MIN_RSA_BITS <= bits <= MAX_RSA_BITS:
                limits = f"{MIN_RSA_BITS} to {MAX_RSA_BITS}"
                raise IdentityError(f"the key {found.key_id} has {bits} bits; must have {limits}")
            algorithms = RSA if member.get("alg") is None else algorithms
        elif member["crv"] == "Ed448":
            continue
        keys.setdefault(str(member.get("kid", "")), VerificationKey(found.key, algorithms))
    if not keys:
        kinds = ", ".join(sorted(ALGORITHMS))
        raise IdentityError(f"this is not a JWK set with a key that verifies signatures of {kinds}")
    return keys


def check_url(url: str) -> None:
    """Checks that keys may come from a URL: whoever can change them on their way can make any token.

    Raises:
        IdentityError: It is neither https, nor http on this machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_local = host == "localhost" or is_loopback_address(host)
    if (parts.scheme == "https" and host) or (parts.scheme == "http" and is_local):
        return
    raise IdentityError(f"{shown(url)}: must begin with https://, or with http:// and a loopback address")


def shown(url: str) -> str:
    """A URL for the log, without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


def _read_file(path: Path) -> Any:
    """The content of a file of keys.

    Raises:
        IdentityError: It cannot be read, or is not JSON.
    """
    content = read_bytes(path, MAX_FILE_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise IdentityError(f"{path}: is not JSON: {error}") from None


def _parsed(where: str, content: Any) -> KeySet | None:
    """The keys; None before the first fetch."""
    try:
        return None if content is None else read_keys(content)
    except IdentityError as error:
        raise IdentityError(f"{where}: {error}") from None


class NotYetValidError(InvalidTokenError):
    """The token will be valid later, so that it must not be remembered as one that failed."""


class UnknownKeyError(InvalidTokenError):
    """The key that signed the token is not one of the issuer's, which may have published it since."""


# What PyJWT finds wrong with a token, as its caller is told.
PROBLEMS: dict[type[Exception], tuple[type[CredentialsError], str]] = {
    jwt.ExpiredSignatureError: (ExpiredTokenError, "the token has expired; get a new one"),
    jwt.ImmatureSignatureError: (NotYetValidError, "the token is not valid yet"),
    jwt.InvalidAudienceError: (InvalidTokenError, "the token is for another audience"),
    jwt.InvalidIssuerError: (InvalidTokenError, "the token is of another issuer"),
    jwt.MissingRequiredClaimError: (
        InvalidTokenError,
        f"the token lacks one of the claims {', '.join(REQUIRED)}",
    ),
    jwt.InvalidAlgorithmError: (
        InvalidTokenError,
        "the algorithm of the token's signature is not accepted, or not that of its key",
    ),
}
DAMAGED = InvalidTokenError, "the token is damaged, or its signature is wrong"


class WebTokens:
    """The identities of JSON Web Tokens. For any thread."""

    def __init__(self, keys: Keys, *, issuer: str, audience: str, rights_claim: str = "scope") -> None:
        """Verifies nothing yet.

        Args:
            keys: The public keys.
            issuer: What the claim `iss` must be.
            audience: What the claim `aud` must be or contain.
            rights_claim: The claim with the rights: a text with spaces between them, or an array.
        """
        self._keys = keys
        self._issuer, self._audience = issuer, audience
        self._rights_claim = rights_claim
        self._known = _Known(keys.current)
        self._failures = _Failures()

    def close(self) -> None:
        """Ends the thread that follows the keys."""
        self._keys.close()

    def of_token(self, token: str, digest: bytes, client: Callable[[], str] = str) -> Identity:
        """The identity of a token, given with its SHA-256.

        Args:
            token: The token.
            digest: Its SHA-256.
            client: Returns the connection that it arrived on, as ADDRESS:PORT.

        Raises:
            CredentialsError: The token is not valid.
            KeysUnavailableError: There are no keys yet.
            OverloadedError: Too many tokens of the same address have failed just now to try another.
        """
        known, keys = self._known, self._keys.current
        if keys is not known.keys:  # tokens that a removed key has signed are no longer valid
            known = self._known = _Known(keys)
        if (identity := known.verified.get(digest)) is not None:
            return identity
        if (failure := known.failed.get(digest)) is not None:
            if isinstance(failure, UnknownKeyError):
                self._keys.want()
            raise type(failure)(failure.message)
        connection = client()
        self._failures.check(connection, time.time())
        try:
            identity = self._identity(self._claims(token, keys))
        except CredentialsError as error:
            self._failures.add(connection)
            if not isinstance(error, NotYetValidError):
                # A copy without its traceback, which would keep the call.
                _keep(known.failed, digest, type(error)(error.message), MAX_FAILED)
            raise
        _keep(known.verified, digest, identity, MAX_VERIFIED)
        return identity

    def _claims(self, token: str, keys: KeySet | None) -> dict[str, Any]:
        """The claims of a token that is valid now. Its key decides about the algorithm."""
        try:
            header = jwt.get_unverified_header(token)
        except BROKEN:
            raise InvalidTokenError("the token is not a JSON Web Token") from None
        if keys is None:
            self._keys.want()
            raise KeysUnavailableError("the keys of the issuer are not available yet; try again later")
        key = find_key(keys, header.get("kid"))
        if key is None:
            self._keys.want()
            raise UnknownKeyError("the key that signed the token is not one of the issuer's")
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=key.algorithms,
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED, "verify_iat": False},
            )
        except BROKEN as error:
            kind, message = PROBLEMS.get(type(error), DAMAGED)
            raise kind(message) from None
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        subject = claims["sub"]
        if not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
            raise InvalidTokenError(f"the claim sub must be a text of 1 to {MAX_SUBJECT} characters")
        return Identity(
            source=Source.WEB_TOKEN,
            name=subject,
            rights=_rights(claims.get(self._rights_claim)),
            expires=min(int(claims["exp"]), FOREVER) + LEEWAY_SECONDS,
        )


class _Known:
    """Tokens that were verified with one key set, and those that failed, by their SHA-256."""

    def __init__(self, keys: KeySet | None) -> None:
        self.keys = keys
        self.verified: dict[bytes, Identity] = {}
        self.failed: dict[bytes, CredentialsError] = {}


class _Failures:
    """Counts the failed verifications of this second, for each connection and for each address.

    Past the limit of an address, its connections on which a token has failed are refused. Its other
    connections are not, so that callers who share the address of an attacker are served: a forged token then
    takes a new connection, which costs the attacker more than the verification costs the server.
    """

    def __init__(self) -> None:
        self._second = 0
        self._counts: Counter[str] = Counter()

    def check(self, connection: str, now: float) -> None:
        """Refuses to try a token that arrived on a connection.

        Raises:
            OverloadedError: Too many have failed.
        """
        if int(now) != self._second:
            self._second, self._counts = int(now), Counter()
        if self._counts[_address(connection)] >= MAX_FAILURES and connection in self._counts:
            raise OverloadedError(
                "too many tokens of this address are not valid; try again later", retry_after=1
            )

    def add(self, connection: str) -> None:
        """Counts a token that failed."""
        self._counts.update((connection, _address(connection)))


def _address(connection: str) -> str:
    """The address of a connection, without its port."""
    return connection.rpartition(":")[0]


def _rights(claim: Any) -> Rights:
    """The rights in a claim. What is not a right of this server is ignored: it belongs to others."""
    texts = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return Rights.known(text for text in texts if isinstance(text, str))


def _keep(kept: dict[bytes, Any], digest: bytes, value: Identity | CredentialsError, most: int) -> None:
    """Adds an entry. The oldest half goes when there are too many."""
    if len(kept) >= most:
        for old in list(kept)[: most // 2]:
            kept.pop(old, None)  # another thread may have removed it
    kept[digest] = value
