"""Models that are deployed to other servers, and what eager PyTorch computes with them."""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from attention_serving.artifact.manifest import POSITIONS, GraphKind, Manifest
from attention_serving.model.presets import build_preset
from tests.support import modules
from tests.support.artifacts import ModelSet, cached_repositories, link_tree
from tests.support.repository import export_encoder, export_lowered, export_preset

SELF, CROSS, ROTARY, TEXT = "multi-head-64x4", "cross-attention", "rotary-768x12", "sentence-self-attention"
INT8 = "multi-head-64x4-int8"
ENCODER = modules.ENCODER
PRESETS = (SELF, CROSS, ROTARY, TEXT)
INT8_INDEX = [name for name, _, _ in modules.LOWERED].index(INT8)
SET = ModelSet(
    "deployment",
    [
        *(partial(export_preset, name) for name in PRESETS),
        partial(export_lowered, INT8_INDEX),
        export_encoder,
    ],
    [Path(__file__), Path(modules.__file__)],
)
Arrays = dict[str, NDArray[Any]]


def link_model(name: str, repository: Path) -> Path:
    """Puts a model into a repository. Returns its artifact, which must not be written to."""
    (cached,) = cached_repositories(SET)
    link_tree(cached / name, repository / name)
    return repository / name / "1"


@cache
def eager_module(name: str) -> nn.Module:
    return modules.encoder() if name == ENCODER else build_preset(name.removesuffix("-int8"))


def eager(name: str, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """The first output of eager PyTorch, (T, d), for one sequence."""
    tensors = {key: torch.from_numpy(array)[None] for key, array in inputs.items()}
    with torch.inference_mode():
        output = eager_module(name)(**tensors)
    context = output if isinstance(output, torch.Tensor) else output[0]
    return np.asarray(context[0].numpy())


def sequence(artifact: Path, rng: np.random.Generator, *lengths: int) -> Arrays:
    """Random inputs of one sequence, without positions: (Tq, d) and, for cross-attention, (Tk, d)."""
    sizes: dict[object, int] = {}
    arrays: Arrays = {}
    for spec in Manifest.load(artifact).graphs[GraphKind.PLAIN].inputs:
        if spec.name == POSITIONS:
            continue
        axis, *width = spec.axes[1:]
        rows = sizes.setdefault(axis, lengths[min(len(sizes), len(lengths) - 1)])
        if spec.data_type == "int64":
            arrays[spec.name] = rng.integers(spec.exclusive_upper_bound or 1, size=rows)
        else:
            arrays[spec.name] = rng.standard_normal((rows, *map(int, width)), dtype=np.float32)
    return arrays
