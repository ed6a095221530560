"""The models at their own widths: every preset, the worked examples, lower precisions and an encoder."""

from functools import partial
from pathlib import Path

import torch

from attention_serving.artifact.names import ModelId
from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import export_module
from attention_serving.export.artifact import write_artifact
from attention_serving.model.presets import PRESETS, build_preset
from scripts import export_demo_models as demo
from tests.support import modules, tables
from tests.support.artifacts import ModelSet

# The scores of the examples with uniform weights exceed 100; at that size fp32 keeps four decimals.
TABLE_TOLERANCE = Tolerance(rtol=1.3e-6, atol=5e-5)


def export_preset(name: str, folder: Path) -> None:
    write_artifact(build_preset(name), ModelId(name), folder, description=PRESETS[name].description)


def export_lowered(index: int, folder: Path) -> None:
    name, preset, precision = modules.LOWERED[index]
    write_artifact(build_preset(preset), ModelId(name), folder, precision=precision)


def export_table(index: int, folder: Path) -> None:
    table = tables.GOLDEN_TABLES[index]
    write_artifact(table.module(), ModelId(table.model), folder, tolerance=TABLE_TOLERANCE)


def export_encoder(folder: Path) -> None:
    example = (torch.zeros(2, 3, 32),)
    axes = {"src": {0: "batch", 1: "sequence"}}
    export_module(modules.encoder(), example, axes, out=folder, name=modules.ENCODER)


HERE = Path(__file__)
DEMO = ModelSet(
    "demo", [partial(demo.export_demo_model, name) for name in demo.DEMO_MODELS], [Path(demo.__file__)]
)
LOWERED = [partial(export_lowered, index) for index in range(len(modules.LOWERED))]
TABLES = [partial(export_table, index) for index in range(len(tables.GOLDEN_TABLES))]
SETS = (
    ModelSet("presets", [partial(export_preset, name) for name in PRESETS], [HERE]),
    ModelSet("modules", [*LOWERED, export_encoder], [HERE, Path(modules.__file__)]),
    ModelSet("tables", TABLES, [HERE, Path(tables.__file__), tables.FILE]),
)
