"""Models that only some tests need: the demo's, presets at their own widths, lower precisions, an encoder."""

from functools import partial
from pathlib import Path

import torch

from attention_serving.artifact.names import ModelId
from attention_serving.export import export_module
from attention_serving.export.artifact import write_artifact
from attention_serving.export.precision import Precision
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from attention_serving.model.presets import PRESETS, build_preset
from scripts import export_demo_models as demo
from tests.server import samples
from tests.support.artifacts import ModelSet

FP16, BF16, INT8 = "tiny-self-fp16", "tiny-self-bf16", "tiny-self-int8"
# By model, the precision that the first of the samples is exported in.
LOWERED = {FP16: Precision.FP16, BF16: Precision.BF16, INT8: Precision.INT8}
ROTARY, ENCODER = "rotary", "encoder"


def rotary() -> MultiHeadAttention:
    """A module whose weights are so large that they lie in a file of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(AttentionConfig(d_query=320, num_heads=4, rotary_theta=100.0)).eval()


def encoder() -> torch.nn.TransformerEncoder:
    """A whole transformer encoder of two layers over width 32."""
    torch.manual_seed(4)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def export_preset(name: str, folder: Path) -> None:
    """Writes a preset at its own width."""
    write_artifact(build_preset(name), ModelId(name), folder, description=PRESETS[name].description)


def export_lowered(name: str, folder: Path) -> None:
    """Writes a sample in a lower precision."""
    write_artifact(samples.eager_module(samples.SELF), ModelId(name), folder, precision=LOWERED[name])


def export_rotary(folder: Path) -> None:
    """Writes the module of large weights."""
    write_artifact(rotary(), ModelId(ROTARY), folder)


def export_encoder(folder: Path) -> None:
    """Writes the encoder."""
    axes = {"src": {0: "batch", 1: "sequence"}}
    export_module(encoder(), (torch.zeros(2, 3, 32),), axes, out=folder, name=ENCODER)


HERE = Path(__file__)
DEMO = ModelSet(
    "demo",
    [partial(demo.export_demo_model, name) for name in demo.DEMO_MODELS],
    [Path(demo.__file__)],
    ["demo"],
)
FURTHER = ModelSet(
    "further",
    [*(partial(export_lowered, name) for name in LOWERED), export_rotary, export_encoder],
    [HERE, Path(samples.__file__)],
    ["further"],
)
