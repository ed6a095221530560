"""Turns a decoded request into work that may enter the queue, or says what is wrong with it."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from artifact.manifest import BATCH_AXIS, POSITIONS, GraphKind, TensorSpec
from server.engine.errors import InvalidRequestError, LimitExceededError
from server.engine.limits import Limits
from server.engine.model import LoadedModel
from server.engine.tokenizer import FIELD as TEXT
from server.engine.types import Array, Item, Mask, MaskKind, Ragged, Request, Work

Sizes = dict[str, int]
MASK = "mask"
# Callers repeat themselves: what follows from the lengths of a few sequences is kept for the next request.
FEW_SEQUENCES = 8
CACHED_DIMENSIONS = 1024
DTYPES = {name: np.dtype(name) for name in ("float32", "int64", "bool")}


def validate(request: Request, model: LoadedModel, limits: Limits) -> Work:
    """Checks a request against its model and the server's limits.

    Raises:
        InvalidRequestError: The request is wrong; names the field at fault.
        LimitExceededError: The request or its result would be too large.
    """
    _check_options(request, model)
    inputs = _with_positions(_inputs(request, model, limits), model)
    ragged = [inputs[spec.name] for spec in model.inputs]
    for spec, own in zip(model.inputs, ragged, strict=True):
        _check_rows(spec, own.rows, sum(own.lengths))
    lengths = tuple([own.lengths for own in ragged])
    dimensions = _known_dimensions if len(lengths[0]) <= FEW_SEQUENCES else _dimensions
    sizes, result_bytes = dimensions(model, lengths, request.return_weights)
    for spec, own in zip(model.inputs, ragged, strict=True):
        own_limit = model.manifest.max_lengths.get(str(spec.axes[1]))
        _check_lengths(TEXT if request.texts else spec.name, own.lengths, limits, own_limit)
    if result_bytes > limits.max_result_bytes:
        query = TEXT if request.texts else model.inputs[0].name
        field = "return_weights" if request.return_weights else query
        raise LimitExceededError(
            field, f"the result would be {result_bytes} bytes; the limit is {limits.max_result_bytes}"
        )
    names = [spec.name for spec in model.inputs]
    rows = [_split(own) for own in ragged]
    masks = _split_mask(request.mask, model, sizes)
    items = [
        Item(dict(zip(names, arrays, strict=True)), size, mask)
        for size, mask, *arrays in zip(sizes, masks, *rows, strict=True)
    ]
    held = sum([own.rows.nbytes for own in ragged])
    held += sum([mask.nbytes for mask in masks if mask is not None])
    return Work(
        model=model,
        items=tuple(items),
        return_weights=request.return_weights,
        masked=request.mask is not None,
        deadline=request.deadline,
        in_flight_bytes=held + result_bytes,
    )


def _check_options(request: Request, model: LoadedModel) -> None:
    """A module that is no attention has neither mask nor weights."""
    graphs = model.manifest.graphs
    if request.mask is not None and GraphKind.MASK not in graphs:
        raise InvalidRequestError(MASK, f"model {model.name!r} takes no mask")
    if request.return_weights and GraphKind.WEIGHTS not in graphs:
        raise InvalidRequestError("return_weights", f"model {model.name!r} has no attention weights")


def _inputs(request: Request, model: LoadedModel, limits: Limits) -> Mapping[str, Ragged]:
    """The model's inputs by name, encoded from text where the request brings text."""
    if request.texts:
        if request.inputs:
            raise InvalidRequestError(TEXT, f"comes in place of {', '.join(request.inputs)}, not beside")
        if model.text_encoder is None:
            raise InvalidRequestError(TEXT, f"model {model.name!r} takes {_names(model)}, not text")
        if len(request.texts) > limits.max_sequences:
            raise _too_many_sequences(TEXT, len(request.texts), limits)
        return {model.inputs[0].name: model.text_encoder.encode(request.texts)}
    for name in request.inputs:
        if name not in model.inputs_by_name:
            raise InvalidRequestError(name, f"model {model.name!r} takes {_names(model)}")
    for spec in model.inputs:
        if spec.name not in request.inputs and spec.name != POSITIONS:
            raise InvalidRequestError(spec.name, f"is missing; model {model.name!r} takes {_names(model)}")
    return request.inputs


def _with_positions(inputs: Mapping[str, Ragged], model: LoadedModel) -> Mapping[str, Ragged]:
    """The inputs, and for a model with positions those of rows counted from 0, where none are given."""
    if POSITIONS in inputs or POSITIONS not in model.inputs_by_name:
        return inputs
    lengths = inputs[model.inputs[0].name].lengths
    counted = [np.arange(length, dtype=np.int64) for length in lengths]
    rows = np.concatenate(counted) if counted else np.empty(0, np.int64)
    return {**inputs, POSITIONS: Ragged(rows, lengths)}


def _names(model: LoadedModel) -> str:
    return ", ".join(spec.name for spec in model.inputs)


