"""Fixture of the served paths by name."""

from functools import partial
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.parity import paths


@pytest.fixture
def routes(repository: Path, server: ServerProcess, client: AttentionClient) -> paths.Routes:
    """Returns a function for each of paths.SERVED: from the name of a model and a case to its outputs."""
    return {
        "exported": partial(paths.exported, repository),
        "attention.v1": partial(paths.typed, client),
        "open inference": partial(paths.open_protocol, server),
    }
