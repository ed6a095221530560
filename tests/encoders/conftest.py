"""Fixtures: servers of one text encoder and of one of each family, with HTTP ports and clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import ENCODERS, SENTENCE_MODELS
from tests.support.artifacts import cached_repositories, link_tree


@pytest.fixture(scope="session")
def encoder_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of every text encoder, which only tests with the marker `thorough` need."""
    folder = tmp_path_factory.mktemp("encoders")
    for models in cached_repositories(SENTENCE_MODELS, ENCODERS):
        link_tree(models, folder)
    return folder


@pytest.fixture(scope="session")
def server(sentence_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the one text encoder."""
    log = tmp_path_factory.mktemp("sentence") / "log"
    with serving(sentence_repository, log, "--http-port=0") as process:
        yield process


@pytest.fixture(scope="session")
def encoder_server(
    encoder_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of all of them."""
    with serving(encoder_repository, tmp_path_factory.mktemp("encoders") / "log") as process:
        yield process


@pytest.fixture(scope="session")
def encoder_client(encoder_server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of the server of all."""
    with AttentionClient(encoder_server.target) as client:
        yield client


@pytest.fixture(scope="module")
def port(server: ServerProcess) -> int:
    """The HTTP port of the server."""
    return server.http_port
