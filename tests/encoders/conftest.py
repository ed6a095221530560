"""Fixtures: a repository of text encoders, a server of it with an HTTP port, and a client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import ENCODERS
from tests.server.http.clients import http_port
from tests.support.artifacts import cached_repositories


@pytest.fixture(scope="session")
def encoder_repository() -> Path:
    """A repository of text encoders. Tests must not write to it."""
    (folder,) = cached_repositories(ENCODERS)
    return folder


@pytest.fixture(scope="session")
def encoder_server(
    encoder_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server of the text encoders with an HTTP port."""
    log = tmp_path_factory.mktemp("encoders") / "log"
    with serving(encoder_repository, log, "--http-port=0") as process:
        yield process


@pytest.fixture(scope="session")
def encoder_client(encoder_server: ServerProcess) -> Iterator[AttentionClient]:
    """A client of the server."""
    with AttentionClient(encoder_server.target) as client:
        yield client


@pytest.fixture(scope="session")
def encoder_http_port(encoder_server: ServerProcess) -> int:
    """The HTTP port of the server."""
    return http_port(encoder_server.log)
