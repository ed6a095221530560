"""Compute in process: prepares batches, times calls, and runs ONNX Runtime on the exported graphs.

This is the ceiling of every server. Sequences run one by one or in padded batches; the faster way counts.
The functions of this file run in a process of their own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from attention_serving.artifact.manifest import KEY_LENGTHS, GraphKind, Manifest
from benchmarks.checkout import VERSION
from benchmarks.processes import cores
from benchmarks.workload import Array, AttentionKind, Inputs, Lengths, Model, sequences

ONE_BY_ONE = "one by one"
PADDED = "padded batches"
clock = time.perf_counter_ns


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Inputs of one run.

    Attributes:
        inputs: Arrays by input name, (B, T, d) each, with zeros after the end of a shorter sequence.
        key_lengths: (B,) if the sequences differ in length; None if nothing is padded.
        tokens: Query rows without padding.
    """

    inputs: dict[str, Array]
    key_lengths: NDArray[np.int64] | None
    tokens: int

    @property
    def sequences(self) -> int:
        """B."""
        return len(next(iter(self.inputs.values())))


def batches_by_method(model: Model, lengths: Lengths, size: int) -> dict[str, list[PaddedBatch]]:
    """Returns the batches of each method for a workload with `size` sequences available at a time."""
    pool = sequences(model, lengths)
    found = {ONE_BY_ONE: [pad(model, [one]) for one in pool]}
    if size > 1:
        full = pool * -(-size // len(pool))  # repeats a small pool to fill one batch
        groups = [full[at : at + size] for at in range(0, len(full), size)]
        found[PADDED] = [pad(model, group) for group in groups]
    return found


def pad(model: Model, group: Sequence[Inputs]) -> PaddedBatch:
    """Combines sequences into one batch."""
    columns = [list(column) for column in zip(*group, strict=True)]
    uneven = any(len({len(array) for array in column}) > 1 for column in columns)
    key_lengths = np.array([len(array) for array in columns[-1]], np.int64)
    return PaddedBatch(
        inputs={name: _stack(column) for name, column in zip(model.inputs, columns, strict=True)},
        key_lengths=key_lengths if uneven else None,
        tokens=sum(len(array) for array in columns[0]),
    )


def _stack(arrays: list[Array]) -> Array:
    """(Tᵢ, d) each to (B, T, d)."""
    stacked = np.zeros((len(arrays), max(map(len, arrays)), arrays[0].shape[1]), np.float32)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return stacked


@dataclass(frozen=True)
class TimedCall:
    """A prepared call, and how many sequences and query rows it computes."""

    call: Callable[[], object]
    sequences: int
    tokens: int


@dataclass(frozen=True)
class ComputeResult:
    """A measurement in process.

    Attributes:
        how: The method that was faster.
        calls: Number of timed calls.
        seconds: Duration of the measurement.
        median_seconds: Median duration of one call.
    """

    how: str
    sequences_per_second: float
    tokens_per_second: float
    calls: int
    seconds: float
    median_seconds: float


def fastest(methods: Mapping[str, Sequence[TimedCall]], seconds: float) -> ComputeResult:
    """Measures each method for an equal share of the time; returns the one with the most rows per second."""
    share = seconds / len(methods)
    results = [time_calls(how, calls, share) for how, calls in methods.items()]
    return max(results, key=lambda result: result.tokens_per_second)


def time_calls(how: str, calls: Sequence[TimedCall], seconds: float) -> ComputeResult:
    """Warms up with one call of each, then repeats all of them until the time is over."""
    for one in calls:
        one.call()
    durations: list[int] = []
    passes = 0
    started = clock()
    while not passes or clock() - started < seconds * 1e9:
        durations += [_duration(one) for one in calls]
        passes += 1
    elapsed = (clock() - started) / 1e9
    return ComputeResult(
        how=how,
        sequences_per_second=passes * sum(one.sequences for one in calls) / elapsed,
        tokens_per_second=passes * sum(one.tokens for one in calls) / elapsed,
        calls=len(durations),
        seconds=elapsed,
        median_seconds=median(durations) / 1e9,
    )


def _duration(one: TimedCall) -> int:
    started = clock()
    one.call()
    return clock() - started


def measure_onnx(
    repository: Path, model: Model, lengths: Lengths, size: int, seconds: float
) -> ComputeResult:
    """Measures ONNX Runtime with `size` sequences available at a time."""
    folder = repository / model.name / str(VERSION)
    prepared = {
        how: [TimedCall(partial(_run, folder, model, one), one.sequences, one.tokens) for one in batches]
        for how, batches in batches_by_method(model, lengths, size).items()
    }
    return fastest(prepared, seconds)


def expected_context(repository: Path, model: Model, lengths: Lengths, count: int) -> list[Array]:
    """Returns the context vectors of the first `count` sequences, each run alone, (Tq, d) each."""
    folder = repository / model.name / str(VERSION)
    batches = [pad(model, [one]) for one in sequences(model, lengths)[:count]]
    return [_run(folder, model, batch)[0] for batch in batches]


def _run(folder: Path, model: Model, batch: PaddedBatch) -> Array:
    # Causal attention does not reach the padding, which follows the sequence.
    if batch.key_lengths is None or model.kind is AttentionKind.CAUSAL:
        return np.asarray(_session(folder, GraphKind.PLAIN).run(None, batch.inputs)[0])
    inputs = {**batch.inputs, KEY_LENGTHS: batch.key_lengths}
    return np.asarray(_session(folder, GraphKind.LENGTHS).run(None, inputs)[0])


@lru_cache
def _session(folder: Path, kind: GraphKind) -> onnxruntime.InferenceSession:
    """One thread for each core, not pinned, as in the service and the peers."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores()
    path = folder / Manifest.load(folder).graphs[kind].file
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
