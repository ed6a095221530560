"""Fixtures of the tests of the gRPC surface."""

import pytest

from server.rpc.transport import TransportKind
from tests.server.seams import Served


@pytest.fixture(params=TransportKind, ids=str)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransportKind:
    """Each transport in turn, on which every `Served` of the test runs."""
    kind: TransportKind = request.param
    monkeypatch.setattr(Served, "transport", kind)
    return kind
