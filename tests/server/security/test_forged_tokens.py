"""Forged JSON Web Tokens over gRPC: they are limited for their connection, and keep no newcomer away."""

from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.security import web_tokens
from attention_serving.server.security.guard import Guard
from attention_serving.server.security.web_tokens import WebTokens
from tests.server.seams import PATIENCE_SECONDS, Served
from tests.server.security.samples import AUDIENCE, ISSUER, FixedKeys, public_jwk, signed

OK, UNAUTHENTICATED, EXHAUSTED = (
    grpc.StatusCode.OK,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def codes(channel: grpc.Channel, *tokens: str) -> list[grpc.StatusCode]:
    method: Any = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
    metadata = [(("authorization", f"Bearer {token}"),) for token in tokens]
    return [method.future(b"", metadata=each, timeout=PATIENCE_SECONDS).code() for each in metadata]


def test_the_connection_of_forged_tokens_is_refused_and_a_newcomer_is_served(
    self_model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_tokens, "MAX_FAILURES", 3)
    monkeypatch.setattr(web_tokens, "time", SimpleNamespace(time=lambda: 100.0))  # all in one second
    tokens = WebTokens(FixedKeys(public_jwk("ES256")), issuer=ISSUER, audience=AUDIENCE)
    forged = [f"{signed('ES256')[:-6]}{number:05d}A" for number in range(4)]
    with Served(self_model, guard=Guard(None, tokens)) as served, served.connect() as other:
        known, new = (signed("ES256", sub=name) for name in ("known", "new"))
        assert codes(served.channel, known) == [OK]
        assert codes(served.channel, *forged) == [*3 * [UNAUTHENTICATED], EXHAUSTED]
        assert codes(served.channel, new, known) == [EXHAUSTED, OK]
        assert codes(other, new) == [OK]
