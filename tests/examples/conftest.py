"""Fixtures: one server of a text encoder and of a module that takes vectors, for all examples."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import ENCODERS, SENTENCE
from tests.examples.models import LAYER, MODELS
from tests.server.http.clients import http_port
from tests.server.samples import SELF
from tests.support.artifacts import cached_repositories, link_tree


def _serving(artifacts: Path, folder: Path, *options: str) -> AbstractContextManager[ServerProcess]:
    encoders, own = cached_repositories(ENCODERS, MODELS)
    for model in (encoders / SENTENCE, artifacts / SELF, own / LAYER):
        link_tree(model, folder / "models" / model.name)
    return serving(folder / "models", folder / "log", "--threads=1", *options)


@pytest.fixture(scope="session")
def example_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of SENTENCE, SELF and LAYER with an HTTP port."""
    with _serving(artifacts, tmp_path_factory.mktemp("examples"), "--http-port=0") as process:
        yield process


@pytest.fixture
def small_server(artifacts: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the same models for one call at a time."""
    with _serving(artifacts, tmp_path, "--max-concurrent-calls=1") as process:
        yield process


@pytest.fixture(scope="session")
def openai_url(example_server: ServerProcess) -> str:
    """The base URL for clients of OpenAI's API."""
    return f"http://127.0.0.1:{http_port(example_server.log)}/v1"
