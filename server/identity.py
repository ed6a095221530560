"""The guard that the settings ask for."""

from functools import partial
from typing import Protocol

from attention_serving.server.security.guard import Guard
from attention_serving.server.security.token_file import parse_table, read_bytes
from attention_serving.server.settings import Settings
from attention_serving.server.watched import Watched


class SecurityObserver(Protocol):
    """Receives reports of tokens and keys that were read again. Called on any thread."""

    def reloaded(self, what: str, *, success: bool) -> None:
        """Tokens or keys have changed, or cannot be used: what was read before stays in use."""


def guard_of(settings: Settings, observer: SecurityObserver | None = None) -> Guard | None:
    """The guard of a server, or None if everyone may do everything. Its owner closes it.

    Args:
        settings: Settings of the server.
        observer: Receives a report of everything that is read again.

    Raises:
        IdentityError: The tokens file or the keys cannot be used.
    """
    if not settings.has_identities:
        return None

    def report(what: str, value: object) -> None:
        if observer is not None:
            observer.reloaded(what, success=value is not None)

    table = web_tokens = None
    if settings.jwt_jwks:
        # Their libraries take time and memory that a server without them need not spend.
        from attention_serving.server.security.keys import Keys  # noqa: PLC0415
        from attention_serving.server.security.web_tokens import WebTokens  # noqa: PLC0415

        web_tokens = WebTokens(
            Keys(settings.jwt_jwks, partial(report, "jwks")),
            issuer=settings.jwt_issuer,
            audience=settings.jwt_audience,
            rights_claim=settings.jwt_rights_claim,
        )
    if settings.tokens is not None:
        path = settings.tokens
        table = Watched(
            "tokens", partial(read_bytes, path), partial(parse_table, path), partial(report, "tokens")
        )
        table.start()
    return Guard(table, web_tokens)
