"""Converts attention.v1 messages to the engine's types and back."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from artifact.manifest import BATCH_AXIS, POSITIONS
from protos.attention.v1 import attention_pb2 as pb
from server.engine.errors import InvalidRequestError
from server.engine.model import LoadedModel
from server.engine.types import Array, Mask, MaskKind, Ragged, Request, Result
from server.rpc import protobuf_bytes
from server.rpc.protobuf_bytes import Buffer, Path
from server.rpc.tensors import buffers, from_bytes

DTYPES: "dict[pb.DataType.ValueType, np.dtype[Any]]" = {
    pb.DATA_TYPE_FP32: np.dtype("<f4"),
    pb.DATA_TYPE_FP16: np.dtype("<f2"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
}
DATA_TYPES = {dtype: data_type for data_type, dtype in DTYPES.items()}
MASK_KINDS = {
    pb.AttentionMask.KIND_KEYS: MaskKind.KEYS,
    pb.AttentionMask.KIND_PAIRS: MaskKind.PAIRS,
    pb.AttentionMask.KIND_HEADS: MaskKind.HEADS,
}
QUERY = pb.AttendRequest.QUERY_FIELD_NUMBER
KEY = pb.AttendRequest.KEY_FIELD_NUMBER
VALUE = pb.AttendRequest.VALUE_FIELD_NUMBER
VECTORS: protobuf_bytes.Tree = {pb.VectorSequences.DATA_FIELD_NUMBER: True}
TENSORS: protobuf_bytes.Tree = {QUERY: VECTORS, KEY: VECTORS, VALUE: VECTORS}
CONTEXT_DATA = (pb.AttendResponse.CONTEXT_VECTORS_FIELD_NUMBER, pb.VectorSequences.DATA_FIELD_NUMBER)
WEIGHTS_DATA = (pb.AttendResponse.ATTENTION_WEIGHTS_FIELD_NUMBER, pb.AttentionWeights.DATA_FIELD_NUMBER)
CACHED_MODELS = 1024
# (B, T, d).
MAX_OUTPUT_AXES = 3
STREAMED = (pb.AttendStreamResponse.RESPONSE_FIELD_NUMBER,)

read = protobuf_bytes.reader(pb.AttendRequest.FromString, TENSORS)
read_streamed = protobuf_bytes.reader(
    pb.AttendStreamRequest.FromString, {pb.AttendStreamRequest.REQUEST_FIELD_NUMBER: TENSORS}
)


@lru_cache(maxsize=CACHED_MODELS)
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
            "use ModelInfer of the Open Inference Protocol",
        )


def decode(
    message: pb.AttendRequest,
    deadline: float,
    names: Mapping[str, str] | None = None,
    data: Mapping[int, memoryview] | None = None,
) -> Request:
    """Decodes a request. Its arrays share memory with the message, and with `data`.

    Args:
        message: The request.
        deadline: On `time.monotonic`'s clock.
        names: The result of `input_names`.
        data: The elements of query, key and value by field number, if they were cut out of the message.

    Raises:
        InvalidRequestError: The message contradicts itself, or states no data type.
    """
    inputs = {}
    data = data or {}
    texts: tuple[str, ...] = ()
    match message.WhichOneof("query_input"):
        case "query":
            inputs["query"] = _decode_vectors("query", message.query, data.get(QUERY))
        case "token_ids":
            inputs["token_ids"] = _decode_tokens(message.token_ids)
        case "text":
            texts = _decode_texts(message.text)
    if message.HasField("key"):
        inputs["key"] = _decode_vectors("key", message.key, data.get(KEY))
    if message.HasField("value"):
        inputs["value"] = _decode_vectors("value", message.value, data.get(VALUE))
    if message.positions:
        inputs[POSITIONS] = _decode_positions(message, inputs)
    return Request(
        inputs={names.get(name, name): ragged for name, ragged in inputs.items()} if names else inputs,
        texts=texts,
        mask=_decode_mask(message.mask) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        deadline=deadline,
    )


def _decode_vectors(field: str, message: pb.VectorSequences, data: memoryview | None) -> Ragged:
    dtype = DTYPES.get(message.data_type)
    if dtype is None:
        known = ", ".join(dtype.name for dtype in DTYPES.values())
        raise InvalidRequestError(f"{field}.data_type", f"is {message.data_type}; must be one of {known}")
    if message.width == 0:
        raise InvalidRequestError(f"{field}.width", "must be at least 1")
    lengths = tuple(message.lengths)
    shape = (sum(lengths), message.width)
    return Ragged(from_bytes(f"{field}.data", message.data if data is None else data, dtype, shape), lengths)


def _decode_tokens(message: pb.TokenSequences) -> Ragged:
    lengths = tuple(message.lengths)
    ids = np.array(message.ids, dtype=np.int64)
    if len(ids) != sum(lengths):
        raise InvalidRequestError("token_ids.ids", f"has {len(ids)} ids; the lengths sum to {sum(lengths)}")
    return Ragged(ids, lengths)


def _decode_positions(message: pb.AttendRequest, inputs: Mapping[str, Ragged]) -> Ragged:
    query = next(iter(inputs.values()), None)
    if query is None:
        raise InvalidRequestError(POSITIONS, "need a query of vectors or token ids; the request has none")
    positions = np.array(message.positions, dtype=np.int64)
    if len(positions) != (rows := sum(query.lengths)):
        raise InvalidRequestError(POSITIONS, f"has {len(positions)} positions; the query has {rows} rows")
    return Ragged(positions, query.lengths)


def _decode_texts(message: pb.TextSequences) -> tuple[str, ...]:
    if not message.texts:
        raise InvalidRequestError("text", "has no sequences; at least one is required")
    return tuple(message.texts)


def _decode_mask(message: pb.AttentionMask) -> Mask:
    kind = MASK_KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequestError("mask.kind", f"is {message.kind}; must be one of {', '.join(MaskKind)}")
    return Mask(kind, np.frombuffer(message.bits, dtype=np.uint8))


def encode(result: Result, model: LoadedModel) -> bytes:
    """Serializes a result as an AttendResponse."""
    response, tensors = _response(result, model, ())
    return b"".join([response.SerializeToString(), *tensors])


def encode_streamed(request_id: str, result: Result, model: LoadedModel) -> bytes:
    """Serializes a result as an AttendStreamResponse."""
    response, tensors = _response(result, model, STREAMED)
    streamed = pb.AttendStreamResponse(id=request_id, response=response)
    return b"".join([streamed.SerializeToString(), *tensors])


def _response(result: Result, model: LoadedModel, path: Path) -> tuple[pb.AttendResponse, list[Buffer]]:
    """A response without its tensors, and the tensors to append once it is serialized.

    `path` is the field path of the response in the message that carries it.
    """
    # The first output of a non-attention module may be one row for each sequence.
    context = [np.atleast_2d(array) for array in next(iter(result.outputs.values()))]
    response = pb.AttendResponse(model_name=model.name, model_version=model.version)
    vectors = response.context_vectors
    vectors.data_type = DATA_TYPES[context[0].dtype]
    vectors.width = context[0].shape[-1]
    vectors.lengths.extend([len(rows) for rows in context])
    tensors = protobuf_bytes.field((*path, *CONTEXT_DATA), buffers(context))
    if weights := result.outputs.get("attention_weights"):
        _describe_weights(weights, response.attention_weights)
        tensors += protobuf_bytes.field((*path, *WEIGHTS_DATA), buffers(weights))
    return response, tensors


def _describe_weights(arrays: list[Array], weights: pb.AttentionWeights) -> None:
    weights.data_type = pb.DATA_TYPE_FP32
    weights.num_heads = arrays[0].shape[0]
    weights.query_lengths.extend(array.shape[1] for array in arrays)
    weights.key_lengths.extend(array.shape[2] for array in arrays)
