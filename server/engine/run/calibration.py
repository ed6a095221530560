"""Times a loaded model, so that the queue knows what runs cost here."""

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np

from attention_serving.artifact.manifest import IN_BLOCKS, KEY_POSITIONS, OF_CONTEXTS, GraphKind
from attention_serving.server.engine.costs import UNTIMED_CONTEXT, ContextCost, Costs, RunCost
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.execute import run_batch
from attention_serving.server.engine.run.session import DEVICE_TURN
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
# Number of sequences, and length of each.
Size: TypeAlias = tuple[int, int]
NO_TURN = nullcontext()


def calibrate(model: LoadedModel) -> LoadedModel:
    """The same model with the measured cost of runs of each of its graphs."""
    untimed = (*OF_CONTEXTS, GraphKind.SUFFIX)
    run_costs = {kind: _run_cost(model, kind) for kind in model.sessions if kind not in untimed}
    model.shrink_arena()
    context_cost = _context_cost(model) if GraphKind.CONTEXT in model.sessions else UNTIMED_CONTEXT
    return dataclasses.replace(model, costs=Costs(run_costs, context_cost))


def _run_cost(model: LoadedModel, kind: GraphKind) -> RunCost:
    """Times runs of several sizes, up to one that takes long enough."""
    # The weights of large batches would be hundreds of megabytes of results.
    is_small = model.runs_on_host or kind is GraphKind.WEIGHTS
    sizes = TIMED_SIZES if is_small else TIMED_SIZES_ON_DEVICE
    timings = _time_graph(model, kind, TIMED_SIZES_ALONE if kind in IN_BLOCKS.values() else sizes)
    operations = [
        model.operations(*model.run_size(kind, count, model.lengths(length), count * length))
        for count, length in timings
    ]
    return RunCost(*fit(operations, list(timings.values())))


def _context_cost(model: LoadedModel) -> ContextCost:
    """Times few and many queries to a small and to a large context, which tell the four terms apart."""
    operations, seconds = list[tuple[int, int, int]](), list[float]()
    for rows in CONTEXT_SIZES:
        view = model.with_context(_random_context(model, rows))
        timings = _time_graph(view, GraphKind.PLAIN, ((1, 1), (1, CONTEXT_SIZES[0])))
        operations += [(rows, queries, queries * rows) for _, queries in timings]
        seconds += timings.values()
    return ContextCost(*fit(operations, seconds))


def _time_graph(model: LoadedModel, kind: GraphKind, sizes: Iterable[Size]) -> dict[Size, float]:
    """The duration of runs of noise, with the nearest sizes that the graph takes, in seconds."""
    # Batches of the lengths graph have unequal lengths: the first sequence is a row or a multiple shorter, so
    # that on a device the run is aligned, as those that are served.
    is_ragged = kind is GraphKind.LENGTHS
    step = math.lcm(*model.manifest.length_multiples.values())
    shortest = max(model.manifest.min_lengths.values(), default=1) + step * is_ragged
    longest = min(model.manifest.max_lengths.values(), default=sys.maxsize) // step * step
    # To make noise can take longer than to run it.
    sequence = cache(partial(_random_sequence, model, kind))

    def run(count: int, length: int) -> None:
        lengths = [length - step * is_ragged, *[length] * (count - 1)]
        run_batch(model, kind, [sequence(rows) for rows in lengths])

    possible = [
        (max(count, 1 + is_ragged), min(max(-(-length // step) * step, shortest), longest))
        for count, length in sizes
    ]
    if model.runs_on_host:
        return time_runs(possible, run, time.thread_time)
    return time_runs(possible, run, time.perf_counter, DEVICE_TURN)


def _random_context(model: LoadedModel, rows: int) -> Context:
    tensors: dict[str, Array] = {KEY_POSITIONS: np.arange(rows, dtype=np.int64)[np.newaxis]}
    noise = np.random.default_rng(0)
    for spec in model.manifest.graphs[GraphKind.PROJECT].outputs:
        shape = [axis if isinstance(axis, int) else rows for axis in spec.axes[1:]]
        tensors[spec.name] = noise.standard_normal((1, *shape), dtype=np.float32)
    return Context(id="", nbytes=0, tensors=tensors, length=rows)


def _random_sequence(model: LoadedModel, kind: GraphKind, length: int) -> SequenceInputs:
    """A sequence of noise, because zeros are faster than what callers send."""
    rng = np.random.default_rng(length)
    inputs: dict[str, Array] = {}
    for spec in model.inputs:
        rows = length if isinstance(spec.length_axis, str) else spec.length_axis
        shape = [rows, *(axis for axis in spec.axes[2:] if isinstance(axis, int))]
        bound: Any = spec.exclusive_upper_bound or length
        noise = rng.integers(bound, size=shape) if spec.data_type == "int64" else rng.random(shape)
        inputs[spec.name] = noise.astype(spec.data_type)
    masked = kind in (GraphKind.MASK, GraphKind.MASK_BLOCKS)
    mask = np.ones((1, length, length), np.bool_) if masked else None
    return SequenceInputs(inputs, mask, model.plan(kind, model.lengths(length)))


def fit(operations: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fits a cost to timed runs: least squares of the relative error, without negative coefficients.

    Args:
        operations: The operations of each run, by kind.
        seconds: Duration of each run.

    Returns:
        Seconds of a run without operations, and of an operation of each kind.
    """
    durations = np.array(seconds)
    terms = np.column_stack([np.ones(len(durations)), np.array(operations, dtype=float)]) / durations[:, None]
    scale = terms.max(axis=0, initial=LEAST_SCALE)
    used = list(range(terms.shape[1]))
    coefficients = np.zeros(len(used))
    while True:
        solution, *_ = np.linalg.lstsq(terms[:, used] / scale[used], np.ones(len(durations)), rcond=None)
        if (solution >= 0).all():
            break
        used.pop(int(solution.argmin()))
    coefficients[used] = solution / scale[used]
    values: list[float] = coefficients.tolist()
    return values


def time_runs(
    sizes: Iterable[Size],
    run: Callable[[int, int], object],
    clock: Callable[[], float],
    turn: AbstractContextManager[object] = NO_TURN,
) -> dict[Size, float]:
    """The shortest duration of each size, in seconds: disturbances only add time.

    Args:
        sizes: Number of sequences, and length of each, in ascending order.
        run: Runs a size.
        clock: Seconds. `time.thread_time`, for runs that other threads take no part in, leaves out the time
            in which other processes have the core.
        turn: What a run waits for, which is not timed.

    Raises:
        MemoryError: The first run needs more memory than there is. Later sizes are then skipped instead.
    """
    shortest: dict[Size, float] = {}
    for size in sizes:
        try:
            shortest[size] = _shortest(partial(run, *size), clock, turn)
        except MemoryError:
            if not shortest:
                raise
            break
        if shortest[size] > MAX_RUN_SECONDS:
            break
    return shortest


def _shortest(
    run: Callable[[], object], clock: Callable[[], float], turn: AbstractContextManager[object]
) -> float:
    """The shortest of some runs of one size."""
    durations: list[float] = []
    while len(durations) < MIN_REPEATS or sum(durations) < SIZE_SECONDS:
        with turn:
            started, began = clock(), time.perf_counter()
            run()
            duration = clock() - started
        # The clock of a thread may stand still during a short run, on virtual machines whose cores are busy.
        durations.append(duration if duration > 0 else time.perf_counter() - began)
    return min(durations)
