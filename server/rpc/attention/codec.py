"""Converts attention.v1 messages to the engine's types and back."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, POSITIONS
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.engine.dimensions import MAX_CACHED_SEQUENCES
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel, cached_by_model
from attention_serving.server.engine.outputs import SPANS
from attention_serving.server.engine.types import (
    BITS_PER_BYTE,
    Array,
    HeadSelection,
    Mask,
    MaskKind,
    Ragged,
    Request,
    Result,
    Text,
)
from attention_serving.server.rpc import protobuf_bytes
from attention_serving.server.rpc.allowance import UNCOUNTED, Allowance
from attention_serving.server.rpc.attention.fields import (
    IDS,
    KEY,
    KNOWN_VECTORS,
    MASK_BITS,
    POSITIONS_OF_ROWS,
    QUERY,
    SPAN_ENDS,
    SPAN_LENGTHS,
    SPAN_STARTS,
    TEXT,
    TEXTS,
    TOKEN_IDS,
    TOKEN_LENGTHS,
    VALUE,
    VECTOR_DATA,
    VECTOR_LENGTHS,
)
from attention_serving.server.rpc.attention.text_facts import NO_FACTS, TextFacts
from attention_serving.server.rpc.half_precision import FLOAT32, WireFloat, narrowed, widened
from attention_serving.server.rpc.protobuf_bytes import NOTHING_CUT, Buffer, Fields, Path
from attention_serving.server.rpc.protobuf_numbers import PackedNumbers, few_lengths
from attention_serving.server.rpc.request_cache import ModelReference
from attention_serving.server.rpc.tensors import buffers, from_bytes

DTYPES: "dict[pb.DataType.ValueType, np.dtype[Any]]" = {
    pb.DATA_TYPE_FP32: np.dtype("<f4"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
}
DATA_TYPES = {dtype: data_type for data_type, dtype in DTYPES.items()}
FLOAT_TYPES = {wire: pb.DataType.Value(f"DATA_TYPE_{wire.name}") for wire in WireFloat}
WIRE_FLOATS = {data_type: wire for wire, data_type in FLOAT_TYPES.items()}
MASK_KINDS = {
    pb.AttentionMask.KIND_KEYS: MaskKind.KEYS,
    pb.AttentionMask.KIND_PAIRS: MaskKind.PAIRS,
    pb.AttentionMask.KIND_HEADS: MaskKind.HEADS,
}
CONTEXT_DATA = (pb.AttendResponse.CONTEXT_VECTORS_FIELD_NUMBER, pb.VectorSequences.DATA_FIELD_NUMBER)
WEIGHTS_DATA = (pb.AttendResponse.ATTENTION_WEIGHTS_FIELD_NUMBER, pb.AttentionWeights.DATA_FIELD_NUMBER)
KNOWN_FLOATS = ", ".join(WireFloat.__members__)
KNOWN_TYPES = f"{KNOWN_FLOATS}, INT64, BOOL"
CACHED_MODELS = CACHED_DESCRIPTIONS = 1024
Shape = tuple[int, ...]
# (B, T, d).
MAX_OUTPUT_AXES = 3
STREAMED = (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)

UINT32, INT64 = np.dtype("<u4"), np.dtype("<i8")


@cached_by_model(CACHED_MODELS)
def input_names(model: LoadedModel) -> dict[str, str]:
    """The model's input for each field of a request, if the names differ, as for non-attention modules.

    Raises:
        InvalidRequestError: attention.v1 cannot carry the model's first output.
    """
    _check_output(model)
    if model.manifest.num_heads:
        return {}
    names = [spec.name for spec in model.inputs]
    return {**dict(zip(("query", "key", "value"), names, strict=False)), "token_ids": names[0]}


def _check_output(model: LoadedModel) -> None:
    """The first output must be rows of one width: (B, T, d), or one row (B, d) or (B,) per sequence."""
    spec = model.outputs[model.default_outputs[0]]
    is_rows = len(spec.axes) <= MAX_OUTPUT_AXES and not isinstance(spec.axes[-1], str)
    if not is_rows and spec.axes != (BATCH_AXIS,):
        shape = ", ".join(map(str, spec.axes))
        raise InvalidRequestError(
            "model_name",
            f"{spec.name} of model {model.name!r} has shape ({shape}), which is not a sequence of vectors; "
            "send its inputs by name, as `inputs`, and its outputs come back by name",
        )


def inputs_of(message: pb.AttendRequest, model: LoadedModel, paths: Sequence[Path]) -> list[str]:
    """The model's input that the vectors of each field are."""
    if message.inputs:
        return [message.inputs[path[-2]].name for path in paths]
    names = input_names(model)
    fields = [KNOWN_VECTORS[path[-2]] for path in paths]
    return [names.get(field, field) for field in fields]


