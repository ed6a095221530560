"""attention.v1 messages to the engine's values and back."""

from typing import Any

import numpy as np

from protos.attention.v1 import attention_pb2 as pb
from server.engine.errors import InvalidRequestError
from server.engine.values import Array, Mask, MaskKind, Ragged, Request, Result
from server.rpc.tensors import from_bytes, to_bytes

DTYPES: dict[int, np.dtype[Any]] = {
    pb.DATA_TYPE_FP32: np.dtype("<f4"),
    pb.DATA_TYPE_FP16: np.dtype("<f2"),
    pb.DATA_TYPE_INT64: np.dtype("<i8"),
    pb.DATA_TYPE_BOOL: np.dtype("?"),
}
MASK_KINDS = {
    pb.AttentionMask.KIND_KEYS: MaskKind.KEYS,
    pb.AttentionMask.KIND_PAIRS: MaskKind.PAIRS,
    pb.AttentionMask.KIND_HEADS: MaskKind.HEADS,
}


def decode(message: pb.AttendRequest, deadline: float) -> Request:
    """Reads a request. Its tensors share memory with the bytes that protobuf hands out.

    Raises:
        InvalidRequestError: The message contradicts itself or states no data type.
    """
    inputs = {}
    texts: tuple[str, ...] = ()
    match message.WhichOneof("query_input"):
        case "query":
            inputs["query"] = _decode_vectors("query", message.query)
        case "token_ids":
            inputs["token_ids"] = _decode_tokens(message.token_ids)
        case "text":
            texts = _decode_texts(message.text)
    if message.HasField("key"):
        inputs["key"] = _decode_vectors("key", message.key)
    if message.HasField("value"):
        inputs["value"] = _decode_vectors("value", message.value)
    return Request(
        model_name=message.model_name,
        model_version=message.model_version,
        inputs=inputs,
        texts=texts,
        mask=_decode_mask(message.mask) if message.HasField("mask") else None,
        return_weights=message.return_weights,
        deadline=deadline,
    )


def _decode_vectors(field: str, message: pb.VectorSequences) -> Ragged:
    dtype = DTYPES.get(message.data_type)
    if dtype is None:
        known = ", ".join(dtype.name for dtype in DTYPES.values())
        raise InvalidRequestError(f"{field}.data_type", f"is {message.data_type}; known are {known}")
    if message.width == 0:
        raise InvalidRequestError(f"{field}.width", "must be at least 1")
    lengths = np.array(message.lengths, dtype=np.int64)
    shape = (int(lengths.sum()), message.width)
    return Ragged(from_bytes(f"{field}.data", message.data, dtype, shape), lengths)


def _decode_tokens(message: pb.TokenSequences) -> Ragged:
    lengths = np.array(message.lengths, dtype=np.int64)
    ids = np.array(message.ids, dtype=np.int64)
    if len(ids) != lengths.sum():
        raise InvalidRequestError(
            "token_ids.ids", f"holds {len(ids)} ids; the lengths sum to {lengths.sum()}"
        )
    return Ragged(ids, lengths)


def _decode_texts(message: pb.TextSequences) -> tuple[str, ...]:
    if not message.texts:
        raise InvalidRequestError("text", "holds no sequence")
    return tuple(message.texts)


def _decode_mask(message: pb.AttentionMask) -> Mask:
    kind = MASK_KINDS.get(message.kind)
    if kind is None:
        raise InvalidRequestError("mask.kind", f"is {message.kind}; known are {', '.join(MaskKind)}")
    return Mask(kind, np.frombuffer(message.bits, dtype=np.uint8))


def encode(result: Result, response: pb.AttendResponse) -> None:
    """Writes a result into an empty response, field by field: a whole message given to another is copied."""
    response.model_name = result.model_name
    response.model_version = result.model_version
    context = result.outputs["context_vectors"]
    vectors = response.context_vectors
    vectors.data_type = pb.DATA_TYPE_FP32
    vectors.width = context[0].shape[-1]
    vectors.lengths.extend(len(rows) for rows in context)
    vectors.data = to_bytes(context)
    if "attention_weights" in result.outputs:
        _encode_weights(result.outputs["attention_weights"], response.attention_weights)


def _encode_weights(arrays: list[Array], weights: pb.AttentionWeights) -> None:
    weights.data_type = pb.DATA_TYPE_FP32
    weights.num_heads = arrays[0].shape[0]
    weights.query_lengths.extend(array.shape[1] for array in arrays)
    weights.key_lengths.extend(array.shape[2] for array in arrays)
    weights.data = to_bytes(arrays)
