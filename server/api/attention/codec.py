"""Requests of attention.v1 as the engine's, and results as its replies, but for inputs by name."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS, EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, POSITIONS
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api.protobuf_bytes import Parsed, head
from attention_serving.server.api.tensors import (
    FLOATS,
    Allowance,
    Output,
    Piece,
    Shape,
    datatype_of,
    from_bytes,
)
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import SPANS
from attention_serving.server.engine.requests.tokenizer import INLINE_MAX_BYTES, INLINE_MAX_TEXTS
from attention_serving.server.engine.types import (
    BITS_PER_BYTE,
    Array,
    DecodedRequest,
    HeadSelection,
    Mask,
    MaskKind,
    Ragged,
    Result,
)

# The fields that are cut out of requests.
PATHS = (
    "query.data", "key.data", "value.data", "inputs.data", "mask.bits", "text.texts", "text.pairs",
    "query.lengths", "key.lengths", "value.lengths", "token_ids.lengths", "embedding.spans.lengths",
    "token_ids.ids", "positions", "embedding.spans.starts", "embedding.spans.ends", "inputs.shapes",
)  # fmt: skip
# The types that models take, and that vectors are sent in, by name.
DATA_TYPES = {
    name: pb.DataType.Value(f"DATA_TYPE_{name}") for name in ("FP32", "FP16", "BF16", "INT64", "BOOL")
}
NAMES = {data_type: name for name, data_type in DATA_TYPES.items()}
MASK_KINDS = {pb.AttentionMask.Kind.Value(f"KIND_{kind.name}"): kind for kind in MaskKind}
CONTEXT_DATA = (pb.AttendResponse.CONTEXT_VECTORS_FIELD_NUMBER, pb.VectorSequences.DATA_FIELD_NUMBER)
WEIGHTS_DATA = (pb.AttendResponse.ATTENTION_WEIGHTS_FIELD_NUMBER, pb.AttentionWeights.DATA_FIELD_NUMBER)
OFFSET_STARTS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.STARTS_FIELD_NUMBER)
OFFSET_ENDS = (pb.AttendResponse.TOKEN_OFFSETS_FIELD_NUMBER, pb.Spans.ENDS_FIELD_NUMBER)
# (B, T, d).
MAX_OUTPUT_AXES = 3

UINT32, INT64 = np.dtype("<u4"), np.dtype("<i8")


def input_names(model: LoadedModel) -> dict[str, str]:
    """The model's input for each field of a request, if the names differ, as for non-attention modules.

    Raises:
        InvalidRequestError: attention.v1 cannot carry the model's first output.
    """
    spec = model.outputs[model.default_outputs[0]]
    # Rows of one width: (B, T, d), or one row (B, d) or (B,) per sequence.
    is_rows = len(spec.axes) <= MAX_OUTPUT_AXES and not isinstance(spec.axes[-1], str)
    if not is_rows and spec.axes != (BATCH_AXIS,):
        shape = ", ".join(map(str, spec.axes))
        raise InvalidRequestError(
            "model_name",
            f"{spec.name} of model {model.name!r} has shape ({shape}), which is not a sequence of vectors; "
            "send its inputs by name, as `inputs`, and its outputs come back by name",
        )
    if model.manifest.num_heads:
        return {}
    names = [spec.name for spec in model.inputs]
    return {**dict(zip(("query", "key", "value"), names, strict=False)), "token_ids": names[0]}


def is_slow(parsed: Parsed[pb.AttendRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, many texts, or spans."""
    texts = [*parsed.contents("text", "texts"), *parsed.contents("text", "pairs")]
    is_long = len(texts) > INLINE_MAX_TEXTS or sum(map(len, texts)) > INLINE_MAX_BYTES
    return is_long or (bool(texts) and parsed.message.embedding.HasField(SPANS))


