"""What follows from the lengths of a request's sequences: the size of each axis, and of the result.

Kept between requests, because callers send the same few lengths again and again.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.manifest import BATCH_AXIS, GraphKind, TensorSpec
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel, cached_by_model
from attention_serving.server.engine.types import SequenceShape

Sizes = dict[str, int]
# The lengths of each input, in the order of the model's inputs.
Lengths = tuple[tuple[int, ...], ...]
DTYPES = {name: np.dtype(name) for name in ("float32", "int64", "bool")}
# What follows from the lengths of requests with more sequences is not cached.
MAX_CACHED_SEQUENCES = 8
CACHED_REQUESTS = 1024


class Dimensions(NamedTuple):
    """What follows from the lengths of a request.

    Attributes:
        shapes: What follows for each sequence.
        result_bytes: Size of all results.
        largest: Index of the sequence whose run alone needs the most memory.
    """

    shapes: list[SequenceShape]
    result_bytes: int
    largest: int


def dimensions(model: LoadedModel, lengths: Lengths, graph: GraphKind) -> Dimensions:
    """Binds the symbolic axes of every sequence.

    Args:
        model: The requested model.
        lengths: Rows of each sequence, for each of the model's inputs.
        graph: The graph whose outputs are computed.

    Raises:
        InvalidRequestError: A sequence is empty, or inputs that share an axis differ in length.
    """
    compute = _cached if len(lengths[0]) <= MAX_CACHED_SEQUENCES else _dimensions
    return compute(model, lengths, graph)


def _dimensions(model: LoadedModel, lengths: Lengths, graph: GraphKind) -> Dimensions:
    columns = _bind_axes(model.inputs, lengths)
    rows = list(zip(*columns.values(), strict=True))
    # Requests of many sequences have few different sizes, or one.
    counts = Counter(rows)
    sizes = {own: dict(zip(columns, own, strict=True)) for own in counts}
    outputs = model.manifest.graphs[graph].outputs
    result_bytes = sum(
        count * _output_bytes(spec, sizes[own]) for own, count in counts.items() for spec in outputs
    )
    query, key = (str(model.inputs[at].axes[1]) for at in (0, -1))
    shapes = {own: _shape(model, graph, named, (named[query], named[key])) for own, named in sizes.items()}
    largest = max(shapes, key=lambda own: shapes[own].run_bytes)
    return Dimensions([shapes[own] for own in rows], result_bytes, rows.index(largest))


def _shape(model: LoadedModel, graph: GraphKind, sizes: Sizes, lengths: tuple[int, int]) -> SequenceShape:
    own = model.sequence_graph(graph, *lengths)
    seconds, run_bytes = model.seconds(own, 1, *lengths), model.run_bytes(own, 1, *lengths)
    least_seconds = min(seconds, model.parallel_seconds(own, 1, *lengths))
    return SequenceShape(sizes, lengths, own, seconds, run_bytes, least_seconds, sum(sizes.values()))


_cached = cached_by_model(CACHED_REQUESTS)(_dimensions)


def _bind_axes(specs: Sequence[TensorSpec], lengths: Lengths) -> dict[str, tuple[int, ...]]:
    """The length of each symbolic axis for every sequence; inputs that share an axis must agree."""
    bound: dict[str, tuple[str, tuple[int, ...]]] = {}
    first, count = specs[0].name, len(lengths[0])
    for spec, own in zip(specs, lengths, strict=True):
        if not own:
            raise InvalidRequestError(spec.name, "does not contain any sequence")
        if len(own) != count:
            raise InvalidRequestError(spec.name, f"contains {len(own)} sequences; {first} contains {count}")
        if min(own) < 1:
            raise InvalidRequestError(spec.name, f"sequence {own.index(min(own))} is empty")
        other, expected = bound.setdefault(str(spec.axes[1]), (spec.name, own))
        if own != expected:
            index = next(i for i in range(count) if own[i] != expected[i])
            raise InvalidRequestError(
                spec.name, f"sequence {index} has {own[index]} rows; {other} has {expected[index]}"
            )
    return {axis: own for axis, (_, own) in bound.items()}


def _output_bytes(spec: TensorSpec, sizes: Sizes) -> int:
    """Size of one output of one sequence, in bytes."""
    axes = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes if axis != BATCH_AXIS]
    return DTYPES[spec.data_type].itemsize * math.prod(axes)
