"""Times a loaded model, so that the queue knows what runs cost here."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from attention_serving.artifact.manifest import IN_BLOCKS, KEY_POSITIONS, OF_CONTEXTS, GraphKind
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.validated_request import SequenceInputs
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.schedule.pace import Pace
from attention_serving.server.engine.types import Array, Context, ContextCost, RunCost

# Sizes that are timed: number of sequences, and length of each. As few as tell the three terms apart, because
# a model is not ready before: further ones took most of the time and did not make predictions better.
TIMED_SIZES = ((1, 1), (1, 16), (1, 64), (8, 16), (1, 512))
# On a device. Small runs take hardly longer than the call, so that only large ones tell what a row costs.
TIMED_SIZES_ON_DEVICE = ((1, 1), (1, 512), (8, 64), (8, 512), (32, 256), (64, 512), (8, 2048))
# Of runs of one sequence at a time: those in blocks, and those on all threads.
TIMED_SIZES_ALONE = ((1, 1), (1, 16), (1, 128), (1, 512))
# A turn runs a size so often and for so long: the first run finds the caches of another size.
LEAST_RUNS, TURN_SECONDS = 2, 0.005
# Two ways to run a size are compared in so many turns.
COMPARED_TURNS = 2
# Fewer operations for each second are taken for none: their cost would not be finite.
LEAST_SCALE = 1e-280
# Rows of the two contexts that are timed; the first is also the larger number of queries.
CONTEXT_SIZES = (64, 2048)
# Larger sizes are skipped once a run takes this long.
LONG_ENOUGH_SECONDS = 0.05
Size: TypeAlias = tuple[int, int]
"""Number of sequences, and length of each."""


def calibrated(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost of runs of each of its graphs."""
    costs = {kind: _Graph(model, kind).cost() for kind in model.sessions if kind not in OF_CONTEXTS}
    ratios = {
        kind: _Graph(model, kind).parallel_ratios(costs[kind])
        for kind in model.parallel_sessions
        if kind in costs
    }
    model.shrink_arena()
    paces = {kind: Pace(of_kind) for kind, of_kind in ratios.items()}
    timed = dataclasses.replace(model, costs=costs, paces=paces)
    if GraphKind.CONTEXT not in model.sessions:
        return timed
    paces[GraphKind.PROJECT] = Pace(ratios.get(GraphKind.PLAIN))
    context_cost, paces[GraphKind.CONTEXT] = _context_cost(timed)
    return dataclasses.replace(timed, context_cost=context_cost)


def _context_cost(model: LoadedModel) -> tuple[ContextCost, Pace]:
    """Times few and many queries to a small and to a large context, which tell the four terms apart."""
    clock = time.thread_time if model.runs_on_host else time.perf_counter
    (_, few), (_, many) = sizes = [(1, 1), (1, CONTEXT_SIZES[0])]
    small, large = CONTEXT_SIZES
    timings, ways = [], list[Callable[[int, int], object]]()
    for rows in CONTEXT_SIZES:
        graph = _Graph(model.attending(_random_context(model, rows)), GraphKind.PLAIN)
        ways = [partial(graph.run, parallel=parallel) for parallel in (False, True)]
        timings.append([seconds for (seconds,) in time_in_turns(sizes, ways[:1], clock).values()])
    (single, many_queries), (one_large, own_large) = timings
    pair = max(0.0, (own_large - one_large - many_queries + single) / ((many - few) * (large - small)))
    query_row = max(0.0, (many_queries - single) / (many - few) - small * pair)
    key_row = max(0.0, (one_large - single) / (large - small) - pair)
    call = max(0.0, single - small * (key_row + pair) - query_row)
    cost = ContextCost(call, key_row, query_row, pair)
    if GraphKind.CONTEXT not in model.parallel_sessions:
        return cost, Pace()
    ((alone, parallel),) = time_in_turns(sizes[:1], ways, time.perf_counter).values()
    return cost, Pace({one_large: parallel / alone})


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
        clock, run = time.thread_time if on_host else time.perf_counter, partial(self.run, parallel=False)
        timings = time_in_turns(self._possible(sizes), [run], clock)
        return fit(self._operations(timings), [seconds for (seconds,) in timings.values()])

    def parallel_ratios(self, cost: RunCost) -> dict[float, float]:
        """How many times as long as on one thread runs take on all, by their expected seconds on one.

        Both are timed by the wall clock: the clock of one thread leaves out the time in which other
        processes have the core, so that one thread would look faster on a busy machine.
        """
        ways = [partial(self.run, parallel=parallel) for parallel in (False, True)]
        timings = time_in_turns(self._possible(TIMED_SIZES_ALONE), ways, time.perf_counter)
        return {
            cost.seconds(*operations): parallel / single
            for operations, (single, parallel) in zip(
                self._operations(timings), timings.values(), strict=True
            )
        }

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

    def run(self, count: int, length: int, *, parallel: bool) -> None:
        """Runs so many sequences of a length."""
        run_batch(self._model, self.kind, self._sequences(count, length), parallel=parallel)

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
    return SequenceInputs(inputs, mask, model.shape(graph, (length,) * len(model.axes)))


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


def time_in_turns(
    sizes: Sequence[Size],
    ways: Sequence[Callable[[int, int], object]],
    clock: Callable[[], float],
) -> dict[Size, list[float]]:
    """The shortest duration of each size in each way to run it, in seconds: disturbances only add time.

    If ways are compared, all sizes and ways are timed by turns. Another process that has a core for some
    milliseconds then disturbs a few runs of each, and not all runs of one.

    Args:
        sizes: Number of sequences, and length of each, in ascending order.
        ways: Each runs a size.
        clock: Seconds. `time.thread_time`, for runs that other threads take no part in, leaves out the time
            in which other processes have the core.

    Raises:
        MemoryError: The first run needs more memory than there is. Later sizes are then skipped instead.
    """
    shortest: dict[Size, list[float]] = {}
    for _ in range(COMPARED_TURNS if len(ways) > 1 else 1):
        for index, size in enumerate(sizes):
            try:
                durations = [_shortest(partial(run, *size), clock) for run in ways]
            except MemoryError:
                if not shortest:
                    raise
                sizes = sizes[:index]
                break
            shortest[size] = list(map(min, durations, shortest.get(size, durations)))
            if max(durations) > LONG_ENOUGH_SECONDS:
                sizes = sizes[: index + 1]
                break
    return shortest


def _shortest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    """The shortest of the runs of one turn."""
    durations: list[float] = []
    while len(durations) < LEAST_RUNS or sum(durations) < TURN_SECONDS:
        started, began = clock(), time.perf_counter()
        run()
        duration = clock() - started
        # The clock of a thread may stand still during a short run, on virtual machines whose cores are busy.
        durations.append(duration if duration > 0 else time.perf_counter() - began)
    return min(durations)
