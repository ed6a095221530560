"""Fixture of the served paths by name."""

from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.parity import paths


@pytest.fixture
def routes(repository: Path, server: ServerProcess, client: AttentionClient) -> paths.Routes:
    """The paths of the models of the shared server."""
    return paths.routes(repository, server, client)
