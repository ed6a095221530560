"""The compute ceiling: ONNX Runtime in process on the exported graphs. Runs in a process of its own."""

from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import onnxruntime

from artifact.manifest import KEY_LENGTHS, GraphKind, Manifest
from benchmarks.batches import Batch, pad, ways
from benchmarks.machine import cores
from benchmarks.repository import artifact
from benchmarks.timing import ComputeResult, Run, best
from benchmarks.workload import Array, Kind, Lengths, Model, sequences


def measure(repository: Path, model: Model, lengths: Lengths, size: int, seconds: float) -> ComputeResult:
    """The best rate of sequences of which `size` are there at a time."""
    folder = artifact(repository, model)
    prepared = {
        how: [Run(partial(_run, folder, model, batch), batch.sequences, batch.tokens) for batch in batches]
        for how, batches in ways(model, lengths, size).items()
    }
    return best(prepared, seconds)


def answer(repository: Path, model: Model, lengths: Lengths, count: int) -> list[Array]:
    """Context vectors of the first sequences, one by one, each (Tq, d)."""
    batches = [pad(model, [one]) for one in sequences(model, lengths)[:count]]
    folder = artifact(repository, model)
    return [_run(folder, model, batch)[0] for batch in batches]


def _run(folder: Path, model: Model, batch: Batch) -> Array:
    # Causal rows see no padding, which follows them.
    if batch.key_lengths is None or model.kind is Kind.CAUSAL:
        plain = _session(folder, GraphKind.PLAIN).run(None, batch.inputs)
        return np.asarray(plain[0])
    inputs = {**batch.inputs, KEY_LENGTHS: batch.key_lengths}
    return np.asarray(_session(folder, GraphKind.LENGTHS).run(None, inputs)[0])


@lru_cache
def _session(folder: Path, kind: GraphKind) -> onnxruntime.InferenceSession:
    """A thread for each core, not pinned, as in the service and the peers; they spin between runs."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    path = folder / Manifest.load(folder).graphs[kind].file
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
