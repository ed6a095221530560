"""Turns a decoded request into a validated one, or says which field is wrong and why."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from attention_serving.artifact.manifest import POSITIONS, GraphKind, TensorSpec
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.dimensions import DTYPES, dimensions
from attention_serving.server.engine.requests.outputs import (
    SPANS,
    check_dimensions,
    check_pooling,
    check_selection,
    check_spans,
    left_out_bytes,
    result_bytes,
    sum_bytes,
)
from attention_serving.server.engine.requests.texts import encode_texts
from attention_serving.server.engine.requests.tokenizer import TEXT
from attention_serving.server.engine.requests.validated_request import (
    RequestForm,
    SequenceInputs,
    ValidatedRequest,
    split,
)
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged, Request, SequenceShape

MASK = "mask"
RETURN_WEIGHTS, HEAD_SELECTION = "return_weights", "head_selection"


def validate(request: Request, model: LoadedModel, limits: Limits) -> ValidatedRequest:
    """Checks a request against its model and the server's limits, and chooses its graph.

    Raises:
        InvalidRequestError: The request is wrong; names the field at fault.
        LimitExceededError: The request or its result would be too large.
    """
    graph = _choose_graph(request, model)
    if request.dimensions:
        check_dimensions(request.dimensions, model)
    if request.spans is not None:
        check_pooling(model)
    if request.head_selection is not None:
        check_selection(request.head_selection, model)
    texts = request.texts
    request = encode_texts(request, model, limits)
    inputs = _inputs(request, model)
    for spec in model.inputs:
        if spec.name in inputs:
            _check_lengths(spec, inputs[spec.name].lengths, limits, model)
    inputs = _with_positions(inputs, model)
    ragged = [inputs[spec.name] for spec in model.inputs]
    for spec, own in zip(model.inputs, ragged, strict=True):
        _check_rows(spec, own.rows, sum(own.lengths))
    lengths = tuple([own.lengths for own in ragged])
    shapes, size, largest = dimensions(model, lengths, graph)
    first = TEXT if texts else model.inputs[0].name
    if request.head_selection is not None:
        size -= left_out_bytes(request.head_selection, model, shapes)
    work = 0
    if request.spans is not None or request.offsets is not None:
        size, work = _with_spans(request, model, lengths[0], size)
    _check_result_bytes(size, _field_of_result(request, first), limits)
    _check_run_bytes(shapes[largest].run_bytes, largest, first, limits)
    rows = [split(own.rows, own.lengths) for own in ragged]
    masks = _split_mask(request.mask, model, shapes)
    spans = _split_spans(request, shapes)
    sequences = [
        SequenceInputs(
            dict(zip(model.inputs_by_name, arrays, strict=True)), mask, shape, own, request.head_selection
        )
        for shape, mask, own, *arrays in zip(shapes, masks, spans, *rows, strict=True)
    ]
    mask_bytes = sum([mask.nbytes for mask in masks if mask is not None]) if request.mask else 0
    form = RequestForm(
        graph=graph,
        lengths=lengths,
        shapes=tuple(shapes),
        input_bytes=sum([own.rows.nbytes for own in ragged]),
        held_bytes=mask_bytes + 2 * size + work,
        dimensions=request.dimensions,
    )
    return ValidatedRequest(form, model, tuple(sequences), request.deadline, request.caller)


def _choose_graph(request: Request, model: LoadedModel) -> GraphKind:
    """The cheapest graph that computes a sequence of the request. Modules may lack masks and weights."""
    graphs = model.manifest.graphs
    if request.mask is not None and GraphKind.MASK not in graphs:
        raise InvalidRequestError(MASK, f"model {model.name!r} does not take a mask")
    if request.head_selection is not None and not request.return_weights:
        raise InvalidRequestError(HEAD_SELECTION, "needs return_weights")
    if request.return_weights and GraphKind.WEIGHTS not in graphs:
        raise InvalidRequestError(RETURN_WEIGHTS, f"model {model.name!r} does not have attention weights")
    if request.return_weights:
        return GraphKind.WEIGHTS
    if (request.return_tokens or request.spans is not None) and GraphKind.TOKENS in graphs:
        return GraphKind.TOKENS
    return GraphKind.PLAIN if request.mask is None else GraphKind.MASK


def _inputs(request: Request, model: LoadedModel) -> Mapping[str, Ragged]:
    """The model's inputs by name."""
    for name in request.inputs:
        if name not in model.inputs_by_name:
            raise InvalidRequestError(
                name, f"is not an input; model {model.name!r} takes {model.input_names}"
            )
    for spec in model.inputs:
        if spec.name not in request.inputs and spec.name != POSITIONS:
            raise InvalidRequestError(
                spec.name, f"is missing; model {model.name!r} takes {model.input_names}"
            )
    return request.inputs


