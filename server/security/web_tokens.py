"""Verifies JSON Web Tokens (RFC 7519), each once: the result is kept until the token expires.

The first verification runs on the thread that takes calls. It takes 70 us (RS256) to 500 us (ES384); to hand
it to another thread and back costs about as much, and both would need the interpreter. Each token costs it
once. What does not have to be paid by honest callers is bounded: verifications that fail are limited to
`MAX_FAILURES` a second, and a token that failed is remembered.
"""

import json
import threading
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from typing import Any

import jwt

from server.engine.errors import EngineError, OverloadedError
from server.security.errors import (
    CredentialsError,
    ExpiredTokenError,
    InvalidTokenError,
    KeysUnavailableError,
)
from server.security.identities import Identity, IdentityLimits, Source
from server.security.key_set import ALGORITHMS, VerificationKey
from server.security.key_sources import KeySource
from server.security.rights import Rights

# How far the clocks of the issuer and of this machine may differ, in seconds.
LEEWAY_SECONDS = 30.0
REQUIRED = ["exp", "iss", "aud", "sub"]
# Tokens that are kept: verified ones, and ones that failed.
MAX_VERIFIED, MAX_FAILED = 10_000, 4096
# Failed verifications a second: 100 of 500 us each take a twentieth of the thread that takes calls.
MAX_FAILURES = 100
MAX_SUBJECT = 200
# All that parsing and verifying what a stranger wrote may raise.
BROKEN = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class NotYetValidError(InvalidTokenError):
    """The token will be valid later, so that it must not be remembered as one that failed."""


class WebTokens:
    """The identities of JSON Web Tokens. For any thread."""

    def __init__(
        self,
        source: KeySource,
        *,
        issuer: str,
        audience: str,
        rights_claim: str = "scope",
        limits: IdentityLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Verifies nothing yet.

        Args:
            source: The public keys.
            issuer: What the claim `iss` must be.
            audience: What the claim `aud` must be or contain.
            rights_claim: The claim with the rights: a text with spaces between them, or an array.
            limits: Limits of each identity.
            clock: Seconds since 1970.
        """
        self._source = source
        self._issuer, self._audience = issuer, audience
        self._rights_claim = rights_claim
        self._limits = limits or IdentityLimits()
        self._clock = clock
        self._keys = source.keys
        self._verified: dict[bytes, Identity] = {}
        self._failed: dict[bytes, CredentialsError] = {}
        self._window, self._failures = 0.0, 0
        self._lock = threading.Lock()

    def of_token(self, token: str, digest: bytes) -> Identity:
        """The identity of a token, given with its SHA-256.

        Raises:
            CredentialsError: The token is not valid.
            KeysUnavailableError: There are no keys yet.
            OverloadedError: Too many tokens have failed just now to try another.
        """
        with self._lock:
            keys = self._source.keys
            if keys is not self._keys:  # what a removed key has signed is valid no more
                self._keys = keys
                self._verified.clear()
                self._failed.clear()
            identity = self._verified.get(digest)
            return self._verify(token, digest) if identity is None else identity

    def _verify(self, token: str, digest: bytes) -> Identity:
        if (known := self._failed.get(digest)) is not None:
            raise type(known)(known.message)
        now = self._clock()
        self._check_failures(now)
        key, algorithm = self._key(token)
        try:
            claims = self._claims(token, key, algorithm)
            identity = self._identity(claims)
        except CredentialsError as error:
            self._failures += 1
            if not isinstance(error, NotYetValidError):
                # A copy without its traceback, which would keep the call.
                _keep(self._failed, digest, type(error)(error.message), MAX_FAILED)
            raise
        _keep(self._verified, digest, identity, MAX_VERIFIED)
        return identity

    def _check_failures(self, now: float) -> None:
        if not 0 <= now - self._window < 1:
            self._window, self._failures = now, 0
        if self._failures >= MAX_FAILURES:
            raise OverloadedError("too many tokens that are not valid arrive; try again later", retry_after=1)

    def _key(self, token: str) -> tuple[VerificationKey, str]:
        """The key that a token names, and its algorithm, which the key decides about."""
        header = _header(token)
        algorithm, key_id = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise InvalidTokenError("the algorithm of the token's signature is not accepted")
        if "crit" in header or not isinstance(key_id, str | None):
            raise InvalidTokenError("the header of the token is not one that this server understands")
        if self._keys is None:
            self._source.want()
            raise KeysUnavailableError("the keys of the issuer are not available yet; try again later")
        key = self._keys.find(key_id)
        if key is None:
            self._source.want()
            raise InvalidTokenError("the key that signed the token is not one of the issuer's")
        if algorithm not in key.algorithms:
            raise InvalidTokenError("the token's key is not one for the algorithm of its signature")
        return key, algorithm

    def _claims(self, token: str, key: VerificationKey, algorithm: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                issuer=self._issuer,
                audience=self._audience,
                leeway=LEEWAY_SECONDS,
                options={"require": REQUIRED, "verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
        except jwt.InvalidAudienceError:
            raise InvalidTokenError("the token is for another audience") from None
        except jwt.InvalidIssuerError:
            raise InvalidTokenError("the token is of another issuer") from None
        except jwt.MissingRequiredClaimError:
            raise InvalidTokenError(f"the token lacks one of the claims {', '.join(REQUIRED)}") from None
        except BROKEN:
            raise InvalidTokenError("the token is damaged, or its signature is wrong") from None
        return claims

    def _identity(self, claims: dict[str, Any]) -> Identity:
        now, subject = self._clock(), claims["sub"]
        expires = _moment(claims["exp"]) + LEEWAY_SECONDS
        if now >= expires:
            raise ExpiredTokenError("the token has expired; get a new one")
        if "nbf" in claims and now < _moment(claims["nbf"]) - LEEWAY_SECONDS:
            raise NotYetValidError("the token is not valid yet")
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
            raise InvalidTokenError(f"the claim sub must be a text of 1 to {MAX_SUBJECT} characters")
        return Identity(
            source=Source.WEB_TOKEN,
            name=subject,
            rights=_rights(claims.get(self._rights_claim)),
            expires=expires,
            limits=self._limits,
        )


def _header(token: str) -> dict[str, Any]:
    segment = token.partition(".")[0]
    try:
        header = json.loads(urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    except BROKEN:
        header = None
    if not isinstance(header, dict):
        raise InvalidTokenError("the token is not a JSON Web Token")
    return header


def _moment(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:  # noqa: PLR2004
        raise InvalidTokenError("a moment in the token is not a number of seconds")
    return float(value)


def _rights(claim: Any) -> Rights:
    """The rights in a claim. What is not a right of this server is ignored: it belongs to others."""
    texts = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return Rights.known(text for text in texts if isinstance(text, str))


def _keep(kept: dict[bytes, Any], digest: bytes, value: Identity | EngineError, most: int) -> None:
    """Adds an entry. The oldest half goes when there are too many."""
    if len(kept) >= most:
        for old in list(kept)[: most // 2]:
            del kept[old]
    kept[digest] = value
