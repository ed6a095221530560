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
from attention_serving.artifact.names import ModelId
from attention_serving.export.artifact import write_artifact
from attention_serving.export.precision import Precision
from attention_serving.model.attention import MultiHeadAttention
from attention_serving.model.config import AttentionConfig
from tests.server import samples
from tests.support import repository
from tests.support.artifacts import ModelSet, cached_repositories, link_tree

SELF, CROSS, TEXT = samples.SELF, samples.CROSS, samples.TEXT
# These are exported for thorough tests only. The weights of the first lie in a file of their own.
ROTARY, INT8, ENCODER = "rotary", "tiny-self-int8", repository.ENCODER
Arrays = dict[str, NDArray[Any]]


@cache
def eager_module(name: str) -> nn.Module:
    if name == ENCODER:
        return repository.encoder()
    if name != ROTARY:
        return samples.eager_module(name.removesuffix("-int8"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(AttentionConfig(d_query=320, num_heads=4, rotary_theta=100.0)).eval()


def _export(name: str, precision: Precision, folder: Path) -> None:
    write_artifact(eager_module(name), ModelId(name), folder, precision=precision)  # type: ignore[arg-type]


FURTHER = ModelSet(
    "deployment",
    [
        partial(_export, ROTARY, Precision.FP32),
        partial(_export, INT8, Precision.INT8),
        repository.export_encoder,
    ],
    [Path(__file__), Path(repository.__file__)],
)


def link_model(name: str, models: Path) -> Path:
    """Puts a model into a repository. Returns its artifact, which must not be written to."""
    (cached,) = cached_repositories(FURTHER if name in (ROTARY, INT8, ENCODER) else samples.MODELS)
    link_tree(cached / name, models / name)
    return models / name / "1"


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
