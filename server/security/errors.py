"""Errors of calls that are not permitted.

EngineError
├── CredentialsError         UNAUTHENTICATED: it is not known who calls
│   ├── MissingCredentialsError     the call has none
│   ├── InvalidTokenError           the token is not one of this server's, or was revoked
│   └── ExpiredTokenError           the token was valid once
├── PermissionDeniedError    PERMISSION_DENIED: the identity lacks a right
├── KeysUnavailableError     UNAVAILABLE: the keys that verify tokens have not been fetched yet
└── OverloadedError
    └── IdentityLimitError   RESOURCE_EXHAUSTED: the identity holds its share

No message contains a token, or a part of one.
"""

from attention_serving.server.engine.errors import Code, EngineError, OverloadedError


class CredentialsError(EngineError):
    """It is not known who calls."""

    code = Code.UNAUTHENTICATED
    reason = "CREDENTIALS_INVALID"


class MissingCredentialsError(CredentialsError):
    """The call has neither a token nor a certificate that this server knows."""

    reason = "CREDENTIALS_MISSING"


class InvalidTokenError(CredentialsError):
    """The token is not one of this server's: it is wrong, or was revoked."""

    reason = "TOKEN_INVALID"


class ExpiredTokenError(CredentialsError):
    """The token was valid once."""

    reason = "TOKEN_EXPIRED"


class PermissionDeniedError(EngineError):
    """The caller is known, and lacks a right, which the message names."""

    code = Code.PERMISSION_DENIED
    reason = "RIGHT_MISSING"


class KeysUnavailableError(EngineError):
    """The keys that verify tokens have not been fetched yet."""

    code = Code.UNAVAILABLE
    reason = "KEYS_UNAVAILABLE"


class IdentityLimitError(OverloadedError):
    """The identity holds its share of a resource; the request was not queued."""

    reason = "IDENTITY_LIMIT"
