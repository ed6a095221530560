"""The asyncio service: answers, and an absent server."""

from collections.abc import Iterator

import pytest
from attention_client import AttentionClient
from numpy.testing import assert_allclose
from starlette.testclient import TestClient

from examples.asyncio_service import make_app
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE
from tests.encoders.texts import ATOL, RTOL, TEXTS

pytestmark = pytest.mark.thorough
# A port on which nothing listens.
NOWHERE = "127.0.0.1:9"
BODY = b'{"texts": ["dessert"]}'
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def web(example_server: ServerProcess) -> Iterator[TestClient]:
    with TestClient(make_app(example_server.target, SENTENCE, timeout=PATIENCE_SECONDS)) as web:
        yield web


def test_embeddings_are_those_of_the_server(web: TestClient, example_server: ServerProcess) -> None:
    answer = web.post("/embed", json={"texts": TEXTS})
    assert answer.status_code == 200
    with AttentionClient(example_server.target) as client:
        expected = client.embed(SENTENCE, list(TEXTS))
    assert_allclose(answer.json()["embeddings"], expected, rtol=RTOL, atol=ATOL)
    assert web.get("/ready").json() == {"ready": True}


def test_an_absent_server_is_503() -> None:
    with TestClient(make_app(NOWHERE, SENTENCE, timeout=PATIENCE_SECONDS)) as web:
        for answer in (web.post("/embed", content=BODY), web.get("/ready")):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
