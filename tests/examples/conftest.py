"""Fixtures: one server of a text encoder, a layer and a module that takes vectors, for all examples."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.checkpoints.loading import load_checkpoint
from examples import replace_a_layer
from scripts.local_server import ServerProcess
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.server.samples import CROSS, SELF
from tests.support.artifacts import ModelSet, cached_repositories
from tests.support.processes import serving_models

LAYER = "my-layer"


def export_layer(folder: Path) -> None:
    """The layer that an example replaces."""
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "layer.safetensors"
        replace_a_layer.save(str(path))
        layer = load_checkpoint(path, layout="torch", heads=replace_a_layer.HEADS).module
        write_artifact(layer, ModelId(LAYER), folder)


FILES = [Path(__file__), Path(replace_a_layer.__file__)]
MODELS = ModelSet("examples", [export_layer], FILES, ["example_server"])


@pytest.fixture(scope="session")
def example_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of SENTENCE, SELF, CROSS and LAYER with an HTTP port."""
    encoders, layers = cached_repositories(SENTENCE_MODELS, MODELS)
    models = (encoders / SENTENCE, artifacts / SELF, artifacts / CROSS, layers / LAYER)
    folder = tmp_path_factory.mktemp("examples")
    with serving_models(folder, models, "--threads=1", "--http-port=0") as process:
        yield process
