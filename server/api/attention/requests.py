"""Requests of attention.v1 as the engine's: inputs in fields of their own, or by name for any model."""

import math
from collections.abc import Mapping, Sequence, Set
from itertools import compress
from typing import Any

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, QUANTISED
from attention_serving.artifact.manifest import ATTENTION_MASK, BATCH_AXIS, POSITIONS, GraphKind
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.tensors import (
    FLOAT_DTYPE_BY_NAME,
    Allowance,
    Shape,
    build_mask,
    check_once,
    from_bytes,
)
from attention_serving.server.api.wire import Buffer, Parsed
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.facts import EMBEDS, HEADS, SPARSE, TOKEN_VECTORS
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import SPANS
from attention_serving.server.engine.requests.tokenizer import INLINE_MAX_BYTES, INLINE_MAX_TEXTS
from attention_serving.server.engine.types import (
    BITS_PER_BYTE,
    Array,
    DecodedRequest,
    EncoderOutputs,
    HeadSelection,
    Mask,
    MaskKind,
    Ragged,
)

# The fields that are extracted from requests.
PATHS = (
    "query.data", "key.data", "value.data", "inputs.data", "mask.bits", "text.texts", "text.pairs",
    "query.lengths", "key.lengths", "value.lengths", "token_ids.lengths", "embedding.spans.lengths",
    "token_ids.ids", "positions", "embedding.spans.starts", "embedding.spans.ends", "inputs.shapes",
)  # fmt: skip
PATHS_OF_TEXTS, PATHS_OF_IDS = ("text.texts", "text.pairs"), ("token_ids.ids", "token_ids.lengths")
CONTEXT_PATHS = (
    "key.data", "value.data", "mask.bits", "key.lengths", "value.lengths", "text.texts", "text.pairs",
)  # fmt: skip
# The types that models take, and that vectors are sent in, by name.
INPUT_DATATYPES = ("FP32", "FP16", "BF16", "INT64", "BOOL")
ENUM_BY_NAME = {name: pb.DataType.Value(f"DATA_TYPE_{name}") for name in (*INPUT_DATATYPES, *QUANTISED)}
NAME_BY_ENUM = {data_type: name for name, data_type in ENUM_BY_NAME.items()}
MASK_KINDS = {pb.AttentionMask.Kind.Value(f"KIND_{kind.name}"): kind for kind in MaskKind}
FIELDS_ALLOWED_WITH_INPUTS = frozenset(
    {"id", "model_name", "model_version", "output_data_type", "inputs", "output_names", "context_id"}
)
FIELDS_ALLOWED_WITH_SCORES = frozenset(
    {"id", "model_name", "model_version", "output_data_type", "text", "context_id"}
)
FIELDS_OF_DOCUMENTS = frozenset({"id", "model_name", "model_version", "ttl_seconds", "shared", "text"})
HEAD_NAMES = {EMBEDS: "dense embeddings", SPARSE: "sparse embeddings", TOKEN_VECTORS: "token vectors"}
# (B, T, d).
MAX_OUTPUT_AXES = 3
# No tensor of a model has more axes.
MAX_AXES = 32
UINT32, INT64 = np.dtype("<u4"), np.dtype("<i8")


