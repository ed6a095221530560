"""What requests select of a model's outputs: heads, embeddings of spans, shortened and sparse embeddings.

A span is a part of a text or sequence. The whole text runs through the encoder before the vectors of a span's
tokens are pooled, so that each span is embedded in its context. Source: Günther et al., "Late Chunking:
Contextual Chunk Embeddings Using Long-Context Embedding Models" (2024). Shortened embeddings are the first
elements of each, as Matryoshka models are trained for. Source: Kusupati et al., "Matryoshka Representation
Learning" (2022), section 3.

Shapes: L layers, H heads, Tq and Tk query and key rows; n spans of one sequence, T tokens, d width of a token
vector.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from attention_serving.artifact.encoder import (
    CONTEXT_VECTORS,
    EMBEDDING,
    SPARSE_EMBEDDING,
    TOKEN_WEIGHTS,
    EncoderFacts,
    has_vectors,
    largest_weights,
    select_weights,
    shorten,
)
from attention_serving.artifact.manifest import GraphKind, TensorSpec
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.facts import HEADS, SPARSE
from attention_serving.server.engine.model import LoadedModel, output_bytes
from attention_serving.server.engine.requests.tokenizer import EncodedTexts
from attention_serving.server.engine.types import (
    SPARSE_INDICES,
    SPARSE_VALUES,
    Array,
    DecodedRequest,
    EncoderOutputs,
    HeadSelection,
    Ragged,
    SequencePlan,
)

LAYERS: Final = "head_selection.layers"
SELECTED_HEADS: Final = "head_selection.heads"
SPANS: Final = "spans"
DIMENSIONS: Final = "dimensions"
NORMALISED: Final = "normalised"
FLOAT_BYTES, SUM_BYTES = 4, 8
# What a selection of weights takes in relation to their output.
SELECTION_FACTOR = 8


def check_selection(
    decoded: DecodedRequest, model: LoadedModel, kind: GraphKind, plans: Sequence[SequencePlan], size: int
) -> tuple[int, int]:
    """Checks what a request selects; the size of its result, and the memory to make it, in bytes.

    Args:
        decoded: The request.
        model: Its model.
        kind: Its graph.
        plans: The plans of its sequences.
        size: The size of all outputs of its graph.

    Raises:
        InvalidRequestError: The model lacks a layer or head, or one is named twice; or its embeddings cannot
            be shortened to that number of elements; or a span of tokens does not lie within its sequence.
    """
    work = 0
    if decoded.dimensions:
        check_dimensions(decoded.dimensions, model)
    if (outputs := decoded.encoder_outputs) is not None:
        size = 0
        for spec in model.manifest.graphs[kind].outputs:
            sizes = [output_bytes(spec, plan.sizes) for plan in plans if spec.name in outputs.names]
            if spec.name in HEADS[SPARSE] and sizes:
                work = SELECTION_FACTOR * max(sizes)  # of one sequence at a time
                most = FLOAT_BYTES * outputs.most_weights
                sizes = [2 * min(full, most or full) for full in sizes]  # a weight, and as much for its id
            size += sum(sizes)
    if decoded.head_selection is not None and model.weights_output is not None:
        unselected = _unselected_heads(decoded.head_selection, model.weights_output, model.name)
        axes = model.weights_output.axes[-2:]
        for plan in plans:
            rows = [plan.sizes[axis] if isinstance(axis, str) else axis for axis in axes]
            size -= FLOAT_BYTES * unselected * math.prod(rows)
    if decoded.offsets is not None:
        size += decoded.offsets.rows.nbytes
    if decoded.spans is not None and (encoder := model.encoder) is not None:
        lengths = [plan.lengths[0] for plan in plans]
        check_spans(decoded.spans, lengths)
        size += FLOAT_BYTES * (len(decoded.spans.rows) - len(lengths)) * encoder.embedding_width
        # One sequence is pooled at a time, in double precision: see `_linear`.
        work += SUM_BYTES * (1 + max(lengths) + 2 * max(decoded.spans.lengths)) * encoder.width
    return size, work


def _unselected_heads(selection: HeadSelection, weights: TensorSpec, model: str) -> int:
    """Checks a selection; returns the number of heads of all layers that it leaves out."""
    *layers, heads = [int(axis) for axis in weights.axes[1:-2] or (1,)]
    if selection.layers and not layers:
        raise InvalidRequestError(LAYERS, f"must be empty: model {model!r} is not a text encoder")
    for field, indices, count in zip((LAYERS, SELECTED_HEADS), selection, (sum(layers), heads), strict=True):
        if wrong := [index for index in indices[: count + 1] if index >= count]:
            raise InvalidRequestError(field, f"contains {wrong[0]}; the model has 0 to {count - 1}")
        if len(indices) > count or len(set(indices)) < len(indices):
            raise InvalidRequestError(field, "names one of them twice")
    num_layers = sum(layers) or 1
    return num_layers * heads - (len(selection.layers) or num_layers) * (len(selection.heads) or heads)


def select(weights: Array, selection: HeadSelection) -> Array:
    """A copy of the selected weights.

    Args:
        weights: (L, H, Tq, Tk), or (H, Tq, Tk) or (Tq, Tk) of a model that is not a text encoder.
        selection: Layers and heads, in the order of the result.
    """
    *layers, heads = weights.shape[:-2] or (1,)
    weights = weights.reshape(*layers, heads, *weights.shape[-2:])
    chosen = [selection.layers or range(count) for count in layers]
    selected: Array = weights[np.ix_(*chosen, selection.heads or range(heads))]
    return selected


def check_dimensions(dimensions: int, model: LoadedModel) -> None:
    """Checks whether embeddings of a model can be shortened to a number of elements.

    Raises:
        InvalidRequestError: The model does not allow it.
    """
    if model.encoder is None:
        raise InvalidRequestError(DIMENSIONS, f"model {model.name!r} is not a text encoder")
    allowed = (*model.encoder.dimensions, model.encoder.embedding_width)
    if dimensions not in allowed:
        problem = f"is {dimensions}; model {model.name!r} allows {', '.join(map(str, allowed))}"
        raise InvalidRequestError(DIMENSIONS, problem)


def finish_embeddings(
    outputs: dict[str, list[Array]], dimensions: int, *, normalises: bool
) -> dict[str, list[Array]]:
    """The outputs of a request with its embeddings (..., d) cut to (..., dimensions), and then normalised."""
    if EMBEDDING not in outputs or not (dimensions or normalises):
        return outputs
    embeddings = [shorten(array, dimensions, normalises=normalises) for array in outputs[EMBEDDING]]
    return {**outputs, EMBEDDING: embeddings}


def token_spans(spans: Ragged, encoded: EncodedTexts) -> Ragged:
    """The tokens of each span of characters: from the first to the last that overlaps it.

    Args:
        spans: Start and end of each span (n, 2), in characters of its text.
        encoded: The texts, with offsets.

    Raises:
        InvalidRequestError: A span is empty or reversed, ends after its text, or has no tokens.
        LimitExceededError: A span is not within the characters to which its text was cut.
    """
    check_spans(spans, encoded.ends, encoded.starts, encoded.truncated)
    if encoded.offsets is None:
        raise ValueError("the texts were encoded without offsets")
    rows, first, token = np.empty_like(spans.rows), 0, 0
    for count, tokens in zip(spans.lengths, encoded.offsets.lengths, strict=True):
        window = slice(first, first + count)
        if count:
            rows[window] = _overlapping(spans.rows[window], encoded.offsets.rows[token : token + tokens])
        first, token = first + count, token + tokens
    (without,) = np.nonzero(rows[:, 0] == rows[:, 1])
    if without.size:
        raise InvalidRequestError(SPANS, f"{_name(spans, without[0], 'text')} does not overlap any token")
    return Ragged(rows, spans.lengths)


def check_spans(
    spans: Ragged, ends: Sequence[int], starts: Sequence[int] = (), truncated: Container[int] = ()
) -> None:
    """Checks that every span lies within its sequence.

    Args:
        spans: Start and end of each span (n, 2).
        ends: For each sequence, the exclusive upper bound of its spans.
        starts: For each text, the lower bound of its spans of characters; empty for spans of tokens.
        truncated: Indices of the sequences that were cut.

    Raises:
        InvalidRequestError: A span is empty or reversed, or ends after its sequence, or there are spans for
            more or fewer sequences.
        LimitExceededError: A span is not within that to which its sequence was cut.
    """
    unit, noun = ("character", "text") if starts else ("token", "sequence")
    if len(spans.lengths) != len(ends):
        raise InvalidRequestError(SPANS, f"are given for {len(spans.lengths)} {noun}s of {len(ends)}")
    begin, stop = spans.rows.T
    (wrong,) = np.nonzero(begin >= stop)
    if wrong.size:
        problem = f"{_name(spans, wrong[0], noun)} has no {unit}s; its start must be below its end"
        raise InvalidRequestError(SPANS, problem)
    bounds = np.repeat(np.array([starts or [0] * len(ends), ends], np.int64), spans.lengths, axis=1)
    (beyond,) = np.nonzero((begin < bounds[0]) | (stop > bounds[1]))
    if beyond.size:
        name, sequence = _name(spans, beyond[0], noun), _sequence(spans, beyond[0])
        if sequence in truncated:
            first, last = bounds[:, beyond[0]]
            problem = f"{name} is not within {unit}s {first} to {last}, to which the {noun} is cut"
            raise LimitExceededError(SPANS, problem)
        raise InvalidRequestError(SPANS, f"{name} ends beyond the {ends[sequence]} {unit}s of its {noun}")


def is_pooled(decoded: DecodedRequest, model: LoadedModel) -> bool:
    """Whether embeddings are pooled here: those of spans, and those before the model's own normalisation.

    Raises:
        InvalidRequestError: The model has no token vectors, or an embedding is more than they pooled.
    """
    encoder, name, has_spans = model.encoder, f"model {model.name!r}", decoded.spans is not None
    normalises = encoder is not None and encoder.normalised
    if not has_spans and (decoded.normalised is not False or not normalises):
        return False
    field, poolings = (SPANS, SPAN_POOLINGS) if has_spans else (NORMALISED, POOLINGS)
    if encoder is None or GraphKind.TOKENS not in model.manifest.graphs:
        raise InvalidRequestError(field, f"{name} is not a text encoder with token vectors")
    if encoder.late_interaction is not None:
        raise InvalidRequestError(field, f"{name} has token vectors of which embeddings are not pooled")
    for pooling in encoder.pooling:
        if pooling not in poolings:
            rule = f"spans need {' or '.join(poolings)}" if has_spans else "its embeddings are normalised"
            raise InvalidRequestError(field, f"{name} pools by {pooling}; {rule}")
    if model.manifest.config.get("dense"):
        raise InvalidRequestError(field, f"{name} has further layers after pooling, which take whole texts")
    return True


def select_outputs(
    outputs: Mapping[str, Array], options: EncoderOutputs, ids: Array, kind: str, encoder: EncoderFacts
) -> dict[str, Array]:
    """What a result has of the outputs of one text. What is large and not returned can be freed then.

    Args:
        outputs: The outputs of a graph, without padding.
        options: What the result has.
        ids: The token ids (T,).
        kind: The kind of the text.
        encoder: The model.
    """
    selected = {name: array for name, array in outputs.items() if name in options.names}
    if (sparse := encoder.sparse) is not None and selected.keys() & HEADS[SPARSE]:
        if TOKEN_WEIGHTS in selected:
            indices, weights = largest_weights(ids, selected.pop(TOKEN_WEIGHTS))
        else:
            row = selected.pop(SPARSE_EMBEDDING)
            (indices,) = np.nonzero(row)
            weights = row[indices]
        indices, weights = select_weights(indices, weights, sparse, options.most_weights)
        selected[SPARSE_INDICES], selected[SPARSE_VALUES] = indices.astype(np.uint32), weights
    if CONTEXT_VECTORS in selected and (late_interaction := encoder.late_interaction) is not None:
        is_kept = has_vectors(ids, late_interaction, kind)
        if not is_kept.all():
            selected[CONTEXT_VECTORS] = selected[CONTEXT_VECTORS][is_kept]
    return selected


def pool(rows: Array, spans: Array, encoder: EncoderFacts) -> Array:
    """One vector for each span, as the model pools a whole sequence, without its normalisation.

    Args:
        rows: Token vectors (T, d).
        spans: First and exclusive last token of each span (n, 2); none is empty.
        encoder: The model.

    Returns:
        float32 (n, d times the number of poolings). Equal spans have equal vectors, whatever the others are.
    """
    parts = [POOLINGS[name](rows, spans) for name in encoder.pooling]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _linear(weights: Callable[[int], Array], power: float, rows: Array, spans: Array) -> Array:
    """The weighted sum of each span's rows, over a power of the sum of their weights: (n, d).

    Sums of all first rows are computed once, so that time does not grow with the overlap of spans. They have
    double precision, because differences of two of them are taken.
    """
    count, width = rows.shape
    row_weights = weights(count)
    totals, sizes = np.zeros((count + 1, width)), np.zeros(count + 1)
    np.multiply(rows, row_weights[:, np.newaxis], out=totals[1:])
    np.add.accumulate(totals, axis=0, out=totals)
    np.add.accumulate(row_weights, out=sizes[1:])
    first, last = spans.T
    sums: Array = totals[last]
    sums -= totals[first]
    sums /= ((sizes[last] - sizes[first]) ** power)[:, np.newaxis]
    return sums.astype(np.float32)


def _largest(rows: Array, spans: Array) -> Array:
    """The largest of each span's elements: (n, d)."""
    return np.array([rows[first:last].max(axis=0) for first, last in spans], rows.dtype).reshape(
        -1, rows.shape[1]
    )


