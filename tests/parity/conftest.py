"""The served paths, by name."""

from functools import partial
from pathlib import Path

import pytest
from attention_client import AttentionClient

from scripts.local_server import ServerProcess
from tests.parity import paths


@pytest.fixture
def routes(repository: Path, server: ServerProcess, client: AttentionClient) -> paths.Routes:
    """From a model's name and a case to its outputs, for each of paths.SERVED."""
    return {
        "exported": partial(paths.exported, repository),
        "attention.v1": partial(paths.typed, client),
        "open inference": partial(paths.open_protocol, server),
    }
