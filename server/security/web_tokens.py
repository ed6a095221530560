"""Verifies JSON Web Tokens (RFC 7519), with public keys of a JWK set (RFC 7517) in a file or behind a URL.

Each good token is verified once: its identity is kept until the token expires. The first verification runs on
the thread that takes calls. It takes 70 us (RS256) to 500 us (ES384); to hand it to another thread and back
costs about as much, and both would need the interpreter. How many tokens may fail is limited for each
address. No lock is held: single reads and writes of dictionaries are atomic, and two threads that verify the
same token at the same time store the same result.

PyJWT fetches and reads the keys. Its cache is not used: it fetches on the thread that asks for a key, which
is the one that takes calls.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import jwt

from attention_serving.server.engine.errors import OverloadedError, quoted
from attention_serving.server.errors import ServerError
from attention_serving.server.security.rights import (
    CredentialsError,
    ExpiredTokenError,
    Identity,
    InvalidTokenError,
    KeysUnavailableError,
    Rights,
)
from attention_serving.server.security.token_file import parse_text
from attention_serving.server.threads import Reloaded, Watched, read_bytes, unreported

# Asymmetric only.
RSA_ALGORITHMS = "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"
ALGORITHMS = *RSA_ALGORITHMS, "ES256", "ES384", "ES512", "EdDSA"
MIN_RSA_BITS = 2048
SETTING, LOCAL = "--jwt-jwks", "http://127.0.0.1/"
# Whoever can change the keys on their way can make any token.
URL = re.compile(r"https://[^/]|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?/")
FETCH_SECONDS = 10.0
# How often a URL is fetched; and how soon after one fetch an unknown key, or a failure, may cause the next.
REFRESH_SECONDS, PAUSE_SECONDS = 3600.0, 10.0
# How far the clocks of the issuer and of this machine may differ, in seconds.
LEEWAY_SECONDS = 30.0
REQUIRED = ["exp", "iss", "aud", "sub"]
# Tokens whose identities are kept. When there are more, all are verified again.
MAX_KNOWN = 10_000
# Failed verifications of an address a second: 100 of 500 us take a twentieth of the thread that takes calls.
MAX_FAILURES = 100
MAX_SUBJECT = 200
# Seconds since 1970 that a float holds exactly.
FOREVER = 2**53
# All that parsing and verifying what a stranger wrote may raise.
INVALID_TOKEN_ERRORS = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)

KeySet: TypeAlias = Mapping[str, jwt.PyJWK]


class Keys:
    """The keys as they are now, by their identifiers. Changes are taken by a thread of their own."""

    def __init__(self, where: str, reloaded: Reloaded = unreported) -> None:
        """Reads a file. A URL is fetched by the thread first.

        Args:
            where: A file, or a URL; https, or http on this machine.
            reloaded: Called when keys have changed.

        Raises:
            ServerError: The file cannot be used, or the URL must not be.
        """
        # What the last fetch returned, or why it failed; None before the first.
        self._outcome: dict[str, Any] | ServerError | None = None
        self._fetched, self._next = -math.inf, math.inf
        read: Callable[[], Any] = partial(read_bytes, Path(where))
        if "://" in where:
            if not URL.match(where):
                raise ServerError(f"{SETTING} must be https, or http on this machine such as {LOCAL}")
            self._client = jwt.PyJWKClient(where, cache_jwk_set=False, timeout=FETCH_SECONDS)
            # A URL may contain a password, and is not logged.
            read, where = self._fetch_if_due, SETTING
        self._watched = Watched("jwks", read, partial(_keys_in, where), reloaded)
        self._next = -math.inf
        self._watched.start()

    @property
    def current(self) -> KeySet | None:
        """The keys; None as long as they could not be fetched. Another object after each change."""
        return self._watched.value

    def want(self) -> None:
        """A token names a key that is not there: it may be new. Returns at once. For any thread."""
        self._next = min(self._next, self._fetched + PAUSE_SECONDS)

    def _fetch_if_due(self) -> dict[str, Any] | None:
        """What the URL returned last; None before the first fetch.

        Raises:
            ServerError: The last fetch failed.
        """
        if (now := time.monotonic()) >= self._next:
            self._fetched, self._next = now, now + REFRESH_SECONDS
            try:
                self._outcome = self._client.fetch_data()
                read_keys(self._outcome)
            except (*INVALID_TOKEN_ERRORS, OSError, ServerError) as error:
                self._next = now + PAUSE_SECONDS
                self._outcome = ServerError(f"{SETTING}: {error}")
        if isinstance(self._outcome, ServerError):
            raise self._outcome
        return self._outcome


def find_key(keys: KeySet, key_id: str | None) -> jwt.PyJWK | None:
    """The key of an identifier; for a token without one, the only key of the set."""
    if key_id is None:
        return next(iter(keys.values())) if len(keys) == 1 else None
    return keys.get(key_id)


def read_keys(content: Any) -> KeySet:
    """Reads a JWK set. Keys that do not verify signatures, damaged, private and weak ones are left out.

    Raises:
        ServerError: No key is left.
    """
    try:
        entries = jwt.PyJWKSet.from_dict(content).keys
    except (*INVALID_TOKEN_ERRORS, AttributeError):
        entries = []
    keys = {str(key.key_id or ""): key for key in entries if _verifies(key)}
    if not keys:
        kinds = ", ".join(ALGORITHMS)
        raise ServerError(f"this is not a JWK set with a public key that verifies signatures of {kinds}")
    return keys


def _verifies(key: jwt.PyJWK) -> bool:
    if key.algorithm_name not in ALGORITHMS or key.public_key_use not in (None, "sig"):
        return False
    is_weak = key.key_type == "RSA" and key.key.key_size < MIN_RSA_BITS
    return not is_weak and not hasattr(key.key, "private_bytes")


def _keys_in(where: str, content: Any) -> KeySet | None:
    """The keys in what was read; None before the first fetch.

    Raises:
        ServerError: It is not a JWK set that can be used.
    """
    if content is None:
        return None
    if isinstance(content, bytes):
        content = parse_text(Path(where), content)
    try:
        return read_keys(content)
    except ServerError as error:
        raise ServerError(f"{where}: {error}") from None


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
        self._keys, self._rights_claim = keys, rights_claim
        self._issuer, self._audience = issuer, audience
        # Those of tokens that were verified, by their SHA-256, with the key set that they hold for.
        self._cache: tuple[KeySet | None, dict[bytes, Identity]] = None, {}
        # Failed verifications of this second, for each connection and for each address.
        self._second, self._failures = 0, Counter[str]()

    def of_token(self, token: str, digest: bytes, client: Callable[[], str] = str) -> Identity:
        """The identity of a token, given with its SHA-256.

        Args:
            token: The token.
            digest: Its SHA-256.
            client: Returns the connection that it arrived on, as ADDRESS:PORT.

        Raises:
            CredentialsError: The token is not valid now.
            KeysUnavailableError: There are no keys yet.
            OverloadedError: Too many tokens of this address have failed.
        """
        keys = self._keys.current
        if keys is None:
            raise KeysUnavailableError("the keys of the issuer are not available yet; try again later")
        cached_keys, identities = self._cache
        if cached_keys is not keys or len(identities) >= MAX_KNOWN:
            identities = {}
            self._cache = keys, identities
        if (identity := identities.get(digest)) is None:
            connection = client()
            self._check_failures(connection)
            try:
                identity = identities[digest] = self._identity(self._claims(token, keys))
            except CredentialsError:
                self._failures.update((connection, _address(connection)))
                raise
        return identity

    def _check_failures(self, connection: str) -> None:
        """Refuses to try a token that arrived on a connection.

        Past the limit of an address, its connections on which a token has failed are refused. Its other
        connections are not, so that callers who share the address of an attacker are served: a forged token
        then takes a new connection, which costs the attacker more than the verification costs the server.

        Raises:
            OverloadedError: Too many have failed.
        """
        if (second := int(time.time())) != self._second:
            self._second, self._failures = second, Counter()
        failures = self._failures
        if failures[_address(connection)] >= MAX_FAILURES and connection in failures:
            message = "too many tokens of this address are not valid; try again later"
            raise OverloadedError(message, retry_after=1)

    def _claims(self, token: str, keys: KeySet) -> dict[str, Any]:
        """The claims of a token that is valid now. Its key decides about the algorithm."""
        try:
            key = find_key(keys, jwt.get_unverified_header(token).get("kid"))
            if key is None:
                self._keys.want()
                raise InvalidTokenError("the key that signed the token is not one of the issuer's")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED, "verify_iat": False},
            )
        except jwt.ExpiredSignatureError:
            raise ExpiredTokenError("the token has expired; get a new one") from None
        except INVALID_TOKEN_ERRORS as error:
            raise InvalidTokenError(f"the token is not valid: {quoted(str(error))}") from None
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        subject = claims["sub"]
        if not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
            raise InvalidTokenError(f"the claim sub must be a text of 1 to {MAX_SUBJECT} characters")
        rights = claims.get(self._rights_claim)
        texts = rights.split() if isinstance(rights, str) else rights if isinstance(rights, list) else []
        return Identity(
            source="jwt",
            name=subject,
            rights=Rights.parse_known(text for text in texts if isinstance(text, str)),
            expires=min(int(claims["exp"]), FOREVER) + LEEWAY_SECONDS,
        )


def _address(connection: str) -> str:
    """The address of a connection, without its port."""
    return connection.rpartition(":")[0]
