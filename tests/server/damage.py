"""Weights that are damaged while a model serves: a session of a damaged copy takes the place of its own."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from attention_serving.artifact.manifest import GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import RunControl, Session
from attention_serving.server.engine.types import Array

DEVICE = Device(threads=1)
WEIGHT_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT8, TensorProto.UINT8)


class Damageable(Session):
    """A session whose weights are damaged from the moment that it is told so."""

    def __init__(self, healthy: Session, damaged: Session) -> None:
        self._healthy = healthy
        self._damaged = damaged
        self.provider = healthy.provider
        self.runs = 0
        # Numbers of the runs that are computed with damaged weights; every later one if `stays_damaged`.
        self.damaged_runs: set[int] = set()
        self.stays_damaged = False

    def run(self, inputs: dict[str, Array], control: RunControl | None = None) -> dict[str, Array]:
        self.runs += 1
        is_damaged = self.stays_damaged or self.runs in self.damaged_runs
        return (self._damaged if is_damaged else self._healthy).run(inputs, control)

    def shrink_arena(self, inputs: dict[str, Array]) -> None:
        self._healthy.shrink_arena(inputs)


def damage_graph(path: Path, target: Path) -> Path:
    """Writes a copy of a graph whose weights have changed places."""
    model = onnx.load(path)
    weights = [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type in WEIGHT_TYPES and len(tensor.dims) > 1
    ]
    assert weights
    for tensor in weights:
        values = np.roll(numpy_helper.to_array(tensor), 1)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, target)
    return target


def damageable(
    model: LoadedModel, folder: Path, scratch: Path, kinds: Iterable[GraphKind] = (GraphKind.PLAIN,)
) -> tuple[LoadedModel, Damageable]:
    """The same model with sessions that can be damaged, and the first of them.

    Args:
        model: A loaded model.
        folder: Its artifact.
        scratch: Where the damaged copies are written.
        kinds: The graphs that can be damaged.
    """
    found = {}
    for kind in kinds:
        file = model.manifest.graphs[kind].file
        damaged = Session(damage_graph(folder / file, scratch / file), DEVICE)
        found[kind] = Damageable(model.sessions[kind], damaged)
    return dataclasses.replace(model, sessions={**model.sessions, **found}), next(iter(found.values()))
