"""Fixtures: one server of a text encoder, a layer and a module that takes vectors, for all examples."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.model.checkpoints.loading import load_checkpoint
from examples import replace_a_layer
from scripts.local_server import ServerProcess, serving
from tests.encoders.repository import SENTENCE, SENTENCE_MODELS
from tests.server.samples import CROSS, SELF
from tests.support.artifacts import ModelSet, cached_repositories, link_tree

LAYER = "my-layer"


def export_layer(folder: Path) -> None:
    """The layer that an example replaces."""
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "layer.safetensors"
        replace_a_layer.save(str(path))
        found = load_checkpoint(path, layout="torch", heads=replace_a_layer.HEADS)
        write_artifact(found.module, ModelId(LAYER), folder)


FILES = [Path(__file__), Path(replace_a_layer.__file__)]
MODELS = ModelSet("examples", [export_layer], FILES, ["example_server"])


@pytest.fixture(scope="session")
def example_server(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of SENTENCE, SELF, CROSS and LAYER with an HTTP port."""
    folder = tmp_path_factory.mktemp("examples")
    encoders, own = cached_repositories(SENTENCE_MODELS, MODELS)
    for model in (encoders / SENTENCE, artifacts / SELF, artifacts / CROSS, own / LAYER):
        link_tree(model, folder / "models" / model.name)
    with serving(folder / "models", folder / "log", "--threads=1", "--http-port=0") as process:
        yield process
