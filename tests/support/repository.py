"""The models that the tests' shared server serves: every preset, worked example and reference."""

from functools import partial
from pathlib import Path

import torch

from attention_serving.artifact.tolerance import Tolerance
from attention_serving.export import export_module
from attention_serving.export.artifact import write_artifact
from attention_serving.export.model_id import ModelId
from attention_serving.model.presets import PRESETS, build_preset
from tests.support import modules, references, tables
from tests.support.artifacts import ModelSet

# The scores of the examples with uniform weights exceed 100; at that size fp32 keeps four decimals.
TABLE_TOLERANCE = Tolerance(rtol=1.3e-6, atol=5e-5)


def export_preset(name: str, folder: Path) -> None:
    write_artifact(build_preset(name), ModelId(name), folder, description=PRESETS[name].description)


def export_lowered(index: int, folder: Path) -> None:
    name, preset, precision = modules.LOWERED[index]
    write_artifact(build_preset(preset), ModelId(name), folder, precision=precision)


def export_reference(name: str, folder: Path) -> None:
    write_artifact(references.REFERENCES[name].module(), ModelId(name), folder)


def export_table(index: int, folder: Path) -> None:
    table = tables.GOLDEN_TABLES[index]
    description = str(table.case["what"])
    write_artifact(
        table.module(), ModelId(table.model), folder, description=description, tolerance=TABLE_TOLERANCE
    )


def export_causal_cross(folder: Path) -> None:
    write_artifact(modules.causal_cross(), ModelId(modules.CAUSAL_CROSS), folder)


def export_encoder(folder: Path) -> None:
    example = (torch.zeros(2, 3, 32),)
    axes = {"src": {0: "batch", 1: "sequence"}}
    export_module(modules.encoder(), example, axes, out=folder, name=modules.ENCODER)


HERE = Path(__file__)
SETS = (
    ModelSet("presets", [partial(export_preset, name) for name in PRESETS], [HERE]),
    ModelSet(
        "modules",
        [
            *(partial(export_lowered, index) for index in range(len(modules.LOWERED))),
            export_causal_cross,
            export_encoder,
        ],
        [HERE, Path(modules.__file__)],
    ),
    ModelSet(
        "references",
        [partial(export_reference, name) for name in references.REFERENCES],
        [HERE, Path(references.__file__)],
    ),
    ModelSet(
        "tables",
        [partial(export_table, index) for index in range(len(tables.GOLDEN_TABLES))],
        [HERE, Path(tables.__file__), tables.FILE],
    ),
)
