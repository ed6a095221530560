"""Who a call is from: its token, or else its certificate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_serving.server.security.guard import MAX_TOKEN_CHARACTERS, Guard, bearer_token
from attention_serving.server.security.rights import (
    CredentialsError,
    ExpiredTokenError,
    InvalidTokenError,
    MissingCredentialsError,
)
from attention_serving.server.security.web_tokens import WebTokens
from tests.server.security.samples import (
    AUDIENCE,
    ISSUER,
    FixedKeys,
    entry,
    public_jwk,
    signed,
    watched,
    write_tokens,
)

JOBS = ("CN of it", "jobs.example")


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[Guard]:
    path = write_tokens(
        tmp_path / "tokens.json",
        entry("one", "first", "read"),
        entry("old", "second", "read", expires="2020-01-01T00:00:00Z"),
        entry("jobs", None, "read", certificate="jobs.example"),
    )
    tokens = WebTokens(FixedKeys(public_jwk("ES256")), issuer=ISSUER, audience=AUDIENCE)
    guard = Guard(watched(path), tokens)
    yield guard
    guard.close()


def name_of(guard: Guard, *values: str | bytes, certificates: tuple[str, ...] = ()) -> str:
    sent: list[tuple[str, str | bytes]] = [("authorization", value) for value in values]
    return guard.identify([("user-agent", "test"), *sent], lambda: certificates).name


def test_callers_are_named_by_their_token_or_else_their_certificate(guard: Guard) -> None:
    assert name_of(guard, "Bearer first") == "one"
    assert name_of(guard, b"bearer   first ") == "one"
    assert name_of(guard, f"Bearer {signed('ES256', sub='caller')}") == "caller"
    assert name_of(guard, certificates=JOBS) == "jobs"
    assert name_of(guard, "Bearer first", certificates=JOBS) == "one"


@pytest.mark.parametrize(
    ("values", "certificates", "kind", "error"),
    [
        ([], (), MissingCredentialsError, "a token is required"),
        ([], ("other.example",), MissingCredentialsError, "has no name that this server knows"),
        (["Bearer third"], JOBS, InvalidTokenError, "it is wrong, or was revoked"),
        (["Bearer a.b.c"], (), InvalidTokenError, "is not a JSON Web Token"),
        (["Bearer second"], (), ExpiredTokenError, "has expired"),
        (["Bearer first", "Bearer first"], (), InvalidTokenError, "several authorization headers"),
        (["Bearer first, Bearer first"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Basic Zmlyc3Q="], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Bearer "], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Bearer fir\nst"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        ([b"Bearer \xff"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        ([f"Bearer {'x' * MAX_TOKEN_CHARACTERS}"], (), InvalidTokenError, "is longer than 8192 characters"),
    ],
    ids=range(12),
)
def test_other_callers_are_unknown(
    guard: Guard, values: list[str | bytes], certificates: tuple[str, ...], kind: Any, error: str
) -> None:
    with pytest.raises(CredentialsError) as raised:
        name_of(guard, *values, certificates=certificates)
    assert type(raised.value) is kind
    assert error in raised.value.message
    assert "first" not in raised.value.message


def test_without_web_tokens_one_is_just_wrong(tmp_path: Path) -> None:
    guard = Guard(watched(write_tokens(tmp_path / "tokens.json", entry("one", "first", "read"))))
    with pytest.raises(InvalidTokenError, match="it is wrong, or was revoked"):
        name_of(guard, f"Bearer {signed('ES256')}")
    guard.close()
    assert bearer_token([]) is None
