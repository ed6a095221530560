"""Runs a batch: pads its sequences into the tensors of one run, and splits the outputs again.

Shapes: B sequences of the batch; Tq and Tk their largest query and key lengths.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, EMBEDDING
from attention_serving.artifact.manifest import (
    BATCH_AXIS,
    BLOCK_ROWS,
    Graph,
    GraphKind,
    TensorSpec,
)
from attention_serving.server.engine.model import ContextModel, LoadedModel
from attention_serving.server.engine.requests.outputs import pool, select, select_outputs
from attention_serving.server.engine.requests.request import SequenceInputs
from attention_serving.server.engine.run.memory import Allocator
from attention_serving.server.engine.run.session import RunControl, Session, Value
from attention_serving.server.engine.types import Array, Context

Outputs = dict[str, Array]
# When a run started, had its inputs, had its outputs, and ended, on `time.monotonic`'s clock.
RunTimestamps = tuple[float, float, float, float]
_plan = attrgetter("plan")


def run_batch(
    model: LoadedModel,
    kind: GraphKind,
    sequences: Sequence[SequenceInputs],
    control: RunControl | None = None,
    *,
    parallel: bool = False,
) -> tuple[list[Outputs], RunTimestamps]:
    """Runs sequences together on one graph.

    Args:
        model: The model of all sequences.
        kind: The graph that runs them.
        sequences: What to run.
        control: Can end the run early.
        parallel: Whether the run uses all threads instead of the caller's.

    Returns:
        The outputs of each sequence, by name; and when the parts of the run began and ended.

    Raises:
        MemoryError: The run needs more memory than the runtime may take.
    """
    graph, started = model.manifest.graphs[kind], time.monotonic()
    session = (model.parallel_sessions if parallel else model.sessions)[kind]
    inputs: dict[str, Value]
    rows: Mapping[str, int] = {}
    if isinstance(model, ContextModel):
        inputs = _concatenate(model.context, graph, sequences, session)
    else:
        if model.row_multiple > 1:
            rows = _padded_rows(model, kind, sequences)
        inputs = {spec.name: _pad(model, spec, sequences, rows, session) for spec in graph.inputs}
        if model.context is not None:
            inputs.update(session.context_inputs(model.context))
    prepared = time.monotonic()
    outputs = session.run(inputs, control)
    computed = time.monotonic()
    if isinstance(model, ContextModel):
        results = _split_rows(graph, outputs, sequences)
    else:
        results = _split(graph, outputs, sequences, is_padded=bool(rows))
    for at, sequence in enumerate(sequences):
        if sequence.head_selection is not None and model.weights_output is not None:
            name = model.weights_output.name
            results[at][name] = select(results[at][name], sequence.head_selection)
        if sequence.encoder_outputs is not None and model.encoder is not None:
            if sequence.spans is not None:
                results[at][EMBEDDING] = pool(results[at][CONTEXT_VECTORS], sequence.spans, model.encoder)
            ids = sequence.inputs[model.inputs[0].name]
            results[at] = select_outputs(
                results[at], sequence.encoder_outputs, ids, sequence.kind, model.encoder
            )
    return results, (started, prepared, computed, time.monotonic())


def _padded_rows(
    model: LoadedModel, kind: GraphKind, sequences: Sequence[SequenceInputs]
) -> Mapping[str, int]:
    """The length by symbolic axis of a run that is longer than its longest sequences; otherwise empty."""
    longest = tuple(map(max, zip(*[sequence.lengths for sequence in sequences], strict=True)))
    padded = model.padded_lengths(kind, longest)
    return dict(zip(model.axes, padded, strict=True)) if padded != longest else {}


def _split(
    graph: Graph, outputs: Outputs, sequences: Sequence[SequenceInputs], *, is_padded: bool
) -> list[Outputs]:
    """The outputs of each sequence, without padding, beyond the longest of them if `is_padded`."""
    first, results = sequences[0].plan, [Outputs() for _ in sequences]
    is_whole = not is_padded and (
        all(map(is_, map(_plan, sequences), repeat(first)))  # first: without a Python loop
        or all(sequence.sizes == first.sizes for sequence in sequences)
    )
    for spec in graph.outputs:
        values, is_batched = outputs[spec.name], is_whole and spec.axes[0] == BATCH_AXIS
        for at, sequence in enumerate(sequences):
            results[at][spec.name] = values[at if is_batched else _window(spec, sequence, at)]
    return results


def _split_rows(graph: Graph, outputs: Outputs, sequences: Sequence[SequenceInputs]) -> list[Outputs]:
    """The outputs of each sequence, of sequences whose rows were concatenated to one."""
    results, start = [], 0
    for sequence in sequences:
        end = start + sequence.lengths[0]
        results.append({spec.name: outputs[spec.name][0, ..., start:end, :] for spec in graph.outputs})
        start = end
    return results


def _pad(
    model: LoadedModel,
    spec: TensorSpec,
    sequences: Sequence[SequenceInputs],
    rows: Mapping[str, int],
    session: Session,
) -> Array:
    """One input of a run: the sequences' own arrays stacked, or what the graph has in addition.

    Args:
        model: The model of all sequences.
        spec: The input.
        sequences: What to run.
        rows: At least so many rows by symbolic axis; without one, those of the longest sequence.
        session: Makes the array; unless its runs are bound, a single sequence is not copied.
    """
    name, least = spec.name, rows.get(str(spec.length_axis), 0)
    if name in sequences[0].inputs:
        if len(spec.axes) == 1:
            return np.concatenate([sequence.inputs[name] for sequence in sequences])  # (B,)
        if len(sequences) == 1 and session.slabs is None and len(sequences[0].inputs[name]) >= least:
            return sequences[0].inputs[name][np.newaxis]
        return _stack([sequence.inputs[name] for sequence in sequences], least, session.empty)
    if name == BLOCK_ROWS:
        longest = max(model.key_length(sequence.lengths) for sequence in sequences)
        return np.array(model.block_rows(longest), np.int64)  # ()
    if (axis := model.axes_of_lengths.get(name)) is not None:
        return np.array([sequence.sizes[axis] for sequence in sequences], dtype=np.int64)  # (B,)
    return _stack_masks(spec, sequences, rows, session.empty)


def _concatenate(
    context: Context, graph: Graph, sequences: Sequence[SequenceInputs], session: Session
) -> dict[str, Value]:
    """The inputs of a run of queries to a context: their rows one after the other, and the context."""
    inputs = {
        name: value for name, value in session.context_inputs(context).items() if name in session.inputs
    }
    for spec in graph.inputs:
        if spec.name in sequences[0].inputs:
            rows = [sequence.inputs[spec.name] for sequence in sequences]
            is_copied = len(rows) > 1 or session.slabs is not None
            inputs[spec.name] = (_join(rows, session.empty) if is_copied else rows[0])[np.newaxis]
        else:
            inputs[spec.name] = _concatenate_masks(sequences, context.rows)
    return inputs


def _stack(arrays: list[Array], least: int, empty: Allocator) -> Array:
    """Stacks (T_i, ...) arrays to (B, T, ...), padded with zeros, of at least so many rows T."""
    lengths = [len(array) for array in arrays]
    width, longest = arrays[0].shape[1:], max(least, *lengths)
    if min(lengths) == longest:
        return _join(arrays, empty).reshape(len(arrays), longest, *width)
    stacked = empty((len(arrays), longest, *width), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = 0
    return stacked


def _join(arrays: list[Array], empty: Allocator) -> Array:
    """Concatenates (T_i, ...) arrays to (sum of T_i, ...)."""
    rows = empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
    return np.concatenate(arrays, out=rows)


def _stack_masks(
    spec: TensorSpec, sequences: Sequence[SequenceInputs], rows: Mapping[str, int], empty: Allocator
) -> Array:
    """(B, 1 or H, Tq, Tk): the mask of each sequence, False for every padded key; `rows` as for `_pad`."""
    heads = max(1 if sequence.mask is None else len(sequence.mask) for sequence in sequences)
    _, _, query_axis, key_axis = map(str, spec.axes)
    longest = [
        max(rows.get(axis, 0), *(sequence.sizes[axis] for sequence in sequences))
        for axis in (query_axis, key_axis)
    ]
    stacked = empty((len(sequences), heads, *longest), np.bool_)
    if len(sequences) > 1 or rows:
        stacked.fill(False)  # noqa: FBT003 - takes no keyword
    for row, sequence in zip(stacked, sequences, strict=True):
        window = row[:, : sequence.sizes[query_axis], : sequence.sizes[key_axis]]
        window[...] = True if sequence.mask is None else sequence.mask
    return stacked


def _concatenate_masks(sequences: Sequence[SequenceInputs], key_rows: int) -> Array:
    """(1, 1 or H, sum of Tq, Tk): the mask of each sequence for its rows."""
    heads = max(1 if sequence.mask is None else len(sequence.mask) for sequence in sequences)
    shapes = [(heads, sequence.lengths[0], key_rows) for sequence in sequences]
    masks = [True if sequence.mask is None else sequence.mask for sequence in sequences]
    return np.concatenate(list(map(np.broadcast_to, masks, shapes)), axis=1)[np.newaxis]


def _window(spec: TensorSpec, sequence: SequenceInputs, index: int) -> tuple[int | slice, ...]:
    """The index of one sequence's values in a batched output."""
    return tuple(
        index if axis == BATCH_AXIS else slice(sequence.sizes[axis] if isinstance(axis, str) else None)
        for axis in spec.axes
    )