def is_slow(parsed: Parsed[pb.AttendRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, many texts, or spans."""
    texts = [*parsed.contents("text", "texts"), *parsed.contents("text", "pairs")]
    is_long = len(texts) > INLINE_MAX_TEXTS or sum(map(len, texts)) > INLINE_MAX_BYTES
    return is_long or (bool(texts) and parsed.message.embedding.HasField(SPANS))


def output_type(message: pb.AttendRequest) -> str:
    """The type in which a request wants real numbers.

    Raises:
        InvalidRequestError: It is not a type of real numbers, nor one of dense embeddings.
    """
    data_type = message.output_data_type
    datatype = NAME_BY_ENUM.get(data_type, "") if data_type else "FP32"
    if datatype in QUANTISED and (message.return_weights or not message.HasField("embedding")):
        rule = f"{datatype} is for embeddings: the request must have `embedding`, and not return_weights"
        raise InvalidRequestError("output_data_type", rule)
    if datatype not in (*FLOAT_DTYPE_BY_NAME, *QUANTISED):
        rule = f"is {data_type}; must be one of {', '.join(FLOAT_DTYPE_BY_NAME)}"
        raise InvalidRequestError("output_data_type", rule)
    return datatype


def encoder_outputs(message: pb.AttendRequest, model: LoadedModel) -> EncoderOutputs | None:
    """What a request has of the heads of a text encoder: the token vectors if it asks for none of them.

    None for other models.

    Raises:
        InvalidRequestError: The model lacks a head, or attention weights are asked for too.
    """
    fields, encoder = requested_heads(message), model.encoder
    if encoder is None:
        for field in fields:
            raise InvalidRequestError(field, f"model {model.name!r} is not a text encoder")
        return None
    names = {ATTENTION_WEIGHTS} if message.return_weights else set[str]()
    for field in fields or [TOKEN_VECTORS]:
        if field not in model.heads:
            heads = " and ".join(f"{HEAD_NAMES[head]} ({head})" for head in model.heads)
            problem = f"model {model.name!r} has no {HEAD_NAMES[field]}; it has {heads}"
            raise InvalidRequestError(field, problem)
        # Without a field, token vectors are returned beside weights unless some of them are skipped.
        if message.return_weights and field != EMBEDS and (fields or encoder.late_interaction):
            raise InvalidRequestError("return_weights", f"cannot be combined with {field}; send embedding")
        names.update(HEADS[field])
    max_active = 0 if encoder.sparse is None else encoder.sparse.max_active
    return EncoderOutputs(frozenset(names), message.sparse.top_k or max_active)


def requested_heads(message: pb.AttendRequest) -> list[str]:
    """The heads that a request asks for, by their fields: see `HEADS`."""
    is_requested = (message.HasField("embedding"), message.HasField("sparse"), message.return_token_vectors)
    return list(compress(HEADS, is_requested))


def quantisation_range(
    model: LoadedModel, datatype: str, dimensions: int = 0, *, normalised: bool | None = None
) -> float:
    """The absolute value that the largest integer of quantised embeddings stands for; otherwise 1.

    Args:
        model: The model.
        datatype: The type of the embeddings.
        dimensions: Number of their elements; 0 for all.
        normalised: Whether they have length 1; None for what the model returns.

    Raises:
        InvalidRequestError: The model has none for them.
    """
    encoder = model.encoder
    if encoder is None or datatype not in ("INT8", "UINT8"):
        return 1.0
    is_normalised = encoder.normalised if normalised is None else normalised
    ranges = encoder.quantisation_ranges if is_normalised == encoder.normalised else {}
    if ranges or is_normalised:
        return ranges.get(dimensions or encoder.embedding_width, 1.0)
    problem = "embeddings before its normalisation have none" if encoder.normalised else "export it again"
    raise InvalidRequestError(
        "output_data_type", f"{datatype} needs a range of model {model.name!r}: {problem}"
    )


def check_first_output(model: LoadedModel) -> None:
    """Checks that the model's first output fits into the field `context_vectors` of a response.

    Raises:
        InvalidRequestError: It does not.
    """
    spec = model.outputs[model.default_outputs[0]]
    # Rows of one width: (B, T, d), or one row (B, d) or (B,) per sequence.
    is_rows = len(spec.axes) <= MAX_OUTPUT_AXES and not isinstance(spec.axes[-1], str)
    if not is_rows and spec.axes != (BATCH_AXIS,):
        shape = ", ".join(map(str, spec.axes))
        problem = (
            f"{spec.name} of model {model.name!r} has shape ({shape}), which is not a sequence of vectors"
        )
        advice = "send its inputs by name, as `inputs`, and its outputs come back by name"
        raise InvalidRequestError("model_name", f"{problem}; {advice}")


def map_fields_to_inputs(model: LoadedModel) -> dict[str, str]:
    """The model's input for each field of a request, if the names differ, as for non-attention modules."""
    if model.manifest.num_heads:
        return {}
    names = [spec.name for spec in model.inputs]
    return {**dict(zip(("query", "key", "value"), names, strict=False)), "token_ids": names[0]}


def decode(parsed: Parsed[Any], names: Mapping[str, str], allowance: Allowance) -> DecodedRequest:
    """Decodes an AttendRequest, without `encoder_outputs`. Its arrays share memory with the message.

    Args:
        parsed: The request.
        names: The result of `map_fields_to_inputs`.
        allowance: What the request may take.

    Raises:
        InvalidRequestError: The message contradicts itself, or states no data type.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    message = parsed.message
    if message.output_names:
        raise InvalidRequestError("output_names", "needs inputs, which name every input")
    inputs = _decode_inputs(parsed, allowance)
    text, embedding, heads = message.text, message.embedding, message.head_selection
    texts, second_texts = (parsed.contents("text", name) for name in ("texts", "pairs"))
    has_head_selection = message.HasField("head_selection")
    if message.HasField("text") and not texts:
        raise InvalidRequestError("text", "has no sequences; at least one is required")
    return DecodedRequest(
        inputs={names.get(name, name): ragged for name, ragged in inputs.items()},
        texts=tuple(texts),
        second_texts=tuple(second_texts),
        mask=decode_mask(parsed, allowance) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        head_selection=HeadSelection(tuple(heads.layers), tuple(heads.heads)) if has_head_selection else None,
        dimensions=embedding.dimensions,
        normalised=embedding.normalised if embedding.HasField("normalised") else None,
        spans=_decode_spans(parsed, allowance) if embedding.HasField(SPANS) else None,
        return_offsets=message.return_offsets,
        **text_options(text),
    )


def text_options(text: pb.TextSequences) -> dict[str, Any]:
    """How a request wants its texts to be tokenized, as attributes of a DecodedRequest.

    Raises:
        InvalidRequestError: The kind or the side is unknown.
    """
    return {
        "prompt": text.prompt if text.HasField("prompt") else None,
        "truncate": text.truncate if text.HasField("truncate") else None,
        "truncation_side": _choice("truncation_side", text.truncation_side, pb.TruncationSide) or None,
        "input_kind": _choice("input_kind", text.input_kind, pb.InputKind),
    }


def _choice(field: str, number: int, choices: Any) -> str:
    """The name of a member of an enum in lower case; empty if it is not set."""
    names = {value: name.removeprefix(f"{field}_".upper()).lower() for name, value in choices.items()}
    if number not in names:
        raise InvalidRequestError(field, f"is {number}; must be one of {', '.join([*names.values()][1:])}")
    return names[number] if number else ""


def _decode_inputs(parsed: Parsed[pb.AttendRequest], allowance: Allowance) -> dict[str, Ragged]:
    """The inputs by the names of their fields."""
    message, inputs = parsed.message, dict[str, Ragged]()
    if message.HasField("token_ids"):
        inputs["token_ids"] = decode_token_ids(parsed, allowance)
    for field in ("query", "key", "value"):
        if message.HasField(field):
            inputs[field] = decode_vectors(parsed, allowance, field)
    if (POSITIONS,) in parsed.byte_ranges:
        if not inputs:
            raise InvalidRequestError(POSITIONS, "need a query of vectors or token ids; the request has none")
        lengths = next(iter(inputs.values())).lengths
        rule = f"the query has {sum(lengths)} rows"
        inputs[POSITIONS] = _decode_integers(parsed, allowance, lengths, rule, POSITIONS)
    return inputs


def decode_token_ids(parsed: Parsed[Any], allowance: Allowance) -> Ragged:
    """The token ids of a request."""
    lengths = _decode_lengths(parsed, allowance.limits, "token_ids")
    rule = f"the lengths sum to {sum(lengths)}"
    return _decode_integers(parsed, allowance, lengths, rule, "token_ids", "ids")


def decode_rows(parsed: Parsed[Any], allowance: Allowance) -> tuple[dict[str, Array], Array]:
    """Decodes the rows (T, d) of a context: those of each input that no mask hides.

    Returns:
        The rows by name, and which of the rows that were sent are hidden (T,).

    Raises:
        InvalidRequestError: The message contradicts itself, or is not one sequence of keys and values.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    message = parsed.message
    names = filter(message.HasField, ("key", "value"))
    vectors = {name: decode_vectors(parsed, allowance, name) for name in names}
    if "key" not in vectors:
        raise InvalidRequestError("key", "is missing; a context consists of key rows")
    for name, ragged in vectors.items():
        if len(ragged.lengths) != 1 or ragged.lengths != vectors["key"].lengths:
            rule = "must be one sequence" if name == "key" else "must have as many rows as key"
            raise InvalidRequestError(name, f"has lengths {list(ragged.lengths[:9])}; {rule}")
    count = vectors["key"].lengths[0]
    hidden: Array = np.zeros(count, np.bool_)
    if message.HasField("mask"):
        mask = decode_mask(parsed, allowance)
        if mask.kind is not MaskKind.KEYS or not mask.holds(count):
            raise InvalidRequestError("mask", f"must be of kind keys, with a bit for each of {count} rows")
        hidden = ~mask.flags(count)
    rows = {name: ragged.rows[~hidden] if hidden.any() else ragged.rows for name, ragged in vectors.items()}
    return rows, hidden


def decode_vectors(parsed: Parsed[Any], allowance: Allowance, field: str) -> Ragged:
    """Rows of vectors. Their size is checked before anything is built, as that of any input."""
    message = getattr(parsed.message, field)
    if message.width == 0:
        raise InvalidRequestError(f"{field}.width", "must be at least 1")
    lengths = _decode_lengths(parsed, allowance.limits, field)
    shape, data = (sum(lengths), message.width), parsed.last(field, "data")
    return Ragged(_elements(field, message.data_type, data, shape, allowance), lengths)


def decode_mask(parsed: Parsed[Any], allowance: Allowance) -> Mask:
    """The mask, whose flags the request has to fit."""
    kind = parsed.message.mask.kind
    if kind not in MASK_KINDS:
        raise InvalidRequestError("mask.kind", f"is {kind}; must be one of {', '.join(MaskKind)}")
    bits = np.frombuffer(parsed.last("mask", "bits"), np.uint8)
    # A flag of a mask takes one byte. The unused bits of the last byte are not flags.
    allowance.check_bytes("mask.bits", (len(bits) - 1) * BITS_PER_BYTE)
    return Mask(MASK_KINDS[kind], bits)


def _decode_spans(parsed: Parsed[pb.AttendRequest], allowance: Allowance) -> Ragged:
    """Start and end of each span (n, 2)."""
    path = ("embedding", SPANS)
    lengths = _decode_lengths(parsed, allowance.limits, *path)
    bounds = []
    for noun in ("starts", "ends"):
        bounds.append(parsed.numbers(UINT32, *path, noun, is_fixed=True))
        if (count := len(bounds[-1])) != sum(lengths):
            raise InvalidRequestError(SPANS, f"have {count} {noun}; the lengths sum to {sum(lengths)}")
    allowance.take(SPANS, 2 * sum(lengths) * INT64.itemsize)
    return Ragged(np.stack([numbers.array() for numbers in bounds], axis=1, dtype=INT64), lengths)


def _decode_integers(
    parsed: Parsed[pb.AttendRequest], allowance: Allowance, lengths: tuple[int, ...], rule: str, *path: str
) -> Ragged:
    numbers, field, count = parsed.numbers(INT64, *path), ".".join(path), sum(lengths)
    if len(numbers) != count:
        raise InvalidRequestError(field, f"has {len(numbers)} {path[-1]}; {rule}")
    allowance.take(field, count * INT64.itemsize)
    return Ragged(numbers.array(), lengths)


def _decode_lengths(parsed: Parsed[Any], limits: Limits, *path: str) -> tuple[int, ...]:
    numbers = parsed.numbers(UINT32, *path, "lengths")
    limits.check_sequences(path[-1], len(numbers))
    return tuple(numbers.array().tolist())


def decode_named(
    parsed: Parsed[pb.AttendRequest], model: LoadedModel, outputs: Sequence[str], allowance: Allowance
) -> tuple[DecodedRequest, bool]:
    """Decodes a request that names its inputs. Its arrays share memory with the message where they can.

    Args:
        parsed: The request.
        model: The model that it names.
        outputs: The result of `output_names`.
        allowance: What the request may take.

    Returns:
        The request, and whether each input is one tensor that has the batch axis.

    Raises:
        InvalidRequestError: The message contradicts itself, or names what the model does not have.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    check_fields(parsed, FIELDS_ALLOWED_WITH_INPUTS, "inputs, which name every input")
    inputs = dict[str, tuple[list[Shape], Array]]()
    for index, tensors in enumerate(parsed.message.inputs):
        check_once(tensors.name, inputs)
        inputs[tensors.name] = _decode_tensors(tensors, index, parsed, allowance)
    takes_mask = GraphKind.MASK in model.manifest.graphs and ATTENTION_MASK not in model.inputs_by_name
    mask = inputs.pop(ATTENTION_MASK, None) if takes_mask else None
    rows, has_batch = dict[str, Ragged](), True
    for name, (shapes, array) in inputs.items():
        if name in model.axes_of_lengths:
            raise InvalidRequestError(name, "is for padded tensors; send each sequence without its padding")
        rank = len(model.input(name).axes) - 1
        has_batch &= len(shapes[0]) == rank + 1
        rows[name] = _ragged(name, shapes, array, rank, allowance.limits)
    decoded = DecodedRequest(
        inputs=rows,
        mask=None if mask is None else build_mask(*mask, model, rows, has_batch=has_batch),
        return_weights=ATTENTION_WEIGHTS in outputs and ATTENTION_WEIGHTS not in model.default_outputs,
        output_names=outputs,
    )
    return decoded, has_batch


def check_fields(parsed: Parsed[Any], allowed: Set[str], rule: str) -> None:
    """Refuses the first field of a request that is not allowed; the rule says beside what."""
    fields = {field.name for field, _ in parsed.message.ListFields()}
    for field in sorted({*fields, *(str(path[0]) for path in parsed.byte_ranges)} - allowed):
        raise InvalidRequestError(field, f"cannot be combined with {rule}")


def output_names(message: pb.AttendRequest, model: LoadedModel) -> Sequence[str]:
    """The outputs of a request that names its inputs.

    Raises:
        InvalidRequestError: The model has no such output, or it is requested twice.
    """
    names = list(message.output_names)
    for at, name in enumerate(names):
        if name not in model.outputs:
            outputs = ", ".join(model.outputs)
            raise InvalidRequestError("output_names", f"has {name!r}; must be one of {outputs}")
        if name in names[:at]:
            raise InvalidRequestError("output_names", f"has {name!r} twice; each must be requested once")
    return names or model.default_outputs


def _decode_tensors(
    tensors: pb.NamedTensors, index: int, parsed: Parsed[pb.AttendRequest], allowance: Allowance
) -> tuple[list[Shape], Array]:
    """The shape of each tensor of an input, given with its index, and the elements of all of them."""
    name, count = tensors.name, tensors.num_tensors
    if count < 1:
        raise InvalidRequestError(name, "contains 0 tensors; at least one is required")
    allowance.limits.check_sequences(name, count)
    packed = parsed.numbers(UINT32, "inputs", index, "shapes")
    rank, remainder = divmod(size := len(packed), count)
    if remainder or rank > MAX_AXES:
        message = f"has {size} sizes for {count} tensors; each has as many, {MAX_AXES} at most"
        raise InvalidRequestError(name, message)
    sizes = packed.array().tolist()
    if 0 in sizes:
        raise InvalidRequestError(name, f"tensor {sizes.index(0) // rank} has an axis without elements")
    shapes = [tuple(sizes[rank * at : rank * (at + 1)]) for at in range(count)]
    total, data = sum(map(math.prod, shapes)), parsed.last("inputs", index, "data")
    return shapes, _elements(name, tensors.data_type, data, (total,), allowance)


def _ragged(name: str, shapes: Sequence[Shape], elements: Array, rank: int, limits: Limits) -> Ragged:
    """Sequences (T, ...) of `rank` axes, given with a shape for each, or with one that has the batch axis."""
    if len(shapes) == 1 and len(shapes[0]) == rank + 1:
        ((batch, *sequence),) = shapes
        limits.check_sequences(name, batch)
        shapes = [tuple(sequence)] * batch
    if (axes := len(shapes[0])) != rank:
        message = f"has a tensor of {axes} axes; one sequence has {rank}, and one batch has {rank + 1}"
        raise InvalidRequestError(name, message)
    shapes = [shape or (1,) for shape in shapes]  # a scalar is one row
    width = shapes[0][1:]
    for index, shape in enumerate(shapes):
        if shape[1:] != width:
            message = f"sequence {index} has rows of shape {shape[1:]}; those of sequence 0 have {width}"
            raise InvalidRequestError(name, message)
    lengths = tuple([shape[0] for shape in shapes])
    return Ragged(elements.reshape(sum(lengths), *width), lengths)


def _elements(
    field: str, data_type: pb.DataType.ValueType, data: Buffer, shape: Shape, allowance: Allowance
) -> Array:
    """The elements of an input in the type that models take."""
    if (name := NAME_BY_ENUM.get(data_type, "")) not in INPUT_DATATYPES:
        message = f"is {data_type}; must be one of {', '.join(INPUT_DATATYPES)}"
        raise InvalidRequestError(f"{field}.data_type", message)
    return from_bytes(f"{field}.data", data, name, shape, allowance)
