"""Models that are deployed to other servers, and what eager PyTorch computes with them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from attention_serving.artifact.manifest import POSITIONS, GraphKind, Manifest
from tests.server import samples
from tests.support import repository
from tests.support.artifacts import cached_repositories, link_tree

SELF, CROSS, TEXT = samples.SELF, samples.CROSS, samples.TEXT
# These are exported for thorough tests only.
ROTARY, ENCODER = repository.ROTARY, repository.ENCODER
Arrays = dict[str, NDArray[Any]]


@cache
def eager_module(name: str) -> nn.Module:
    """The module behind a model."""
    made = {ROTARY: repository.rotary, ENCODER: repository.encoder}
    return made[name]() if name in made else samples.eager_module(name)


def link_model(name: str, folder: Path) -> Path:
    """Puts a model into a repository. Returns its artifact, which must not be written to."""
    further = name in (ROTARY, ENCODER)
    (cached,) = cached_repositories(repository.FURTHER if further else samples.MODELS)
    link_tree(cached / name, folder / name)
    return folder / name / "1"


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
