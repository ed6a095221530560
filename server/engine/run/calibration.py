"""Times a loaded model, so that the queue knows what runs cost here."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from attention_serving.artifact.manifest import IN_BLOCKS, KEY_POSITIONS, OF_CONTEXTS, GraphKind
from attention_serving.server.engine.costs import UNTIMED_CONTEXT, ContextCost, Costs, RunCost
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.types import Array, Context

# Sizes that are timed: number of sequences, and length of each. As few as tell the three terms apart, because
# a model is not ready before: further ones took most of the time and did not make predictions better.
TIMED_SIZES = ((1, 1), (1, 16), (1, 64), (8, 16), (1, 512))
# On a device. Small runs take hardly longer than the call, so that only large ones tell what a row costs.
TIMED_SIZES_ON_DEVICE = ((1, 1), (1, 512), (8, 64), (8, 512), (32, 256), (64, 512), (8, 2048))
# Of runs of one sequence at a time: those in blocks.
TIMED_SIZES_ALONE = ((1, 1), (1, 16), (1, 128), (1, 512))
# Each size runs so often and for so long: the first run finds the caches of another size.
MIN_REPEATS, SIZE_SECONDS = 2, 0.005
# Fewer operations for each second are taken for none: their cost would not be finite.
LEAST_SCALE = 1e-280
# Rows of the two contexts that are timed; the first is also the larger number of queries.
CONTEXT_SIZES = (64, 2048)
# Larger sizes are skipped once a run takes this long.
MAX_RUN_SECONDS = 0.05
Size: TypeAlias = tuple[int, int]
"""Number of sequences, and length of each."""


def calibrated(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost of runs of each of its graphs."""
    runs = {kind: _Graph(model, kind).cost() for kind in model.sessions if kind not in OF_CONTEXTS}
    model.shrink_arena()
    context = _context_cost(model) if GraphKind.CONTEXT in model.sessions else UNTIMED_CONTEXT
    return dataclasses.replace(model, costs=Costs(runs, context))


def _context_cost(model: LoadedModel) -> ContextCost:
    """Times few and many queries to a small and to a large context, which tell the four terms apart."""
    clock = time.thread_time if model.runs_on_host else time.perf_counter
    (_, few), (_, many) = sizes = [(1, 1), (1, CONTEXT_SIZES[0])]
    small, large = CONTEXT_SIZES
    timings = []
    for rows in CONTEXT_SIZES:
        graph = _Graph(model.with_context(_random_context(model, rows)), GraphKind.PLAIN)
        timings.append(time_runs(sizes, graph.run, clock).values())
    (single, many_queries), (one_large, own_large) = timings
    pair = max(0.0, (own_large - one_large - many_queries + single) / ((many - few) * (large - small)))
    query_row = max(0.0, (many_queries - single) / (many - few) - small * pair)
    key_row = max(0.0, (one_large - single) / (large - small) - pair)
    call = max(0.0, single - small * (key_row + pair) - query_row)
    return ContextCost(call, key_row, query_row, pair)


def _random_context(model: LoadedModel, rows: int) -> Context:
    tensors: dict[str, Array] = {KEY_POSITIONS: np.arange(rows, dtype=np.int64)[np.newaxis]}
    noise = np.random.default_rng(0)
    for spec in model.manifest.graphs[GraphKind.PROJECT].outputs:
        shape = [axis if isinstance(axis, int) else rows for axis in spec.axes[1:]]
        tensors[spec.name] = noise.standard_normal((1, *shape), dtype=np.float32)
    return Context(id="", nbytes=0, tensors=tensors, length=rows)


