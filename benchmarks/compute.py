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
from numpy.typing import NDArray

from attention_serving.artifact.manifest import KEY_LENGTHS, GraphKind, Manifest
from attention_serving.server.engine.run.provider import Device
from attention_serving.server.engine.run.session import Session
from benchmarks.processes import cores
from benchmarks.workload import Array, Lengths, Model, groups, sequences

VERSION = "1"
Prepare = Callable[[Path, Model, "PaddedBatch"], Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """Inputs of one run.

    Attributes:
        query: (B, T, d), with zeros after the end of a shorter sequence.
        key_lengths: (B,); None if nothing is padded.
        tokens: Query rows without padding.
    """

    query: Array
    key_lengths: NDArray[np.int64] | None
    tokens: int


def pad(group: Sequence[Array]) -> PaddedBatch:
    """Combines sequences (T, d) into one batch."""
    lengths = np.array([len(rows) for rows in group], np.int64)
    query = np.zeros((len(group), lengths.max(), group[0].shape[1]), np.float32)
    for index, rows in enumerate(group):
        query[index, : len(rows)] = rows
    return PaddedBatch(query, None if (lengths == lengths[0]).all() else lengths, int(lengths.sum()))


def measure(
    prepare: Prepare,
    repository: Path,
    model: Model,
    lengths: Lengths,
    size: int,
    seconds: float,
) -> tuple[float, float, float]:
    """Measures a library with `size` sequences available at a time: `onnx_run` or `eager_run`.

    Returns:
        Sequences and query rows per second, and the median duration of a call in microseconds.
    """
    ways = [list(map(pad, groups(model, lengths, count))) for count in {1, size}]
    rates = [
        _time([(prepare(repository, model, batch), batch) for batch in batches], seconds / len(ways))
        for batches in ways
    ]
    return max(rates, key=lambda rate: rate[1])


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
    count, tokens = sum(len(batch.query) for _, batch in calls), sum(batch.tokens for _, batch in calls)
    return rate * count, rate * tokens, 1e6 * median(durations)


def onnx_run(repository: Path, model: Model, batch: PaddedBatch) -> Callable[[], Any]:
    """Prepares a run of ONNX Runtime, which returns arrays by name."""
    kind = GraphKind.PLAIN if batch.key_lengths is None else GraphKind.LENGTHS
    lengths = {} if batch.key_lengths is None else {KEY_LENGTHS: batch.key_lengths}
    session = _session(repository / model.name / VERSION, kind)
    return partial(session.run, {"query": batch.query, **lengths})


@lru_cache
def _session(folder: Path, kind: GraphKind) -> Session:
    """One thread for each core, not pinned, as in the service."""
    path = folder / Manifest.load(folder).graphs[kind].file
    return Session(path.resolve(), Device(threads=cores()))


def expected_context(repository: Path, model: Model, lengths: Lengths) -> list[Array]:
    """Returns the context vectors of the first sequence, (T, d), in a list."""
    batch = pad(sequences(model, lengths)[:1])
    return list(onnx_run(repository, model, batch)()["context_vectors"])


def eager_run(_repository: Path, model: Model, batch: PaddedBatch) -> Callable[[], Any]:
    """Prepares a run of eager PyTorch: from float32 to float32."""
    import torch  # noqa: PLC0415 - ONNX Runtime is measured without it

    from attention_serving.export.quantisation import HALF_TYPES  # noqa: PLC0415

    dtype = HALF_TYPES.get(model.precision, torch.float32)
    module, query = build(model).to(dtype), torch.from_numpy(batch.query)
    key_lengths = None if batch.key_lengths is None else torch.from_numpy(batch.key_lengths)

    @torch.inference_mode()
    def call() -> Any:
        return module(query.to(dtype), key_lengths=key_lengths)[0].float()

    return call


@lru_cache
def build(model: Model) -> Any:
    """Returns the module in evaluation mode, with the same weights in every process."""
    import torch  # noqa: PLC0415

    from attention_serving.model.attention import MultiHeadAttention  # noqa: PLC0415
    from attention_serving.model.config import AttentionConfig  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MultiHeadAttention(AttentionConfig(d_query=model.width, num_heads=model.heads)).eval()


def save_weights(model: Model, folder: Path) -> Path:
    """Writes the weights as a checkpoint of the exporter's layout `generic`, and returns the file."""
    from safetensors.torch import save_file  # noqa: PLC0415

    path = folder / f"{model.name}.safetensors"
    save_file(build(model).state_dict(), path)
    return path