def _with_positions(inputs: Mapping[str, Ragged], model: LoadedModel) -> Mapping[str, Ragged]:
    """The inputs; `positions` count from 0 in each sequence if the model takes them and none were sent."""
    if POSITIONS in inputs or POSITIONS not in model.inputs_by_name:
        return inputs
    lengths = inputs[model.inputs[0].name].lengths
    counted = [np.arange(length, dtype=np.int64) for length in lengths]
    rows = np.concatenate(counted) if counted else np.empty(0, np.int64)
    return {**inputs, POSITIONS: Ragged(rows, lengths)}


def _check_rows(spec: TensorSpec, rows: Array, expected: int) -> None:
    """Checks the number of rows, their element type and width, and the range of ids."""
    if len(rows) != expected:
        raise InvalidRequestError(spec.name, f"contains {len(rows)} rows; its lengths sum to {expected}")
    if rows.dtype != DTYPES[spec.data_type]:
        raise InvalidRequestError(spec.name, f"is {rows.dtype.name}; the model takes {spec.data_type}")
    width, wanted = rows.shape[1:], spec.axes[2:]
    if width != wanted:
        raise InvalidRequestError(
            spec.name, f"rows are {_shape(width)} wide; the model takes {_shape(wanted)}"
        )
    if (bound := spec.exclusive_upper_bound) is not None and rows.size:
        least, most = rows.min(), rows.max()
        if least < 0 or most >= bound:
            found = least if least < 0 else most
            raise InvalidRequestError(
                spec.name, f"contains id {found}; ids must be between 0 and {bound - 1}"
            )


def _split_spans(request: Request, sequences: list[SequenceShape]) -> Sequence[Array | None]:
    """The spans (n, 2) of each sequence."""
    spans = request.spans
    return [None] * len(sequences) if spans is None else split(spans.rows, spans.lengths)


def _with_spans(request: Request, model: LoadedModel, lengths: tuple[int, ...], size: int) -> tuple[int, int]:
    """The size of the result with spans and offsets, and the memory that it takes to make it, in bytes."""
    if request.offsets is not None:
        size += request.offsets.rows.nbytes
    if request.spans is None or model.encoder is None:
        return size, 0
    check_spans(request.spans, lengths, unit="token", noun="sequence")
    return result_bytes(request.spans, lengths, model.encoder, size), sum_bytes(lengths, model.encoder)


def _field_of_result(request: Request, first: str) -> str:
    """The field that is at fault if the result is too large."""
    if request.return_weights:
        return RETURN_WEIGHTS
    return first if request.spans is None else SPANS


def _shape(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape)) or "1"


def _check_lengths(spec: TensorSpec, lengths: tuple[int, ...], limits: Limits, model: LoadedModel) -> None:
    """Checks how many sequences there are, and how long they are, before anything is made of them."""
    name, model_limit = spec.name, model.manifest.max_lengths.get(str(spec.axes[1]))
    limits.check_sequences(name, len(lengths))
    if (longest := max(lengths, default=0)) > limits.max_sequence_length:
        raise LimitExceededError(
            name, f"a sequence has {longest} rows; the limit is {limits.max_sequence_length}"
        )
    if model_limit is not None and longest > model_limit:
        raise LimitExceededError(
            name, f"a sequence has {longest} rows; this model takes at most {model_limit}"
        )


def _check_result_bytes(size: int, name: str, limits: Limits) -> None:
    if size > limits.max_result_bytes:
        raise LimitExceededError(
            name, f"the result would be {size} bytes; the limit is {limits.max_result_bytes}"
        )


def _check_run_bytes(size: int, index: int, name: str, limits: Limits) -> None:
    if size > limits.max_run_bytes:
        raise LimitExceededError(
            name,
            f"sequence {index} needs about {size} bytes of memory for its run; the limit is "
            f"{limits.max_run_bytes}; send shorter sequences or raise max_memory",
        )


def _split_mask(
    mask: Mask | None, model: LoadedModel, sequences: list[SequenceShape]
) -> list[NDArray[np.bool_] | None]:
    """One mask for each sequence, broadcastable to (H, Tq, Tk)."""
    if mask is None:
        return [None] * len(sequences)
    shapes = [_mask_shape(mask.kind, model, sequence.sizes) for sequence in sequences]
    counts = [math.prod(shape) for shape in shapes]
    if not mask.holds(sum(counts)):
        found = f"{mask.data.size} {'flags' if mask.data.dtype == np.bool_ else 'bytes of 8 flags each'}"
        raise InvalidRequestError(
            MASK, f"contains {found}; {mask.kind} masks of these sequences need {sum(counts)} flags"
        )
    parts: list[Array] = np.split(mask.flags(sum(counts)), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _mask_shape(kind: MaskKind, model: LoadedModel, size: Mapping[str, int]) -> tuple[int, int, int]:
    *_, query_axis, key_axis = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes
    query_length, key_length = size[str(query_axis)], size[str(key_axis)]
    if kind is MaskKind.KEYS:
        return (1, 1, key_length)
    if kind is MaskKind.PAIRS:
        return (1, query_length, key_length)
    return (model.manifest.num_heads, query_length, key_length)
