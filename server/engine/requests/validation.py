"""Turns a decoded request into a validated one, or says which field is wrong and why.

Texts become token ids first, with `tokenize_texts`, within the limits of the server and the model.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_serving.artifact.encoder import NO_QUERY, PairTemplate
from attention_serving.artifact.manifest import TOKEN_TYPES, GraphKind, TensorSpec
from attention_serving.server.engine.budget import Reservation
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.facts import HEADS, SPARSE
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import SPANS, check_selection, is_pooled, token_spans
from attention_serving.server.engine.requests.request import Plan, Request, split
from attention_serving.server.engine.requests.tokenizer import TEXT, EncodedTexts, TextLimits
from attention_serving.server.engine.types import Array, DecodedRequest, Mask, MaskKind, Ragged, SequencePlan

MASK, OUTPUTS = "mask", "outputs"
RETURN_WEIGHTS, HEAD_SELECTION = "return_weights", "head_selection"
PAIRS, PROMPT, TRUNCATE, RETURN_OFFSETS = "pairs", "prompt", "truncate", "return_offsets"
# By kind of input, the names of its prompts if it is not the name of the kind, in the order in which
# `encode_document` of sentence-transformers looks for them.
INPUT_KIND, PROMPT_NAMES = "input_kind", {"document": ("document", "passage", "corpus")}
QUERY, DOCUMENT = "query", "document"
TOKEN_BYTES, OFFSET_BYTES = 8, 8


def validate(decoded: DecodedRequest, model: LoadedModel, limits: Limits) -> Request:
    """Checks a request without texts against its model and the server's limits, and chooses its graph.

    Raises:
        InvalidRequestError: The request is wrong; names the field at fault.
        LimitExceededError: The request or its result would be too large.
    """
    pools, encoder, options = is_pooled(decoded, model), model.encoder, decoded.encoder_outputs
    names = decoded.output_names if options is None else options.names
    kind = _choose_graph(decoded, model, names, pools=pools)
    if options is None:
        _check_output_names(names, model, kind)
    plans = [model.plan(kind, sizes) for sizes in _check_sequence_lengths(decoded, model, limits)]
    rows, lengths = dict[str, Array](), list[tuple[int, ...]]()
    for spec in model.inputs:
        ragged = _rows(spec, decoded, model)
        rows[spec.name] = ragged.rows
        lengths.append(ragged.lengths)
    if pools and decoded.spans is None:
        spans_of_all = np.array([(0, plan.lengths[0]) for plan in plans], np.int64)
        decoded.spans = Ragged(spans_of_all, (1,) * len(plans))
    result_bytes, work_bytes = sum(map(attrgetter("result_bytes"), plans)), 0
    selects = options is not None and options.names != model.output_names[kind]
    if selects or decoded.dimensions or decoded.head_selection or decoded.spans or decoded.offsets:
        result_bytes, work_bytes = check_selection(decoded, model, kind, plans, result_bytes)
    if result_bytes > (most_bytes := decoded.max_result_bytes or limits.max_result_bytes):
        field = model.inputs[0].name if decoded.spans is None else SPANS
        field = RETURN_WEIGHTS if decoded.return_weights else field
        problem = f"the result would be {result_bytes} bytes; the limit is {most_bytes}"
        if options is not None and options.names.intersection(HEADS[SPARSE]):
            field, problem = SPARSE, f"{problem}; send fewer texts, or a top_k"
        raise LimitExceededError(field, problem)
    largest = max(plans, key=attrgetter("run_bytes"))
    if (size := largest.run_bytes) > limits.max_run_bytes:
        problem = f"sequence {plans.index(largest)} needs about {size} bytes of memory for its run"
        advice = f"the limit is {limits.max_run_bytes}; send shorter sequences or raise max_memory"
        raise LimitExceededError(model.inputs[0].name, f"{problem}; {advice}")
    masks = [] if decoded.mask is None else _split_mask(decoded.mask, model, plans)
    plan = Plan(
        graph=kind,
        lengths=tuple(lengths),
        sequences=tuple(plans),
        required_bytes=sum(map(attrgetter("nbytes"), masks)) + 2 * result_bytes + work_bytes,
        dimensions=decoded.dimensions,
        normalises=encoder is not None
        and (encoder.normalised if decoded.normalised is None else decoded.normalised)
        and (pools or bool(decoded.dimensions) or not encoder.normalised),
    )
    validated = plan.make_request(model, rows, decoded.deadline, decoded.caller)
    spans = [] if decoded.spans is None else split(decoded.spans.rows, decoded.spans.lengths)
    for sequence, mask, item, text_kind in zip_longest(validated.sequences, masks, spans, decoded.kinds):
        sequence.mask, sequence.spans, sequence.head_selection = mask, item, decoded.head_selection
        sequence.encoder_outputs, sequence.kind = options, text_kind or decoded.input_kind
    return validated


def tokenize_texts(
    decoded: DecodedRequest, model: LoadedModel, limits: Limits, reservation: Reservation | None = None
) -> DecodedRequest:
    """The request with token ids in place of its texts; the same request if it does not contain texts.

    Args:
        decoded: A decoded request.
        model: The requested model.
        limits: The server's limits, which hold while the texts are tokenized.
        reservation: Receives the memory of the token ids and offsets before they are made.

    Raises:
        InvalidRequestError: The model does not take the texts, or a span is not a part of one.
        LimitExceededError: There are too many texts, or they are too long.
        DeadlineExceededError: The deadline passed before all texts were tokenized.
        OverloadedError: The memory of the token ids is not available.
    """
    if not decoded.texts:
        text_options = {
            PAIRS: decoded.second_texts,
            PROMPT: decoded.prompt is not None,
            INPUT_KIND: decoded.input_kind,
            TRUNCATE: decoded.truncate is not None,
            RETURN_OFFSETS: decoded.return_offsets,
        }
        for field, is_set in text_options.items():
            if is_set:
                raise InvalidRequestError(field, "needs text; the request has none")
        return decoded
    if decoded.inputs:
        problem = f"cannot be combined with {', '.join(decoded.inputs)}; send one of them"
        raise InvalidRequestError(TEXT, problem)
    offsets, types = decoded.return_offsets or decoded.spans is not None, model.takes_token_types
    token_bytes = TOKEN_BYTES * (1 + types) + (OFFSET_BYTES if offsets else 0)
    bounds = text_limits(model, limits, decoded.input_kind)
    encoded = encode_texts(
        decoded, model, limits, reservation, bounds, token_bytes, offsets=offsets, types=types
    )
    inputs = {model.inputs[0].name: encoded.ids}
    if encoded.types is not None:
        inputs[TOKEN_TYPES] = encoded.types
    return dataclasses.replace(
        decoded,
        texts=(),
        second_texts=(),
        inputs=inputs,
        truncated=encoded.truncated,
        spans=None if decoded.spans is None else token_spans(decoded.spans, encoded),
        offsets=encoded.offsets if decoded.return_offsets else None,
    )


def encode_texts(
    decoded: DecodedRequest,
    model: LoadedModel,
    limits: Limits,
    reservation: Reservation | None,
    bounds: TextLimits,
    token_bytes: int,
    **options: bool,
) -> EncodedTexts:
    """The token ids of the texts of a request. Other arguments, and errors, are those of `tokenize_texts`.

    Args:
        decoded: The request.
        model: Its model.
        limits: The server's limits.
        reservation: Receives the memory of the result.
        bounds: Bounds of the texts.
        token_bytes: Memory that each token of the result takes.
        options: Passed on to `TextTokenizer.encode`.
    """
    texts, second_texts = decoded.texts, decoded.second_texts
    facts, prefix = model.encoder or model.classifier, _prompt(decoded, model)
    template = _template(decoded, model)
    limits.check_sequences(TEXT, len(texts))
    if second_texts:
        _check_second_texts(decoded, model)
    query = model.encoder.query if model.encoder and decoded.input_kind == QUERY else NO_QUERY
    if reservation is not None:
        added = prefix if template is None else template.render("", "")
        characters = sum(map(len, (*texts, *second_texts))) + len(added.encode()) * len(texts)
        expansion = query.expanded_length * len(texts)
        reservation.add(token_bytes * min(bounds.tokens, characters + expansion))
    truncates = facts is not None and facts.truncates if decoded.truncate is None else decoded.truncate
    cut = decoded.truncation_side or model.manifest.truncation_side
    return model.text_tokenizer.encode(
        texts,
        bounds,
        decoded.deadline,
        second_texts=second_texts,
        template=template,
        prefix=prefix,
        cut=cut if truncates else None,
        query=query,
        **options,
    )


def _check_second_texts(decoded: DecodedRequest, model: LoadedModel) -> None:
    """Refuses second texts that the model does not take, or that are not one for each text."""
    if model.classifier is None:
        problem = f"model {model.name!r} is not a text classifier or multi-vector encoder"
        raise InvalidRequestError(PAIRS, f"{problem}, and takes no pairs here")
    if len(decoded.second_texts) != len(decoded.texts):
        problem = f"has {len(decoded.second_texts)} second texts; the request has {len(decoded.texts)} texts"
        raise InvalidRequestError(PAIRS, problem)
    if decoded.return_offsets:
        raise InvalidRequestError(RETURN_OFFSETS, "needs single texts; the request has pairs")


def _template(decoded: DecodedRequest, model: LoadedModel) -> PairTemplate | None:
    """The template of the pairs of a request, whose prompt the model has; None without one."""
    facts = model.classifier
    if facts is None or not facts.templates:
        return None
    if not decoded.second_texts:
        raise InvalidRequestError(PAIRS, f"is missing; model {model.name!r} scores pairs of texts only")
    return facts.templates[facts.default_prompt if decoded.prompt is None else decoded.prompt]


def _prompt(decoded: DecodedRequest, model: LoadedModel) -> str:
    """The text that is put before each text of a request."""
    facts = model.encoder or model.classifier
    prompts, default = (facts.prompts, facts.default_prompt) if facts else ({}, "")
    name = default if decoded.prompt is None else decoded.prompt
    if decoded.input_kind:
        if decoded.prompt is not None:
            raise InvalidRequestError(INPUT_KIND, "cannot be combined with prompt; send one of them")
        names = {prompt.lower(): prompt for prompt in prompts} | {prompt: prompt for prompt in prompts}
        kinds = PROMPT_NAMES.get(decoded.input_kind, (decoded.input_kind,))
        name = next((names[kind] for kind in kinds if kind in names), default)
    if name and name not in prompts:
        advice = f"must be one of {', '.join(prompts)}" if prompts else f"model {model.name!r} has no prompts"
        raise InvalidRequestError(PROMPT, f"is {name[:100]!r}; {advice}")
    return prompts[name] if name else ""


def text_limits(model: LoadedModel, limits: Limits, kind: str = "") -> TextLimits:
    """Bounds of texts of a kind whose token ids and results are within the limits."""
    bytes_of_one, bytes_of_two = (
        model.plan(GraphKind.PLAIN, model.lengths(rows)).result_bytes for rows in (1, 2)
    )
    tokens = limits.max_input_bytes // (TOKEN_BYTES * (1 + model.takes_token_types))
    if row_bytes := bytes_of_two - bytes_of_one:  # of outputs with a row for each token
        tokens = min(tokens, limits.max_result_bytes // row_bytes)
    most = model.manifest.max_lengths.get(model.axes[0], limits.max_sequence_length)
    # Other kinds choose a prompt only.
    token_limits: Mapping[Any, int] = model.encoder.token_limits if model.encoder else {}
    most = token_limits.get(kind if kind in (QUERY, DOCUMENT) else "", most)
    return TextLimits(limits.max_text_bytes, min(most, limits.max_sequence_length), tokens)


def _choose_graph(
    decoded: DecodedRequest, model: LoadedModel, names: Collection[str], *, pools: bool
) -> GraphKind:
    """The cheapest graph that computes a sequence of the request. Modules may lack masks and weights."""
    graphs = model.manifest.graphs
    if decoded.mask is not None and GraphKind.MASK not in graphs:
        raise InvalidRequestError(MASK, f"model {model.name!r} does not take a mask")
    if decoded.head_selection is not None and not decoded.return_weights:
        raise InvalidRequestError(HEAD_SELECTION, "needs return_weights")
    if decoded.return_weights and model.weights_output is None:
        problem = f"model {model.name!r} does not have attention weights: none of its outputs "
        shapes = f"({', '.join(model.outputs)}) is (B, H, Tq, Tk) or (B, Tq, Tk) with rows that sum to 1"
        raise InvalidRequestError(RETURN_WEIGHTS, problem + shapes)
    if decoded.return_weights and GraphKind.WEIGHTS in graphs:
        return GraphKind.WEIGHTS
    if decoded.input_kind == QUERY and GraphKind.QUERY in graphs:
        return GraphKind.QUERY
    if GraphKind.TOKENS in graphs:
        plain, tokens = model.output_names[GraphKind.PLAIN], model.output_names[GraphKind.TOKENS]
        if pools or not plain.issuperset(tokens.intersection(names)):
            return GraphKind.TOKENS
    return GraphKind.PLAIN if decoded.mask is None else GraphKind.MASK


def _check_output_names(names: Collection[str], model: LoadedModel, kind: GraphKind) -> None:
    """Refuses outputs that no graph has together, or that texts of this kind do not have."""
    outputs = [spec.name for spec in model.manifest.graphs[kind].outputs]
    if absent := [name for name in names if name in model.outputs and name not in outputs]:
        problem = f"has {', '.join(absent)}, which this request cannot have; it can have {', '.join(outputs)}"
        raise InvalidRequestError(OUTPUTS, problem)


def _check_sequence_lengths(
    decoded: DecodedRequest, model: LoadedModel, limits: Limits
) -> list[tuple[int, ...]]:
    """The length of each sequence on each of the model's axes, on which its inputs must agree.

    Lengths are checked before anything is made of them.
    """
    inputs = decoded.inputs
    for name in inputs:
        model.input(name)
    bound: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, spec in model.inputs_by_name.items():
        if name not in inputs:
            if name in model.optional_inputs:
                continue
            raise InvalidRequestError(name, f"is missing; model {model.name!r} takes {model.input_list}")
        row_counts = inputs[name].lengths
        if not decoded.kinds:  # otherwise pairs were counted
            limits.check_sequences(name, len(row_counts))
        _check_lengths(name, row_counts, spec, model, limits)
        other, expected = bound.setdefault(str(spec.length_axis), (name, row_counts))
        if row_counts != expected and len(row_counts) == len(expected):
            at = next(at for at, length in enumerate(row_counts) if length != expected[at])
            problem = f"sequence {at} has {row_counts[at]} rows; {other} has {expected[at]}"
            raise InvalidRequestError(name, problem)
        first, lengths = next(iter(bound.values()))
        if len(row_counts) != len(lengths):
            problem = f"contains {len(row_counts)} sequences; {first} contains {len(lengths)}"
            raise InvalidRequestError(name, problem)
    return list(zip(*[row_counts for _, row_counts in bound.values()], strict=True))


def _check_lengths(
    name: str, lengths: tuple[int, ...], spec: TensorSpec, model: LoadedModel, limits: Limits
) -> None:
    if not lengths:
        raise InvalidRequestError(name, "does not contain any sequence")
    shortest, longest, axis = min(lengths), max(lengths), spec.length_axis
    if isinstance(axis, int):
        if (wrong := shortest if shortest < axis else longest) != axis:
            size = f"the model takes {_width(spec.axes[1:])} in each"
            raise InvalidRequestError(name, f"sequence {lengths.index(wrong)} has {wrong} rows; {size}")
        return
    if shortest < 1:
        raise InvalidRequestError(name, f"sequence {lengths.index(shortest)} is empty")
    if longest > (limit := limits.max_sequence_length):
        raise LimitExceededError(name, f"a sequence has {longest} rows; the limit is {limit}")
    if longest > (most := model.manifest.max_lengths.get(axis, longest)):
        raise LimitExceededError(name, f"a sequence has {longest} rows; this model takes at most {most}")
    if shortest < (least := model.manifest.min_lengths.get(axis, 1)):
        raise LimitExceededError(name, f"a sequence has {shortest} rows; this model takes at least {least}")
    step = model.manifest.length_multiples.get(axis, 1)
    if odd := next((length for length in lengths if length % step), None):
        raise LimitExceededError(name, f"a sequence has {odd} rows; this model takes multiples of {step}")


def _rows(spec: TensorSpec, decoded: DecodedRequest, model: LoadedModel) -> Ragged:
    """An input with the right number of rows, their element type and width, and the range of ids.

    `positions` count from 0 in each sequence if none were sent, and token types are 0.
    """
    name, sent = spec.name, decoded.inputs.get(spec.name)
    if sent is None:
        lengths = decoded.inputs[model.inputs[0].name].lengths
        if name == TOKEN_TYPES:
            return Ragged(np.zeros(sum(lengths), np.int64), lengths)
        starts = map(model.first_position, lengths)
        positions = [
            np.arange(length, dtype=np.int64) + at for length, at in zip(lengths, starts, strict=True)
        ]
        return Ragged(np.concatenate(positions), lengths)
    rows, expected = sent.rows, sum(sent.lengths)
    if len(rows) != expected:
        raise InvalidRequestError(name, f"contains {len(rows)} rows; its lengths sum to {expected}")
    if rows.dtype != spec.data_type:
        raise InvalidRequestError(name, f"is {rows.dtype.name}; the model takes {spec.data_type}")
    width, expected_width = rows.shape[1:], spec.axes[2:]
    if width != expected_width:
        problem = f"rows are {_width(width)} wide; the model takes {_width(expected_width)}"
        raise InvalidRequestError(name, problem)
    if model.manifest.refuses_nan and spec.data_type == "float32" and np.isnan(rows.min()):
        raise InvalidRequestError(name, "contains NaN, which this model does not carry to its results")
    if (bound := spec.exclusive_upper_bound) is not None:
        _check_ids(name, rows, bound)
    return sent


def _check_ids(name: str, ids: Array, bound: int | tuple[int, ...]) -> None:
    """Checks the range of ids, which differs between the columns of (B, F) if there are several bounds."""
    columns = ids.reshape(-1, *np.shape(bound))
    least, most = columns.min(axis=0), columns.max(axis=0)
    if not np.any((least < 0) | (most >= bound)):
        return
    for low, high, limit in zip(*np.atleast_1d(least, most, bound), strict=True):
        if low < 0 or high >= limit:
            wrong = low if low < 0 else high
            raise InvalidRequestError(name, f"contains id {wrong}; ids must be between 0 and {limit - 1}")


def _width(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape)) or "1"


def _split_mask(mask: Mask, model: LoadedModel, sequences: list[SequencePlan]) -> list[NDArray[np.bool_]]:
    """One mask for each sequence, broadcastable to (H, Tq, Tk)."""
    heads = model.manifest.num_heads if mask.kind is MaskKind.HEADS else 1
    query, key = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes[2:]
    shapes = []
    for sequence in sequences:
        rows = 1 if mask.kind is MaskKind.KEYS else sequence.sizes[str(query)]
        # The key axis of a model that attends to a context is a number.
        shapes.append((heads, rows, key if isinstance(key, int) else sequence.sizes[key]))
    counts = [math.prod(shape) for shape in shapes]
    if not mask.holds(sum(counts)):
        size = f"{mask.data.size} {'flags' if mask.data.dtype == np.bool_ else 'bytes of 8 flags each'}"
        problem = f"contains {size}; {mask.kind} masks of these sequences need {sum(counts)} flags"
        raise InvalidRequestError(MASK, problem)
    parts: list[Array] = np.split(mask.flags(sum(counts)), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
