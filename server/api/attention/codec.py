"""Converts attention.v1 messages to the engine's types and back."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np

from attention_serving.artifact.encoder import CONTEXT_VECTORS, EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, POSITIONS
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.api.attention.fields import TEXTS
from attention_serving.server.api.protobuf_bytes import Buffer, Fields, PackedNumbers, Path, last
from attention_serving.server.api.request_cache import ModelReference
from attention_serving.server.api.tensors import (
    UNCOUNTED,
    Allowance,
    Shape,
    WireFloat,
    datatype_of,
    from_bytes,
    to_bytes,
)
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import SPANS
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
STREAMED = (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)

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


def inputs_of(message: pb.AttendRequest, model: LoadedModel, paths: Sequence[Path]) -> list[str]:
    """The model's input that the vectors of each field are."""
    if message.inputs:
        return [message.inputs[int(path[-2])].name for path in paths]
    names = input_names(model)
    return [names.get(field, field) for field in (str(path[-2]) for path in paths)]


def model_of(message: pb.AttendRequest) -> ModelReference:
    """The model that a request names."""
    return ModelReference(message.model_name, message.model_version)


def decode(
    message: pb.AttendRequest,
    deadline: float,
    names: Mapping[str, str],
    fields: Fields,
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
    match message.WhichOneof("query_input"):
        case "query":
            inputs["query"] = decoder.vectors("query", message.query)
        case "token_ids":
            inputs["token_ids"] = decoder.tokens()
    if message.HasField("key"):
        inputs["key"] = decoder.vectors("key", message.key)
    if message.HasField("value"):
        inputs["value"] = decoder.vectors("value", message.value)
    if (POSITIONS,) in fields:
        inputs[POSITIONS] = decoder.positions(next(iter(inputs.values()), None))
    text, embedding, heads = message.text, message.embedding, message.head_selection
    has_heads = message.HasField("head_selection")
    return Request(
        inputs={names.get(name, name): ragged for name, ragged in inputs.items()},
        texts=decoder.texts() if message.HasField("text") else (),
        mask=decoder.mask(message.mask.kind) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        head_selection=HeadSelection(tuple(heads.layers), tuple(heads.heads)) if has_heads else None,
        return_tokens=not message.HasField("embedding"),
        dimensions=embedding.dimensions,
        spans=decoder.spans() if embedding.HasField("spans") else None,
        return_offsets=message.return_offsets,
        prompt=text.prompt if text.HasField("prompt") else None,
        truncate=text.truncate if text.HasField("truncate") else None,
        deadline=deadline,
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
    if data_type not in NAMES:
        raise InvalidRequestError(
            f"{field}.data_type", f"is {data_type}; must be one of {', '.join(DATA_TYPES)}"
        )
    return from_bytes(f"{field}.data", data, NAMES[data_type], shape, allowance)


class _Decoder:
    """Decodes the inputs of one request from the fields that were cut out of its message."""

    def __init__(self, fields: Fields, allowance: Allowance) -> None:
        self._fields = fields
        self._allowance = allowance

    def vectors(self, field: str, message: pb.VectorSequences) -> Ragged:
        if message.width == 0:
            raise InvalidRequestError(f"{field}.width", "must be at least 1")
        lengths = self._lengths(field)
        shape = (sum(lengths), message.width)
        data = last(self._fields, (field, "data"))
        return Ragged(elements(field, message.data_type, data, shape, self._allowance), lengths)

    def tokens(self) -> Ragged:
        lengths = self._lengths("token_ids")
        says = f"the lengths sum to {sum(lengths)}"
        return Ragged(self._numbers("token_ids.ids", ("token_ids", "ids"), sum(lengths), says), lengths)

    def positions(self, query: Ragged | None) -> Ragged:
        if query is None:
            raise InvalidRequestError(POSITIONS, "need a query of vectors or token ids; the request has none")
        rows = sum(query.lengths)
        positions = self._numbers(POSITIONS, (POSITIONS,), rows, f"the query has {rows} rows")
        return Ragged(positions, query.lengths)

    def spans(self) -> Ragged:
        path = ("embedding", SPANS)
        lengths = self._lengths(*path)
        bounds = {}
        for noun in ("starts", "ends"):
            bounds[noun] = PackedNumbers(self._fields.get((*path, noun), ()), UINT32, is_fixed=True)
            if (count := len(bounds[noun])) != sum(lengths):
                says = f"have {count} {noun}; the lengths sum to {sum(lengths)}"
                raise InvalidRequestError(SPANS, says)
        self._allowance.take(SPANS, 2 * sum(lengths) * INT64.itemsize)
        arrays = [numbers.array() for numbers in bounds.values()]
        return Ragged(np.stack(arrays, axis=1, dtype=INT64), lengths)

    def texts(self) -> tuple[Text, ...]:
        texts = self._fields.get(TEXTS)
        if not texts:
            raise InvalidRequestError("text", "has no sequences; at least one is required")
        return tuple(texts)

    def mask(self, kind: pb.AttentionMask.Kind.ValueType) -> Mask:
        if kind not in MASK_KINDS:
            raise InvalidRequestError("mask.kind", f"is {kind}; must be one of {', '.join(MaskKind)}")
        bits = np.frombuffer(last(self._fields, ("mask", "bits")), np.uint8)
        # A flag of a mask takes one byte. The unused bits of the last byte are not flags.
        self._allowance.check_bytes("mask.bits", (len(bits) - 1) * BITS_PER_BYTE)
        return Mask(MASK_KINDS[kind], bits)

    def _numbers(self, field: str, path: Path, expected: int, says: str) -> Array:
        numbers = PackedNumbers(self._fields.get(path, ()), INT64)
        if len(numbers) != expected:
            raise InvalidRequestError(field, f"has {len(numbers)} {path[-1]}; {says}")
        self._allowance.take(field, expected * INT64.itemsize)
        return numbers.array()

    def _lengths(self, *path: str) -> tuple[int, ...]:
        numbers = PackedNumbers(self._fields.get((*path, "lengths"), ()), UINT32)
        self._allowance.limits.check_sequences(path[-1], len(numbers))
        return tuple(numbers.array().tolist())


def output_type(message: pb.AttendRequest) -> WireFloat:
    """The type in which a request wants real numbers.

    Raises:
        InvalidRequestError: It is not a type of real numbers.
    """
    data_type = message.output_data_type
    if not data_type:
        return WireFloat.FP32
    wire = WireFloat.__members__.get(NAMES.get(data_type, ""))
    if wire is None:
        known = ", ".join(WireFloat.__members__)
        raise InvalidRequestError("output_data_type", f"is {data_type}; must be one of {known}")
    return wire


class TextFacts(NamedTuple):
    """What a response says about the texts of its request.

    Attributes:
        token_counts: Number of tokens of each text; empty if the request had no texts, or not to an encoder.
        truncated: Indices of the texts that were cut.
        offsets: The characters of each token; None unless the request asked for them.
    """

    token_counts: tuple[int, ...] = ()
    truncated: tuple[int, ...] = ()
    offsets: Ragged | None = None

    @classmethod
    def of(cls, request: Request, model: LoadedModel) -> Self:
        """The facts of a request whose texts have been encoded."""
        if model.encoder is None:
            return cls(offsets=request.offsets)
        return cls(request.inputs[model.inputs[0].name].lengths, request.truncated, request.offsets)


NO_FACTS = TextFacts()


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
    return b"".join(_parts(result, model, wire, facts, embeds=embeds))


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
    return streamed(request_id, _parts(result, model, wire, facts, embeds=embeds))


def streamed(request_id: str, response: Sequence[Buffer]) -> bytes:
    """Serializes an AttendStreamResponse, given the parts of its AttendResponse."""
    own = pb.AttendStreamResponse(id=request_id).SerializeToString()
    return b"".join([own, *protobuf_bytes.field(STREAMED, response)])


def _parts(
    result: Result, model: LoadedModel, wire: WireFloat, facts: TextFacts, *, embeds: bool
) -> list[Buffer]:
    """The parts of a serialized AttendResponse."""
    rows = result.outputs[EMBEDDING] if embeds else result.outputs.get(CONTEXT_VECTORS)
    # The first output of a non-attention module may be one row for each sequence.
    context = [np.atleast_2d(array) for array in rows or next(iter(result.outputs.values()))]
    # A module may have an output of this name that is not the weights of heads.
    weights = result.outputs.get("attention_weights", ()) if model.manifest.num_heads else ()
    response = pb.AttendResponse(
        model_name=model.name,
        model_version=model.version,
        token_counts=facts.token_counts,
        truncated=facts.truncated,
    )
    vectors = response.context_vectors
    vectors.data_type = DATA_TYPES[datatype_of(context[0], wire)]
    vectors.width = context[0].shape[-1]
    vectors.lengths.extend([len(array) for array in context])
    if weights:
        described = response.attention_weights
        described.data_type = DATA_TYPES[wire.name]
        *layers, described.num_heads, _, _ = weights[0].shape  # those of an encoder have layers
        described.num_layers = layers[0] if layers else 0
        described.query_lengths.extend([array.shape[-2] for array in weights])
        described.key_lengths.extend([array.shape[-1] for array in weights])
    contents = protobuf_bytes.field(CONTEXT_DATA, to_bytes(context, wire))
    if weights:
        contents += protobuf_bytes.field(WEIGHTS_DATA, to_bytes(weights, wire))
    if facts.offsets is not None:
        response.token_offsets.lengths.extend(facts.offsets.lengths)
        for path, bounds in zip((OFFSET_STARTS, OFFSET_ENDS), facts.offsets.rows.T, strict=True):
            contents += protobuf_bytes.field(path, to_bytes([bounds.astype(UINT32)]))
    return [response.SerializeToString(), *contents]
