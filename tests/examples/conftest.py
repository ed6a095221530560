"""Fixtures: one server of a text encoder and of a module that takes vectors, for all examples."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import ENCODERS, SENTENCE
from tests.examples.models import LAYER, MODELS
from tests.server.http.clients import http_port
from tests.server.samples import SELF
from tests.support.artifacts import cached_repositories, link_tree

# Few enough that a test can hold all of them.
MAX_CALLS = 4


@pytest.fixture(scope="session")
def example_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of SENTENCE, SELF and LAYER with an HTTP port, for at most MAX_CALLS calls at a time."""
    folder = tmp_path_factory.mktemp("examples")
    encoders, own = cached_repositories(ENCODERS, MODELS)
    for model in (encoders / SENTENCE, artifacts / SELF, own / LAYER):
        link_tree(model, folder / "models" / model.name)
    options = ("--http-port=0", f"--max-concurrent-calls={MAX_CALLS}", "--threads=1")
    with serving(folder / "models", folder / "log", *options) as process:
        yield process


@pytest.fixture(scope="session")
def openai_url(example_server: ServerProcess) -> str:
    """The base URL for clients of OpenAI's API."""
    return f"http://127.0.0.1:{http_port(example_server.log)}/v1"