class _Graph:
    """Runs one graph with sequences of noise."""

    def __init__(self, model: LoadedModel, kind: GraphKind) -> None:
        self.kind = kind
        self._model = model
        # Batches of the lengths graph have unequal lengths: the first sequence is one row shorter.
        self._ragged = kind is GraphKind.LENGTHS
        self._shortest = max(model.manifest.min_lengths.values(), default=1)
        self._longest = min(model.manifest.max_lengths.values(), default=math.inf)
        # By length. To make noise can take longer than to run it.
        self._noise: dict[int, SequenceInputs] = {}

    def cost(self) -> RunCost:
        """Times runs of several sizes, up to one that takes long enough."""
        on_host = self._model.runs_on_host
        # The weights of large batches would be hundreds of megabytes of results.
        is_small = on_host or self.kind is GraphKind.WEIGHTS
        sizes: tuple[Size, ...] = TIMED_SIZES if is_small else TIMED_SIZES_ON_DEVICE
        if self.kind in IN_BLOCKS.values():
            sizes = TIMED_SIZES_ALONE
        clock = time.thread_time if on_host else time.perf_counter
        timings = time_runs(self._possible(sizes), self.run, clock)
        return fit(self._operations(timings), list(timings.values()))

    def _possible(self, sizes: Iterable[Size]) -> list[Size]:
        """The nearest sizes that the graph takes."""
        least = self._shortest + self._ragged
        return [
            (
                max(count, 2) if self._ragged else count,
                int(min(max(length + self._ragged, least), self._longest)),
            )
            for count, length in sizes
        ]

    def _operations(self, sizes: Iterable[Size]) -> list[tuple[int, int]]:
        axes = len(self._model.axes)
        return [self._model.operations(count, (length,) * axes) for count, length in sizes]

    def run(self, count: int, length: int) -> None:
        """Runs so many sequences of a length."""
        run_batch(self._model, self.kind, self._sequences(count, length))

    def _sequences(self, count: int, length: int) -> list[SequenceInputs]:
        lengths = [length - (self._ragged and index == 0) for index in range(count)]
        for rows in set(lengths) - self._noise.keys():
            self._noise[rows] = _random_sequence(self._model, self.kind, rows)
        return [self._noise[rows] for rows in lengths]


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
    return SequenceInputs(inputs, mask, model.plan(graph, (length,) * len(model.axes)))


def fit(operations: Sequence[tuple[float, float]], seconds: Sequence[float]) -> RunCost:
    """Fits a cost to timed runs: least squares of the relative error, without negative coefficients.

    Args:
        operations: Row and pair operations of each run.
        seconds: Duration of each run.
    """
    durations = np.array(seconds)
    terms = np.column_stack([np.ones(len(durations)), np.array(operations, dtype=float)]) / durations[:, None]
    scale = terms.max(axis=0, initial=LEAST_SCALE)
    used = [0, 1, 2]
    while True:
        solution, *_ = np.linalg.lstsq(terms[:, used] / scale[used], np.ones(len(durations)), rcond=None)
        if (solution >= 0).all():
            break
        used.pop(int(solution.argmin()))
    coefficients = np.zeros(3)
    coefficients[used] = solution / scale[used]
    return RunCost(*coefficients.tolist())


def time_runs(
    sizes: Iterable[Size], run: Callable[[int, int], object], clock: Callable[[], float]
) -> dict[Size, float]:
    """The shortest duration of each size, in seconds: disturbances only add time.

    Args:
        sizes: Number of sequences, and length of each, in ascending order.
        run: Runs a size.
        clock: Seconds. `time.thread_time`, for runs that other threads take no part in, leaves out the time
            in which other processes have the core.

    Raises:
        MemoryError: The first run needs more memory than there is. Later sizes are then skipped instead.
    """
    shortest: dict[Size, float] = {}
    for size in sizes:
        try:
            shortest[size] = _shortest(partial(run, *size), clock)
        except MemoryError:
            if not shortest:
                raise
            break
        if shortest[size] > MAX_RUN_SECONDS:
            break
    return shortest


def _shortest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """The shortest of some runs of one size."""
    durations: list[float] = []
    while len(durations) < MIN_REPEATS or sum(durations) < SIZE_SECONDS:
        started, began = clock(), time.perf_counter()
        run()
        duration = clock() - started
        # The clock of a thread may stand still during a short run, on virtual machines whose cores are busy.
        durations.append(duration if duration > 0 else time.perf_counter() - began)
    return min(durations)