def _check_rows(spec: TensorSpec, rows: Array, expected: int) -> None:
    """Number of rows, element type, width of a row and range of ids."""
    if len(rows) != expected:
        raise InvalidRequestError(spec.name, f"holds {len(rows)} rows; its lengths sum to {expected}")
    if rows.dtype != DTYPES[spec.data_type]:
        raise InvalidRequestError(spec.name, f"is {rows.dtype.name}; the model takes {spec.data_type}")
    width, wanted = rows.shape[1:], spec.axes[2:]
    if width != wanted:
        raise InvalidRequestError(
            spec.name, f"rows are {_shape(width)} wide; the model takes {_shape(wanted)}"
        )
    limit = spec.exclusive_upper_bound
    if limit is not None and rows.size:
        least, most = rows.min(), rows.max()
        if least < 0 or most >= limit:
            found = least if least < 0 else most
            raise InvalidRequestError(spec.name, f"holds id {found}; ids must lie in 0..{limit - 1}")


def _split(ragged: Ragged) -> list[Array]:
    """One view (T, ...) for each sequence."""
    if len(ragged.lengths) == 1:
        return [ragged.rows]
    ends = accumulate(ragged.lengths)
    return [ragged.rows[end - length : end] for end, length in zip(ends, ragged.lengths, strict=True)]


def _shape(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape)) or "1"


def _check_lengths(
    field: str, lengths: tuple[int, ...], limits: Limits, model_limit: int | None = None
) -> None:
    if len(lengths) > limits.max_sequences:
        raise _too_many_sequences(field, len(lengths), limits)
    if (longest := max(lengths)) > limits.max_sequence_length:
        raise LimitExceededError(
            field, f"a sequence has {longest} rows; the limit is {limits.max_sequence_length}"
        )
    if model_limit is not None and longest > model_limit:
        raise LimitExceededError(
            field, f"a sequence has {longest} rows; this model takes at most {model_limit}"
        )


def _too_many_sequences(field: str, count: int, limits: Limits) -> LimitExceededError:
    return LimitExceededError(field, f"{count} sequences in one request; the limit is {limits.max_sequences}")


def _dimensions(
    model: LoadedModel,
    rows: tuple[tuple[int, ...], ...],
    return_weights: bool,  # noqa: FBT001 - a cache's key
) -> tuple[list[Sizes], int]:
    """The sizes of each sequence, and the bytes of all results.

    Args:
        model: Whom the request asks.
        rows: For each of its inputs the rows of each sequence.
        return_weights: Whether the results hold them.
    """
    sizes = _bind_sizes(model.inputs, rows)
    return sizes, _result_bytes(model, sizes, return_weights=return_weights)


_known_dimensions = lru_cache(maxsize=CACHED_DIMENSIONS)(_dimensions)


def _bind_sizes(specs: Sequence[TensorSpec], rows: Sequence[tuple[int, ...]]) -> list[Sizes]:
    """The length of each symbolic axis for each sequence; inputs that share an axis must agree."""
    bound: dict[str, tuple[str, tuple[int, ...]]] = {}
    first, count = specs[0].name, len(rows[0])
    for spec, lengths in zip(specs, rows, strict=True):
        if not lengths:
            raise InvalidRequestError(spec.name, "holds no sequence")
        if len(lengths) != count:
            raise InvalidRequestError(spec.name, f"holds {len(lengths)} sequences; {first} holds {count}")
        if min(lengths) < 1:
            raise InvalidRequestError(spec.name, f"sequence {lengths.index(min(lengths))} has no rows")
        other, expected = bound.setdefault(str(spec.axes[1]), (spec.name, lengths))
        if lengths != expected:
            index = next(i for i in range(count) if lengths[i] != expected[i])
            raise InvalidRequestError(
                spec.name, f"sequence {index} has {lengths[index]} rows; {other} has {expected[index]}"
            )
    axes = list(bound)
    columns = [lengths for _, lengths in bound.values()]
    return [dict(zip(axes, sizes, strict=True)) for sizes in zip(*columns, strict=True)]


def _result_bytes(model: LoadedModel, sizes: list[Sizes], *, return_weights: bool) -> int:
    """Size of all outputs of all sequences."""
    kind = GraphKind.WEIGHTS if return_weights else GraphKind.PLAIN
    total = 0
    for spec in model.manifest.graphs[kind].outputs:
        fixed = DTYPES[spec.data_type].itemsize
        symbolic = []
        for axis in spec.axes:
            if isinstance(axis, int):
                fixed *= axis
            elif axis != BATCH_AXIS:
                symbolic.append(axis)
        total += fixed * sum(math.prod([size[axis] for axis in symbolic]) for size in sizes)
    return total


def _split_mask(mask: Mask | None, model: LoadedModel, sizes: list[Sizes]) -> list[NDArray[np.bool_] | None]:
    """One mask for each sequence, broadcastable to (H, Tq, Tk)."""
    if mask is None:
        return [None] * len(sizes)
    shapes = [_mask_shape(mask.kind, model, size) for size in sizes]
    counts = [math.prod(shape) for shape in shapes]
    if not mask.holds(sum(counts)):
        found = f"{mask.data.size} {'flags' if mask.data.dtype == np.bool_ else 'bytes'}"
        raise InvalidRequestError(
            MASK, f"holds {found}; {mask.kind} masks of these sequences hold {sum(counts)} flags"
        )
    parts: list[Array] = np.split(mask.flags(sum(counts)), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _mask_shape(kind: MaskKind, model: LoadedModel, size: Sizes) -> tuple[int, int, int]:
    *_, query_axis, key_axis = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes
    query_length, key_length = size[str(query_axis)], size[str(key_axis)]
    if kind is MaskKind.KEYS:
        return (1, 1, key_length)
    if kind is MaskKind.PAIRS:
        return (1, query_length, key_length)
    return (model.manifest.num_heads, query_length, key_length)
