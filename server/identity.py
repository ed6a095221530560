"""The guard that the settings ask for."""

from functools import partial
from pathlib import Path

from attention_serving.server.errors import IdentityError
from attention_serving.server.security.errors import SecurityFileError
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.identities import IdentityLimits
from attention_serving.server.security.token_file import TokenTable, read_table
from attention_serving.server.security.watched_file import NullSecurityObserver, SecurityObserver, WatchedFile
from attention_serving.server.settings import Settings

TOKENS = "tokens"


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
    observer = observer or NullSecurityObserver()
    limits = IdentityLimits()
    try:
        table = _table(settings, limits, observer)
        if not settings.jwt_jwks:
            return Guard(table)
        return _with_web_tokens(settings, table, limits, observer)
    except SecurityFileError as error:
        raise IdentityError(str(error)) from error


def _with_web_tokens(
    settings: Settings,
    table: WatchedFile[TokenTable] | None,
    limits: IdentityLimits,
    observer: SecurityObserver,
) -> Guard:
    # Their libraries take time and memory that a server without them need not spend.
    from attention_serving.server.security.key_sources import FileKeys, KeySource, UrlKeys, is_url  # noqa: PLC0415
    from attention_serving.server.security.web_tokens import WebTokens  # noqa: PLC0415

    where = settings.jwt_jwks or ""
    keys: KeySource
    keys = UrlKeys(where, observer) if is_url(where) else FileKeys(Path(where), observer)
    web_tokens = WebTokens(
        keys,
        issuer=settings.jwt_issuer,
        audience=settings.jwt_audience,
        rights_claim=settings.jwt_rights_claim,
        limits=limits,
    )
    return Guard(table, web_tokens, close=keys.close)


def _table(
    settings: Settings, limits: IdentityLimits, observer: SecurityObserver
) -> WatchedFile[TokenTable] | None:
    if settings.tokens is None:
        return None
    return WatchedFile(TOKENS, settings.tokens, partial(read_table, defaults=limits), observer)