def decode(
    parsed: Parsed[pb.AttendRequest], names: Mapping[str, str], deadline: float, allowance: Allowance
) -> DecodedRequest:
    """Decodes a request. Its arrays share memory with the message where they can.

    Args:
        parsed: The request.
        names: The result of `input_names`.
        deadline: On `time.monotonic`'s clock.
        allowance: What the request may take.

    Raises:
        InvalidRequestError: The message contradicts itself, or states no data type.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    message, decoder = parsed.message, Decoder(parsed, allowance)
    if message.output_names:
        raise InvalidRequestError("output_names", "needs inputs, which name every input")
    inputs = {}
    if message.HasField("token_ids"):
        inputs["token_ids"] = decoder.tokens()
    for field in ("query", "key", "value"):
        if message.HasField(field):
            inputs[field] = decoder.vectors(field, getattr(message, field))
    if (POSITIONS,) in parsed.places:
        inputs[POSITIONS] = decoder.positions(next(iter(inputs.values()), None))
    text, embedding, heads = message.text, message.embedding, message.head_selection
    texts, pairs = (parsed.contents("text", name) for name in ("texts", "pairs"))
    has_heads = message.HasField("head_selection")
    if message.HasField("text") and not texts:
        raise InvalidRequestError("text", "has no sequences; at least one is required")
    return DecodedRequest(
        inputs={names.get(name, name): ragged for name, ragged in inputs.items()},
        texts=tuple(texts),
        pairs=tuple(pairs),
        mask=decoder.mask(message.mask.kind) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        head_selection=HeadSelection(tuple(heads.layers), tuple(heads.heads)) if has_heads else None,
        return_tokens=not message.HasField("embedding"),
        dimensions=embedding.dimensions,
        spans=decoder.spans() if embedding.HasField(SPANS) else None,
        return_offsets=message.return_offsets,
        prompt=text.prompt if text.HasField("prompt") else None,
        truncate=text.truncate if text.HasField("truncate") else None,
        deadline=deadline,
    )


def elements(
    field: str, data_type: pb.DataType.ValueType, data: bytes | memoryview, shape: Shape, allowance: Allowance
) -> Array:
    """The elements of an input in the type that models take.

    Raises:
        InvalidRequestError: The type is unknown, or the bytes do not fit the shape or are not of that type.
        LimitExceededError: The input would be too large.
        OverloadedError: The memory of its copy is not available.
    """
    if data_type not in NAMES:
        message = f"is {data_type}; must be one of {', '.join(DATA_TYPES)}"
        raise InvalidRequestError(f"{field}.data_type", message)
    return from_bytes(f"{field}.data", data, NAMES[data_type], shape, allowance)


class Decoder(NamedTuple):
    """Decodes the inputs of one request. Their sizes are checked before anything is built."""

    parsed: Parsed[pb.AttendRequest]
    allowance: Allowance

    def vectors(self, field: str, message: pb.VectorSequences) -> Ragged:
        """Rows of vectors."""
        if message.width == 0:
            raise InvalidRequestError(f"{field}.width", "must be at least 1")
        lengths = self._lengths(field)
        shape, data = (sum(lengths), message.width), self.parsed.last(field, "data")
        return Ragged(elements(field, message.data_type, data, shape, self.allowance), lengths)

    def tokens(self) -> Ragged:
        """Token ids."""
        lengths = self._lengths("token_ids")
        return self._integers(("token_ids", "ids"), lengths, f"the lengths sum to {sum(lengths)}")

    def positions(self, query: Ragged | None) -> Ragged:
        """Positions of the rows of the query."""
        if query is None:
            raise InvalidRequestError(POSITIONS, "need a query of vectors or token ids; the request has none")
        return self._integers((POSITIONS,), query.lengths, f"the query has {sum(query.lengths)} rows")

    def spans(self) -> Ragged:
        """Start and end of each span (n, 2)."""
        path = ("embedding", SPANS)
        lengths = self._lengths(*path)
        bounds = []
        for noun in ("starts", "ends"):
            bounds.append(self.parsed.numbers(UINT32, *path, noun, is_fixed=True))
            if (count := len(bounds[-1])) != sum(lengths):
                message = f"have {count} {noun}; the lengths sum to {sum(lengths)}"
                raise InvalidRequestError(SPANS, message)
        self.allowance.take(SPANS, 2 * sum(lengths) * INT64.itemsize)
        arrays = [numbers.array() for numbers in bounds]
        return Ragged(np.stack(arrays, axis=1, dtype=INT64), lengths)

    def mask(self, kind: pb.AttentionMask.Kind.ValueType) -> Mask:
        """The mask, whose flags the request has to fit."""
        if kind not in MASK_KINDS:
            raise InvalidRequestError("mask.kind", f"is {kind}; must be one of {', '.join(MaskKind)}")
        bits = np.frombuffer(self.parsed.last("mask", "bits"), np.uint8)
        # A flag of a mask takes one byte. The unused bits of the last byte are not flags.
        self.allowance.check_bytes("mask.bits", (len(bits) - 1) * BITS_PER_BYTE)
        return Mask(MASK_KINDS[kind], bits)

    def _integers(self, path: tuple[str, ...], lengths: tuple[int, ...], rule: str) -> Ragged:
        numbers, field, expected = self.parsed.numbers(INT64, *path), ".".join(path), sum(lengths)
        if len(numbers) != expected:
            raise InvalidRequestError(field, f"has {len(numbers)} {path[-1]}; {rule}")
        self.allowance.take(field, expected * INT64.itemsize)
        return Ragged(numbers.array(), lengths)

    def _lengths(self, *path: str) -> tuple[int, ...]:
        numbers = self.parsed.numbers(UINT32, *path, "lengths")
        self.allowance.limits.check_sequences(path[-1], len(numbers))
        return tuple(numbers.array().tolist())


def output_type(message: pb.AttendRequest) -> str:
    """The type in which a request wants real numbers.

    Raises:
        InvalidRequestError: It is not a type of real numbers.
    """
    data_type = message.output_data_type
    wire = NAMES.get(data_type, "") if data_type else "FP32"
    if wire not in FLOATS:
        rule = f"is {data_type}; must be one of {', '.join(FLOATS)}"
        raise InvalidRequestError("output_data_type", rule)
    return wire


def facts(request: DecodedRequest, model: LoadedModel, *, has_texts: bool = False) -> bytes:
    """What is known of the response to a request before the run: an AttendResponse.

    Args:
        request: The request; its texts are token ids.
        model: The model.
        has_texts: Whether it had texts.
    """
    response = pb.AttendResponse(
        model_name=model.name, model_version=model.version, model_digest=model.digest
    )
    if has_texts and (model.encoder or model.classifier) is not None:
        response.token_counts.extend(request.inputs[model.inputs[0].name].lengths)
        response.truncated.extend(request.truncated)
    bounds = b""
    if request.offsets is not None:
        response.token_offsets.lengths.extend(request.offsets.lengths)
        for path, column in zip((OFFSET_STARTS, OFFSET_ENDS), request.offsets.rows.T, strict=True):
            content = column.astype(UINT32).tobytes()
            bounds += head(path, len(content)) + content
    return response.SerializeToString() + bounds


def encode(
    result: Result, prefix: bytes, wire: str = "FP32", *, embeds: bool = False, has_heads: bool = True
) -> list[Piece]:
    """A response, for `Reply`.

    Args:
        result: The outputs of each sequence.
        prefix: The result of `facts`.
        wire: The type of real numbers in the response.
        embeds: Whether the request asked for embeddings.
        has_heads: Whether the model has attention weights.
    """
    response, outputs = pb.AttendResponse(), result.outputs
    first = EMBEDDING if embeds else CONTEXT_VECTORS if CONTEXT_VECTORS in outputs else next(iter(outputs))
    # The first output of a non-attention module may be one row for each sequence.
    rows = [np.atleast_2d(array) for array in outputs[first]]
    vectors = response.context_vectors
    vectors.data_type, vectors.width = DATA_TYPES[datatype_of(rows[0], wire)], rows[0].shape[-1]
    vectors.lengths.extend([len(array) for array in rows])
    output = Output(first, wire)
    contents: list[Piece] = [head(CONTEXT_DATA, output.size(rows)), output]
    # A module may have an output of this name that is not the weights of heads.
    if weights := outputs.get(ATTENTION_WEIGHTS, ()) if has_heads else ():
        *layers, heads, _, _ = weights[0].shape  # those of an encoder have layers
        response.attention_weights.MergeFrom(
            pb.AttentionWeights(
                data_type=DATA_TYPES[wire],
                num_layers=layers[0] if layers else 0,
                num_heads=heads,
                query_lengths=[array.shape[-2] for array in weights],
                key_lengths=[array.shape[-1] for array in weights],
            )
        )
        output = Output(ATTENTION_WEIGHTS, wire)
        contents += [head(WEIGHTS_DATA, output.size(weights)), output]
    return [prefix + response.SerializeToString(), *contents]
