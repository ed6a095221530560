"""Compute in process, the ceiling of every server: ONNX Runtime on the exported graphs, and eager PyTorch.

Sequences run one by one or in padded batches; the faster way counts. The functions of this file run in a
process of their own for each library.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from attention_serving.artifact.manifest import KEY_LENGTHS, GraphKind, Manifest
from benchmarks.processes import cores
from benchmarks.workload import Array, AttentionKind, Inputs, Lengths, Model, sequences

VERSION = "1"
Prepare = Callable[[Path, Model, "PaddedBatch"], Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Inputs of one run.

    Attributes:
        inputs: Arrays by input name, (B, T, d) each, with zeros after the end of a shorter sequence.
        key_lengths: (B,) if a mask is needed; None if nothing is padded, and for causal attention, which does
            not reach the padding behind the sequence.
        sequences: B.
        tokens: Query rows without padding.
    """

    inputs: dict[str, Array]
    key_lengths: NDArray[np.int64] | None
    sequences: int
    tokens: int


def pad(model: Model, group: Sequence[Inputs]) -> PaddedBatch:
    """Combines sequences into one batch."""
    columns = list(zip(*group, strict=True))
    uneven = any(len({len(array) for array in column}) > 1 for column in columns)
    key_lengths = np.array([len(array) for array in columns[-1]], np.int64)
    return PaddedBatch(
        inputs={name: _stack(column) for name, column in zip(model.inputs, columns, strict=True)},
        key_lengths=key_lengths if uneven and model.kind is not AttentionKind.CAUSAL else None,
        sequences=len(group),
        tokens=sum(len(array) for array in columns[0]),
    )


def _stack(arrays: Sequence[Array]) -> Array:
    """(Tᵢ, d) each to (B, T, d)."""
    stacked = np.zeros((len(arrays), max(map(len, arrays)), arrays[0].shape[1]), np.float32)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


def measure(
    prepare: Prepare, repository: Path, model: Model, lengths: Lengths, size: int, seconds: float
) -> tuple[float, float, float]:
    """Measures a library with `size` sequences available at a time: `onnx_run` or `eager_run`.

    Returns:
        Sequences and query rows per second, and the median duration of a call in microseconds.
    """
    pool = sequences(model, lengths)
    ways = [[pad(model, [one]) for one in pool]]
    if size > 1:
        full = pool * -(-size // len(pool))  # repeats a small pool to fill one batch
        ways.append([pad(model, full[at : at + size]) for at in range(0, len(full), size)])
    found = [
        _time([(prepare(repository, model, one), one) for one in batches], seconds / len(ways))
        for batches in ways
    ]
    return max(found, key=lambda result: result[1])


def _time(calls: list[tuple[Callable[[], Any], PaddedBatch]], seconds: float) -> tuple[float, float, float]:
    """Warms up with one call of each, then repeats all of them until the time is over."""
    for call, _ in calls:
        call()
    durations: list[float] = []
    began = time.perf_counter()
    while not durations or time.perf_counter() - began < seconds:
        for call, _ in calls:
            started = time.perf_counter()
            call()
            durations.append(time.perf_counter() - started)
    rate = len(durations) / len(calls) / (time.perf_counter() - began)
    counts = (sum(batch.sequences for _, batch in calls), sum(batch.tokens for _, batch in calls))
    return rate * counts[0], rate * counts[1], 1e6 * median(durations)


def onnx_run(repository: Path, model: Model, batch: PaddedBatch) -> Callable[[], Any]:
    """Prepares a run of ONNX Runtime, which returns a list of arrays."""
    kind = GraphKind.PLAIN if batch.key_lengths is None else GraphKind.LENGTHS
    lengths = {} if batch.key_lengths is None else {KEY_LENGTHS: batch.key_lengths}
    session = _session(repository / model.name / VERSION, kind)
    return partial(session.run, None, {**batch.inputs, **lengths})


@lru_cache
def _session(folder: Path, kind: GraphKind) -> onnxruntime.InferenceSession:
    """One thread for each core, not pinned, as in the service."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    path = folder / Manifest.load(folder).graphs[kind].file
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def expected_context(repository: Path, model: Model, lengths: Lengths, count: int) -> list[Array]:
    """Returns the context vectors of the first `count` sequences, each run alone, (Tq, d) each."""
    batches = [pad(model, [one]) for one in sequences(model, lengths)[:count]]
    return [onnx_run(repository, model, batch)()[0][0] for batch in batches]


def eager_run(_repository: Path, model: Model, batch: PaddedBatch) -> Callable[[], Any]:
    """Prepares a run of eager PyTorch."""
    import torch  # noqa: PLC0415 - ONNX Runtime is measured without it

    module = build(model)
    inputs = [torch.from_numpy(array) for array in batch.inputs.values()]
    key_lengths = None if batch.key_lengths is None else torch.from_numpy(batch.key_lengths)
    return torch.inference_mode()(partial(module, *inputs, key_lengths=key_lengths))


@lru_cache
def build(model: Model) -> Any:
    """Returns the module in evaluation mode, with the same weights in every process."""
    import torch  # noqa: PLC0415

    from attention_serving.model.attention import MultiHeadAttention  # noqa: PLC0415
    from attention_serving.model.config import AttentionConfig  # noqa: PLC0415

    config = AttentionConfig(
        d_query=model.width,
        num_heads=model.heads,
        cross=model.kind is AttentionKind.CROSS,
        causal=model.kind is AttentionKind.CAUSAL,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(config).eval()


def save_weights(model: Model, folder: Path) -> Path:
    """Writes the weights as a checkpoint of the exporter's layout `generic`, and returns the file."""
    from safetensors.torch import save_file  # noqa: PLC0415

    path = folder / f"{model.name}.safetensors"
    save_file(build(model).state_dict(), path)
    return path