def model_of(message: pb.AttendRequest) -> ModelReference:
    """The model that a request names."""
    return ModelReference(message.model_name, message.model_version)


def decode(
    message: pb.AttendRequest,
    deadline: float,
    names: Mapping[str, str] | None = None,
    fields: Fields = NOTHING_CUT,
    allowance: Allowance = UNCOUNTED,
) -> Request:
    """Decodes a request. Its arrays share memory with the message, and with `fields`, where they can.

    Args:
        message: The request.
        deadline: On `time.monotonic`'s clock.
        names: The result of `input_names`.
        fields: The fields that were cut out of the message.
        allowance: What the request may take.

    Raises:
        InvalidRequestError: The message contradicts itself, or states no data type.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    if message.output_names:
        raise InvalidRequestError("output_names", "needs inputs, which name every input")
    decoder = _Decoder(fields, allowance)
    inputs = {}
    texts: tuple[Text, ...] = ()
    embeds = message.HasField("embedding")
    options = _NO_OPTIONS
    match message.WhichOneof("query_input"):
        case "query":
            inputs["query"] = decoder.vectors("query", QUERY, message.query)
        case "token_ids":
            inputs["token_ids"] = decoder.tokens(message.token_ids)
        case "text":
            texts = decoder.texts(message.text)
            options = _text_options(message.text)
    if message.HasField("key"):
        inputs["key"] = decoder.vectors("key", KEY, message.key)
    if message.HasField("value"):
        inputs["value"] = decoder.vectors("value", VALUE, message.value)
    if message.positions or (POSITIONS_OF_ROWS,) in fields:
        inputs[POSITIONS] = decoder.positions(message, next(iter(inputs.values()), None))
    return Request(
        inputs={names.get(name, name): ragged for name, ragged in inputs.items()} if names else inputs,
        texts=texts,
        mask=decoder.mask(message.mask) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        head_selection=_head_selection(message),
        return_tokens=not embeds,
        dimensions=message.embedding.dimensions if embeds else 0,
        spans=decoder.spans(message.embedding.spans)
        if embeds and message.embedding.HasField("spans")
        else None,
        return_offsets=message.return_offsets,
        prompt=options.prompt,
        truncate=options.truncate,
        deadline=deadline,
    )


class _TextOptions(NamedTuple):
    """How texts are to be encoded; None leaves it to the model."""

    prompt: str | None = None
    truncate: bool | None = None


_NO_OPTIONS = _TextOptions()


def _head_selection(message: pb.AttendRequest) -> HeadSelection | None:
    if not message.HasField("head_selection"):
        return None
    return HeadSelection(tuple(message.head_selection.layers), tuple(message.head_selection.heads))


def _text_options(message: pb.TextSequences) -> _TextOptions:
    return _TextOptions(
        prompt=message.prompt if message.HasField("prompt") else None,
        truncate=message.truncate if message.HasField("truncate") else None,
    )


def check_embedding(model: LoadedModel) -> None:
    """Refuses a request for embeddings to a model that has none.

    Raises:
        InvalidRequestError: The model is not a text encoder.
    """
    if model.encoder is None:
        raise InvalidRequestError("embedding", f"model {model.name!r} is not a text encoder")


def elements(
    field: str,
    data_type: pb.DataType.ValueType,
    data: bytes | memoryview,
    shape: Shape,
    allowance: Allowance,
) -> Array:
    """The elements of an input in the type that models take.

    Raises:
        InvalidRequestError: The type is unknown, or the bytes do not fit the shape or are not of that type.
        LimitExceededError: The input would be too large.
        OverloadedError: The memory of its copy is not available.
    """
    wire = WIRE_FLOATS.get(data_type)
    if wire is not None:
        return widened(f"{field}.data", data, wire, shape, allowance)
    if data_type not in DTYPES:
        raise InvalidRequestError(f"{field}.data_type", f"is {data_type}; must be one of {KNOWN_TYPES}")
    return from_bytes(f"{field}.data", data, DTYPES[data_type], shape)


class _Decoder:
    """Decodes the inputs of one request, from its message or from the fields that were cut out of it."""

    def __init__(self, fields: Fields, allowance: Allowance) -> None:
        self._fields = fields
        self._allowance = allowance

    def vectors(self, field: str, number: int, message: pb.VectorSequences) -> Ragged:
        width = message.width
        if width == 0:
            raise InvalidRequestError(f"{field}.width", "must be at least 1")
        lengths = self._lengths(field, (number, VECTOR_LENGTHS), message.lengths)
        data = self._content((number, VECTOR_DATA), message.data)
        shape = (sum(lengths), width)
        return Ragged(elements(field, message.data_type, data, shape, self._allowance), lengths)

    def tokens(self, message: pb.TokenSequences) -> Ragged:
        lengths = self._lengths("token_ids", (TOKEN_IDS, TOKEN_LENGTHS), message.lengths)
        expected = f"the lengths sum to {sum(lengths)}"
        ids = self._numbers("token_ids.ids", "ids", (TOKEN_IDS, IDS), message.ids, sum(lengths), expected)
        return Ragged(ids, lengths)

    def positions(self, message: pb.AttendRequest, query: Ragged | None) -> Ragged:
        if query is None:
            raise InvalidRequestError(POSITIONS, "need a query of vectors or token ids; the request has none")
        rows = sum(query.lengths)
        expected = f"the query has {rows} rows"
        path = (POSITIONS_OF_ROWS,)
        numbers = self._numbers(POSITIONS, "positions", path, message.positions, rows, expected)
        return Ragged(numbers, query.lengths)

    def spans(self, message: pb.Spans) -> Ragged:
        lengths = self._lengths(SPANS, SPAN_LENGTHS, message.lengths)
        starts = self._bounds("starts", SPAN_STARTS, message.starts, sum(lengths))
        ends = self._bounds("ends", SPAN_ENDS, message.ends, sum(lengths))
        self._allowance.take(SPANS, 2 * sum(lengths) * INT64.itemsize)
        return Ragged(np.stack([starts.array(), ends.array()], axis=1, dtype=INT64), lengths)

    def texts(self, message: pb.TextSequences) -> tuple[Text, ...]:
        texts: Sequence[Text] = self._fields.get((TEXT, TEXTS), message.texts)
        if not texts:
            raise InvalidRequestError("text", "has no sequences; at least one is required")
        return tuple(texts)

    def mask(self, message: pb.AttentionMask) -> Mask:
        kind = MASK_KINDS.get(message.kind)
        if kind is None:
            raise InvalidRequestError("mask.kind", f"is {message.kind}; must be one of {', '.join(MaskKind)}")
        bits = np.frombuffer(self._content(MASK_BITS, message.bits), np.uint8)
        # A flag of a mask takes one byte. The unused bits of the last byte are not flags.
        self._allowance.check_bytes("mask.bits", (len(bits) - 1) * BITS_PER_BYTE)
        return Mask(kind, bits)

    def _content(self, path: Path, parsed: bytes) -> bytes | memoryview:
        return self._fields[path][-1] if path in self._fields else parsed

    def _lengths(self, field: str, path: Path, parsed: Sequence[int]) -> tuple[int, ...]:
        if path not in self._fields:
            self._allowance.limits.check_sequences(field, len(parsed))
            return tuple(parsed)
        if (few := few_lengths(self._fields[path])) is not None:
            self._allowance.limits.check_sequences(field, len(few))
            return tuple(few)
        numbers = PackedNumbers(self._fields[path], UINT32)
        self._allowance.limits.check_sequences(field, len(numbers))
        return tuple(numbers.array().tolist())

    def _bounds(self, noun: str, path: Path, parsed: Sequence[int], expected: int) -> PackedNumbers:
        """The starts or ends of as many spans as expected."""
        content = self._fields.get(path) or [memoryview(np.array(parsed, UINT32).tobytes())]
        numbers = PackedNumbers(content, UINT32, is_fixed=True)
        if len(numbers) != expected:
            raise InvalidRequestError(SPANS, f"have {len(numbers)} {noun}; the lengths sum to {expected}")
        return numbers

    def _numbers(
        self, field: str, noun: str, path: Path, parsed: Sequence[int], expected: int, says: str
    ) -> Array:
        """Numbers of which there must be as many as expected."""
        cut = PackedNumbers(self._fields[path], INT64) if path in self._fields else None
        count = len(parsed if cut is None else cut)
        if count != expected:
            raise InvalidRequestError(field, f"has {count} {noun}; {says}")
        if cut is None:
            return np.array(parsed, INT64)
        self._allowance.take(field, count * INT64.itemsize)
        return cut.array()


def output_type(message: pb.AttendRequest) -> WireFloat:
    """The type in which a request wants real numbers.

    Raises:
        InvalidRequestError: It is not a type of real numbers.
    """
    data_type = message.output_data_type
    if not data_type:
        return WireFloat.FP32
    wire = WIRE_FLOATS.get(data_type)
    if wire is None:
        raise InvalidRequestError("output_data_type", f"is {data_type}; must be one of {KNOWN_FLOATS}")
    return wire


def encode(
    result: Result,
    model: LoadedModel,
    wire: WireFloat = WireFloat.FP32,
    facts: TextFacts = NO_FACTS,
    *,
    embeds: bool = False,
) -> bytes:
    """Serializes a result as an AttendResponse.

    Args:
        result: The outputs of each sequence.
        model: The model.
        wire: The type of real numbers in the response.
        facts: What the response says about texts.
        embeds: Whether the request asked for embeddings.
    """
    description, tensors = _response(result, model, wire, (), embeds=embeds)
    return b"".join([description, facts.serialized(), *tensors])


def encode_streamed(
    request_id: str,
    result: Result,
    model: LoadedModel,
    wire: WireFloat = WireFloat.FP32,
    facts: TextFacts = NO_FACTS,
    *,
    embeds: bool = False,
) -> bytes:
    """Serializes a result as an AttendStreamResponse; otherwise as `encode`."""
    description, tensors = _response(result, model, wire, STREAMED, embeds=embeds)
    own = pb.AttendStreamResponse(id=request_id).SerializeToString()
    fields = protobuf_bytes.field(STREAMED, [description, facts.serialized()])
    return b"".join([own, *fields, *tensors])


def _response(
    result: Result, model: LoadedModel, wire: WireFloat, path: Path, *, embeds: bool
) -> tuple[bytes, list[Buffer]]:
    """A serialized response without its tensors, and the tensors to append to it.

    `path` is the field path of the response in the message that carries it.
    """
    rows = result.outputs[EMBEDDING] if embeds else result.outputs.get(CONTEXT_VECTORS)
    # The first output of a non-attention module may be one row for each sequence.
    context = [np.atleast_2d(array) for array in rows or next(iter(result.outputs.values()))]
    # A module may have an output of this name that is not the weights of heads.
    weights = result.outputs.get("attention_weights", ()) if model.manifest.num_heads else ()
    describe = _describe if len(context) <= MAX_CACHED_SEQUENCES else _describe.__wrapped__
    shapes = tuple([array.shape for array in context]), tuple([array.shape for array in weights])
    description = describe(model.name, model.version, data_type_of(context[0], wire), wire, *shapes)
    tensors = protobuf_bytes.field((*path, *CONTEXT_DATA), buffers([narrowed(own, wire) for own in context]))
    if weights:
        narrow = [narrowed(own, wire) for own in weights]
        tensors += protobuf_bytes.field((*path, *WEIGHTS_DATA), buffers(narrow))
    return description, tensors


def data_type_of(array: Array, wire: WireFloat) -> pb.DataType.ValueType:
    """The type in which an array is sent."""
    return DATA_TYPES[array.dtype] if array.dtype != FLOAT32 else FLOAT_TYPES[wire]


@lru_cache(maxsize=CACHED_DESCRIPTIONS)
def _describe(
    name: str,
    version: str,
    data_type: pb.DataType.ValueType,
    wire: WireFloat,
    context: tuple[Shape, ...],
    weights: tuple[Shape, ...],
) -> bytes:
    """A serialized response without its tensors, which have these shapes."""
    response = pb.AttendResponse(model_name=name, model_version=version)
    vectors = response.context_vectors
    vectors.data_type = data_type
    vectors.width = context[0][-1]
    vectors.lengths.extend([shape[0] for shape in context])
    if weights:
        response.attention_weights.data_type = FLOAT_TYPES[wire]
        *layers, response.attention_weights.num_heads, _, _ = weights[0]  # those of an encoder have layers
        response.attention_weights.num_layers = layers[0] if layers else 0
        response.attention_weights.query_lengths.extend([shape[-2] for shape in weights])
        response.attention_weights.key_lengths.extend([shape[-1] for shape in weights])
    return response.SerializeToString()
