"""The models at their own widths: every preset, the worked examples, lower precisions and modules."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import export_module
from attention_serving.export.artifact import write_artifact
from attention_serving.export.precision import Precision
from attention_serving.model.presets import PRESETS, build_preset
from scripts import export_demo_models as demo
from tests.support import tables
from tests.support.artifacts import Job, ModelSet

ENCODER = "encoder"
# The scores of the examples with uniform weights exceed 100; at that size fp32 keeps four decimals.
TABLE_TOLERANCE = Tolerance(rtol=1.3e-6, atol=5e-5)


def export_preset(name: str, folder: Path) -> None:
    write_artifact(build_preset(name), ModelId(name), folder, description=PRESETS[name].description)


def export_lowered(name: str, precision: Precision, folder: Path) -> None:
    write_artifact(build_preset(name), ModelId(f"{name}-{precision}"), folder, precision=precision)


def export_table(table: tables.GoldenTable, folder: Path) -> None:
    write_artifact(table.module(), ModelId(table.model), folder, tolerance=TABLE_TOLERANCE)


def encoder() -> nn.TransformerEncoder:
    """A whole transformer encoder of two layers over width 32."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def bert() -> nn.Module:
    """A tiny BERT encoder of 64 positions over 50 ids, width 32, with random weights."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415 - slow to import

    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    config = BertConfig(vocab_size=50, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    torch.manual_seed(5)
    module: nn.Module = BertModel(config)
    return module.eval()


def export_encoder(folder: Path) -> None:
    example = (torch.zeros(2, 3, 32),)
    axes = {"src": {0: "batch", 1: "sequence"}}
    export_module(encoder(), example, axes, out=folder, name=ENCODER)


HERE = Path(__file__)
DEMO = ModelSet(
    "demo", [partial(demo.export_demo_model, name) for name in demo.DEMO_MODELS], [Path(demo.__file__)]
)
MODULES: list[Job] = [
    partial(export_lowered, "self-attention", Precision.FP16),
    partial(export_lowered, "multi-head-64x4", Precision.INT8),
    export_encoder,
]
TABLES = [partial(export_table, table) for table in tables.GOLDEN_TABLES]
SETS = (
    ModelSet("presets", [partial(export_preset, name) for name in PRESETS], [HERE]),
    ModelSet("modules", MODULES, [HERE]),
    ModelSet("tables", TABLES, [HERE, Path(tables.__file__), tables.FILE]),
)
