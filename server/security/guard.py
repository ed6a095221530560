"""Finds the identity of a call, or the error that it ends with."""

import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from attention_serving.server.security.rights import Identity, InvalidTokenError, MissingCredentialsError
from attention_serving.server.security.token_file import TokenTable, digest_of
from attention_serving.server.threads import Watched

if TYPE_CHECKING:  # its libraries are needed with JSON Web Tokens only
    from attention_serving.server.security.web_tokens import WebTokens

AUTHORIZATION = "authorization"
# Source: RFC 6750, section 2.1; the name of a scheme has no case.
MAX_TOKEN_CHARACTERS = 8192
BEARER = re.compile(r"bearer +([A-Za-z0-9._~+/-]+=*) *", re.IGNORECASE)
# A JSON Web Token has three parts.
DOTS = 2
Metadata = Iterable[tuple[str, str | bytes]]


class Guard:
    """Authenticates calls. For any thread."""

    def __init__(
        self, table: Watched[bytes, TokenTable] | None, web_tokens: "WebTokens | None" = None
    ) -> None:
        """Creates a guard.

        Args:
            table: The identities of the tokens file.
            web_tokens: Verifies JSON Web Tokens.
        """
        self._table, self._web_tokens = table, web_tokens

    def authenticate(
        self, metadata: Metadata, certificates: Callable[[], tuple[str, ...]], client: Callable[[], str] = str
    ) -> Identity:
        """The identity of a call: that of its token, or else that of its certificate.

        A token that is not valid is an error even if the certificate is: what the caller asked for is
        checked. It takes a few microseconds for a token that was seen before.

        Args:
            metadata: The metadata of the call.
            certificates: Returns the names in the verified client certificate.
            client: Returns the connection of the caller, as ADDRESS:PORT. Failed verifications count for it.

        Raises:
            CredentialsError: The caller is unknown.
            EngineError: It cannot be found out now.
        """
        token = bearer_token(metadata)
        identity = self._of_certificate(certificates()) if token is None else self._of_token(token, client)
        identity.check_expiry(time.time())
        return identity

    def _of_token(self, token: str, client: Callable[[], str]) -> Identity:
        digest = digest_of(token)
        if self._table is not None and (identity := self._table.value.get(digest)) is not None:
            return identity
        if self._web_tokens is not None and token.count(".") == DOTS:
            return self._web_tokens.of_token(token, digest, client)
        raise InvalidTokenError("the token is not one of this server's: it is wrong, or was revoked")

    def _of_certificate(self, names: tuple[str, ...]) -> Identity:
        table = self._table.value if self._table is not None else {}
        for name in names:
            if name in table:
                return table[name]
        unknown = "; its client certificate has no name that this server knows" if names else ""
        raise MissingCredentialsError(f'a token is required: send "authorization: Bearer TOKEN"{unknown}')


def bearer_token(metadata: Metadata) -> str | None:
    """The token of a call; None if it has none.

    Raises:
        InvalidTokenError: There are several, or it is not a bearer token.
    """
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if not values:
        return None
    if len(values) > 1:
        raise InvalidTokenError("the call has several authorization headers; send one")
    value = values[0]
    if isinstance(value, bytes):
        value = value.decode("ascii", "replace")
    match = BEARER.fullmatch(value) if len(value) <= MAX_TOKEN_CHARACTERS else None
    if match is None:
        rule = f'must be "Bearer TOKEN", of at most {MAX_TOKEN_CHARACTERS} characters'
        raise InvalidTokenError(f"the authorization header {rule}")
    return match[1]
