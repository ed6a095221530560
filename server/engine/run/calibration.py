"""Times a loaded model and measures its memory, so that the queue knows what runs cost here."""

import dataclasses
import math
import operator
import time
from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

import numpy as np

from attention_serving.artifact.manifest import IN_BLOCKS, GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs
from attention_serving.server.engine.run.cost import (
    TIMED_SIZES,
    TIMED_SIZES_ALONE,
    TIMED_SIZES_ON_DEVICE,
    RunCost,
    fit,
    time_in_turns,
    time_runs,
)
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.run_memory import peak_bytes
from attention_serving.server.engine.types import Array

# Length of the sequences whose run's memory is measured.
MEASURED_LENGTH = 512
# A smaller growth of the process says little about the run: it may be the interpreter's own.
MEASURABLE_BYTES = 4 << 20
Size: TypeAlias = tuple[int, int]
"""Number of sequences, and length of each."""


def calibrated(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost and memory of runs of each of its graphs."""
    costs, pair_tensors = {}, {}
    for graph in [_Graph(model, kind) for kind in model.sessions]:
        # Memory first: that run leaves an arena in which the longest run that is timed finds its pages.
        pair_tensors[graph.kind] = graph.pair_tensors()
        costs[graph.kind] = graph.cost()
    parallel_costs = {
        kind: _Graph(model, kind).parallel_cost(costs[kind]) for kind in model.parallel_sessions
    }
    model.shrink_arena()
    return dataclasses.replace(model, costs=costs, pair_tensors=pair_tensors, parallel_costs=parallel_costs)


class _Graph:
    """Runs one graph with sequences of noise."""

    def __init__(self, model: LoadedModel, kind: GraphKind) -> None:
        self.kind = kind
        self._model = model
        # Batches of the lengths graph have unequal lengths: the first sequence is one row shorter.
        self._ragged = kind is GraphKind.LENGTHS
        self._longest = min(model.manifest.max_lengths.values(), default=math.inf)
        # By length. To make noise can take longer than to run it.
        self._noise: dict[int, SequenceInputs] = {}

    def cost(self) -> RunCost:
        """Times runs of several sizes, up to one that takes long enough."""
        clock = time.thread_time if self._model.runs_on_host else time.perf_counter
        run = partial(self._run, parallel=False)
        seconds = time_runs(self._possible(self._timed_sizes), run, clock)
        return fit(self._operations(seconds), list(seconds.values()))

    def parallel_cost(self, one_thread: RunCost) -> RunCost:
        """The cost of runs on all threads, in terms of that on one.

        Both are timed by the wall clock: the clock of one thread leaves out the time in which other
        processes have the core, so that one thread would look faster on a busy machine.
        """
        one, every = (partial(self._run, parallel=parallel) for parallel in (False, True))
        ratios = time_in_turns(self._possible(TIMED_SIZES_ALONE), every, one)
        operations = self._operations(ratios)
        alone = (one_thread.seconds(*run) for run in operations)
        return fit(operations, list(map(operator.mul, ratios.values(), alone)))

    def _possible(self, sizes: Iterable[Size]) -> list[Size]:
        """The nearest sizes that the graph takes."""
        return [
            (max(count, 2) if self._ragged else count, int(min(length + self._ragged, self._longest)))
            for count, length in sizes
        ]

    def _operations(self, sizes: Iterable[Size]) -> list[tuple[int, int]]:
        return [self._model.operations(count, length, length) for count, length in sizes]

    @property
    def _timed_sizes(self) -> tuple[Size, ...]:
        if self.kind in IN_BLOCKS.values():
            return TIMED_SIZES_ALONE
        # The weights of large batches would be hundreds of megabytes of results.
        is_small = self._model.runs_on_host or self.kind is GraphKind.WEIGHTS
        return TIMED_SIZES if is_small else TIMED_SIZES_ON_DEVICE

    def pair_tensors(self) -> float:
        """Tensors of the size of the attention scores that a run holds, by its measured memory.

        On a device, the memory of this process says nothing about that of a run.
        """
        if not self._model.runs_on_host:
            return self._model.expected_pair_tensors(self.kind)
        count, length = 1 + self._ragged, int(min(MEASURED_LENGTH + self._ragged, self._longest))
        without, with_one = (
            dataclasses.replace(self._model, pair_tensors={self.kind: tensors}) for tensors in (0.0, 1.0)
        )
        row_bytes = without.run_bytes(self.kind, count, length, length)
        pair_bytes = with_one.run_bytes(self.kind, count, length, length) - row_bytes
        self._model.shrink_arena()
        sequences = self._sequences(count, length)
        measured = peak_bytes(lambda: run_batch(self._model, self.kind, sequences))
        expected = self._model.expected_pair_tensors(self.kind)
        if measured is None or measured < MEASURABLE_BYTES:
            return expected
        return max(expected, (measured - row_bytes) / pair_bytes)

    def _run(self, count: int, length: int, *, parallel: bool) -> None:
        run_batch(self._model, self.kind, self._sequences(count, length), parallel=parallel)

    def _sequences(self, count: int, length: int) -> list[SequenceInputs]:
        lengths = [length - (self._ragged and index == 0) for index in range(count)]
        for own in set(lengths) - self._noise.keys():
            self._noise[own] = _random_sequence(self._model, self.kind, own)
        return [self._noise[own] for own in lengths]


def _random_sequence(model: LoadedModel, graph: GraphKind, length: int) -> SequenceInputs:
    """A sequence of noise, because zeros are faster than what callers send."""
    rng = np.random.default_rng(length)
    inputs: dict[str, Array] = {}
    for spec in model.inputs:
        shape = [length, *(axis for axis in spec.axes[2:] if isinstance(axis, int))]
        bound = spec.exclusive_upper_bound or length
        noise = rng.integers(bound, size=shape) if spec.data_type == "int64" else rng.random(shape)
        inputs[spec.name] = noise.astype(spec.data_type)
    masked = graph in (GraphKind.MASK, GraphKind.MASK_BLOCKS)
    mask = np.ones((1, length, length), np.bool_) if masked else None
    return SequenceInputs(inputs, mask, model.shape(graph, (length,) * len(model.axes)))