# As model.encoder.pooling. The weight of a weighted mean is the position in the whole sequence, from 1.
Pooling: TypeAlias = Callable[[Array, Array], Array]
SPAN_POOLINGS: Final[Mapping[str, Pooling]] = {
    "mean": partial(_linear, np.ones, 1),
    "mean_sqrt_length": partial(_linear, np.ones, 0.5),
    "weighted_mean": partial(_linear, lambda count: np.arange(1.0, count + 1), 1),
}
# Those of whole sequences.
POOLINGS: Final[Mapping[str, Pooling]] = {
    **SPAN_POOLINGS,
    "cls": lambda rows, spans: rows[spans[:, 0]],
    "last": lambda rows, spans: rows[spans[:, 1] - 1],
    "max": _largest,
}


def _overlapping(spans: Array, offsets: Array) -> Array:
    """The tokens (n, 2) that overlap spans (n, 2), of a text with offsets (T, 2); (0, 0) if none does."""
    (real,) = np.nonzero(offsets[:, 0] < offsets[:, 1])
    if not real.size:
        return np.zeros_like(spans)
    # Tokens come in the order of the text; those of characters that a normalizer has swapped almost do.
    starts, ends = np.maximum.accumulate(offsets[real], axis=0).T
    first = np.searchsorted(ends, spans[:, 0], side="right")
    after = np.searchsorted(starts, spans[:, 1], side="left")
    tokens = np.stack([real[np.minimum(first, real.size - 1)], real[np.maximum(after, 1) - 1] + 1], axis=1)
    return np.where((first < after)[:, np.newaxis], tokens, 0)


def _sequence(spans: Ragged, index: int) -> int:
    """The sequence that a span belongs to."""
    return int(np.searchsorted(np.cumsum(spans.lengths), index, side="right"))


def _name(spans: Ragged, index: int, noun: str) -> str:
    sequence = _sequence(spans, index)
    start, end = spans.rows[index].tolist()
    return f"span {index - sum(spans.lengths[:sequence])} of {noun} {sequence}, ({start}, {end}),"
