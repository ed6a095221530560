"""The models that the examples' server has, beside those of other tests."""

from pathlib import Path
from tempfile import TemporaryDirectory

from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.model.checkpoints.loading import load_checkpoint
from examples import replace_a_layer
from tests.support.artifacts import ModelSet

LAYER = "my-layer"


def export_layer(folder: Path) -> None:
    """The layer that an example replaces."""
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / "layer.safetensors"
        replace_a_layer.save(str(path))
        found = load_checkpoint(path, layout="torch", heads=replace_a_layer.HEADS)
        write_artifact(found.module, ModelId(LAYER), folder)


MODELS = ModelSet("examples", [export_layer], [Path(__file__), Path(replace_a_layer.__file__)])
