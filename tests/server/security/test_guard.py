"""Who a call is from: its token, or else its certificate; and what rights are, and what they cover."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attention_serving.server.observe.metrics import Metrics
from attention_serving.server.observe.prometheus import MetricsEndpoint
from attention_serving.server.security.guard import MAX_TOKEN_CHARACTERS, Guard
from attention_serving.server.security.rights import (
    CredentialsError,
    ExpiredTokenError,
    InvalidTokenError,
    MissingCredentialsError,
    Right,
    Rights,
)
from tests.server.http.clients import HOST, ask
from tests.server.security.samples import (
    FixedKeys,
    entry,
    issuer_tokens,
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
    tokens = issuer_tokens(FixedKeys(public_jwk("ES256")))
    table = watched(path)
    yield Guard(table, tokens)
    table.close()


def name_of(guard: Guard, *values: str | bytes, certificates: tuple[str, ...] = ()) -> str:
    sent: list[tuple[str, str | bytes]] = [("authorization", value) for value in values]
    return guard.authenticate([("user-agent", "test"), *sent], lambda: certificates).name


def test_callers_are_named_by_their_token_or_else_their_certificate(guard: Guard) -> None:
    assert name_of(guard, "Bearer first") == "one"
    assert name_of(guard, b"bearer   first ") == "one"
    assert name_of(guard, f"Bearer {signed('ES256', sub='caller')}") == "caller"
    assert name_of(guard, certificates=JOBS) == "jobs"
    assert name_of(guard, "Bearer first", certificates=JOBS) == "one"
    without_web_tokens = Guard(guard._table)
    with pytest.raises(InvalidTokenError, match="it is wrong, or was revoked"):
        name_of(without_web_tokens, f"Bearer {signed('ES256')}")


@pytest.mark.parametrize(
    ("values", "certificates", "kind", "error"),
    [
        ([], (), MissingCredentialsError, "a token is required"),
        ([], ("other.example",), MissingCredentialsError, "has no name that this server knows"),
        (["Bearer third"], JOBS, InvalidTokenError, "it is wrong, or was revoked"),
        (["Bearer a.b.c"], (), InvalidTokenError, "the token is not valid"),
        (["Bearer second"], (), ExpiredTokenError, "has expired"),
        (["Bearer first", "Bearer first"], (), InvalidTokenError, "several authorization headers"),
        (["Bearer first, Bearer first"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Basic Zmlyc3Q="], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Bearer "], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        (["Bearer fir\nst"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        ([b"Bearer \xff"], (), InvalidTokenError, 'must be "Bearer TOKEN"'),
        ([f"Bearer {'x' * MAX_TOKEN_CHARACTERS}"], (), InvalidTokenError, "of at most 8192 characters"),
    ],
    ids=range(12),
)
def test_unknown_callers(guard: Guard, values: Any, certificates: Any, kind: Any, error: str) -> None:
    with pytest.raises(CredentialsError) as raised:
        name_of(guard, *values, certificates=certificates)
    assert type(raised.value) is kind
    assert error in raised.value.message
    assert "first" not in raised.value.message


def test_metrics_need_a_token_with_the_right_to_read(tmp_path: Path) -> None:
    entries = entry("reader", "first", "read"), entry("caller", "second", "infer:*")
    table, metrics = watched(write_tokens(tmp_path / "tokens.json", *entries)), Metrics()
    metrics.reloaded("tokens", None)
    endpoint = MetricsEndpoint(metrics.registry, HOST, 0, guard=Guard(table))
    for token, status in (("", 401), ("wrong", 401), ("second", 403), ("first", 200)):
        sent = {"Authorization": f"Bearer {token}"} if token else {}
        answer = ask(endpoint.port, "/metrics", headers=sent)
        assert (answer.status, "www-authenticate" in answer.headers) == (status, status == 401)
    assert b'attention_security_reloads_total{result="failure",what="tokens"} 1.0' in answer.body
    endpoint.close()
    table.close()


@pytest.mark.parametrize(
    ("text", "right", "model", "covered"),
    [
        ("infer:team-a-*", Right.INFER, "team-a-7", True),
        ("infer:team-a-*", Right.INFER, "Team-a-7", False),
        ("infer:bert-?", Right.INFER, "bert-12", False),
        ("infer:*", Right.READ, "any", False),
        ("read", Right.READ, "any", True),
        ("read:team-a-*", Right.READ, "team-b", False),
        ("admin", Right.INFER, "any", False),
        ("admin", Right.READ, "any", False),
        ("admin", Right.ADMIN, "any", True),
    ],
)
def test_rights_cover_models(text: str, right: Right, model: str, covered: bool) -> None:
    rights = Rights.parse([text, "infer:other"])
    assert rights.covers(right, model) is covered
    assert bool(rights.patterns[right]) is (text.startswith(right) or right is Right.INFER)
    assert rights.reads_every_model is (text == "read")


@pytest.mark.parametrize(
    "text", ["write", "infer", "read:", "infer:a b", "admin:models", "INFER:*", "infer:" + 201 * "a"]
)
def test_other_texts_are_not_rights(text: str) -> None:
    with pytest.raises(ValueError, match="must be infer:PATTERN, read, read:PATTERN or admin"):
        Rights.parse(["read", text])
    assert Rights.parse_known(["openid", text, "infer:a", "admin"]) == Rights.parse(["infer:a", "admin"])


def test_the_number_of_rights_is_limited() -> None:
    with pytest.raises(ValueError, match="there are more than 256 rights"):
        Rights.parse(["infer:a"] * 257)
