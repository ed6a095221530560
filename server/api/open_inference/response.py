"""Responses of the Open Inference Protocol: their shapes before the run, and their bytes after it."""

import math
import struct
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference import parameters
from attention_serving.server.api.open_inference.parameters import RegionSlice
from attention_serving.server.api.open_inference.tensors import BYTES
from attention_serving.server.api.protobuf_bytes import head
from attention_serving.server.api.tensors import (
    DATATYPES,
    Allowance,
    Output,
    Piece,
    Shape,
    WireFloat,
    datatype_of,
    to_bytes,
)
from attention_serving.server.engine.errors import LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Request, Result

# The parameter of a response that names the texts that were cut, by their indices.
TRUNCATED = "truncated"
# An output of models that take text: the text of each token, BYTES (B, T), padded with empty texts.
TOKENS = "tokens"
# The length in bytes before each of them.
SIZE = struct.Struct("<I")
EMPTY = SIZE.pack(0)
# Another: the number of tokens of each text.
LENGTHS = "lengths"
LENGTHS_SPEC = TensorSpec(name=LENGTHS, data_type="int64", axes=(BATCH_AXIS,))
RAW_OUTPUT_CONTENTS = (pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,)


def default_outputs(model: LoadedModel) -> tuple[str, ...]:
    """Outputs of a request that names none. Texts differ in length, so their lengths are an output."""
    return (*model.default_outputs, LENGTHS) if model.text_encoder else tuple(model.default_outputs)


def has_tokens(model: LoadedModel) -> bool:
    """Whether requests to a model may ask for tokens. An output of its own with this name comes first."""
    return model.text_encoder is not None and TOKENS not in model.outputs


def layout(
    outputs: Iterable[str],
    request: Request,
    model: LoadedModel,
    sizes: Mapping[str, int],
    field: str,
    id_bytes: int,
    allowance: Allowance,
) -> tuple[dict[str, Shape], dict[str, tuple[str, bytes]]]:
    """What is known of the outputs of a response, whose size is checked before the request is queued.

    Args:
        outputs: Names of the requested outputs.
        request: The decoded request, without texts. It may still be found invalid.
        model: The model.
        sizes: Size of each symbolic axis that the request pads to. An axis that is not here is as long as its
            longest sequence.
        field: What the size depends on, for errors.
        id_bytes: Size of the request's id.
        allowance: What the response may take. The memory of padding is reserved.

    Returns:
        Their shapes, padding included, by name; and the datatype and content of those that describe texts.

    Raises:
        LimitExceededError: The response would be too large.
        OverloadedError: The memory of the padding, or of the tokens, is not available.
    """
    lengths = {
        str(spec.axes[1]): request.inputs[spec.name].lengths
        for spec in reversed(model.inputs)
        if spec.name in request.inputs
    }
    batch = max(map(len, lengths.values()), default=0)
    padded = {axis: sizes.get(axis, max(own, default=0)) for axis, own in lengths.items()}
    is_padded = any(own.count(padded[axis]) < len(own) for axis, own in lengths.items())
    shapes, size, unpadded = dict[str, Shape](), 0, 0
    for name in outputs:
        if name == TOKENS and has_tokens(model):
            shapes[name] = ()  # in its place
            continue
        spec = model.outputs.get(name, LENGTHS_SPEC)
        named = {**padded, BATCH_AXIS: batch}
        shape = tuple([named.get(axis, 0) if isinstance(axis, str) else axis for axis in spec.axes])
        shapes[name] = (batch, request.dimensions) if name == EMBEDDING and request.dimensions else shape
        size += output_bytes(name, model, shapes[name])
        if is_padded:
            fixed = [axis for axis in spec.axes[1:] if isinstance(axis, int)]
            columns = [lengths[axis] for axis in spec.axes[1:] if axis in lengths]
            rows = sum(map(math.prod, zip(*columns, strict=False))) if columns else batch
            unpadded += output_bytes(name, model, (rows, *fixed))
    if size + id_bytes > (most := allowance.limits.max_result_bytes):
        says = f"the response would have {size + id_bytes} bytes with padding; the limit is {most}"
        raise LimitExceededError(field, says)
    if is_padded and size > unpadded:
        # The outputs are copied to rectangles, which are then copied to the response.
        allowance.reserve(size + size - unpadded)
    contents = {}
    if LENGTHS in shapes and LENGTHS not in model.outputs:
        own = next(iter(request.inputs.values())).lengths if request.inputs else ()
        contents[LENGTHS] = DATATYPES[np.dtype(np.int64)], np.array(own, np.int64).tobytes()
    if TOKENS in shapes and has_tokens(model):
        length = sizes.get(str(model.inputs[0].axes[1]), 0)
        shapes[TOKENS], tokens = token_texts(request, model, length, allowance)
        contents[TOKENS] = BYTES, tokens
    return shapes, contents


def known(request: Request, model: LoadedModel) -> bytes:
    """What is known of the response to a request before the run, beside its outputs: a ModelInferResponse."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.version)
    if request.truncated:
        response.parameters[TRUNCATED].string_param = ",".join(map(str, request.truncated))
    return response.SerializeToString()


def output_bytes(name: str, model: LoadedModel, shape: Shape, wire: WireFloat = WireFloat.FP32) -> int:
    """Size of an output of a shape in the type in which it is sent, in bytes."""
    data_type = model.outputs.get(name, LENGTHS_SPEC).data_type
    dtype = wire.value if data_type == "float32" else np.dtype(data_type)
    return math.prod(shape) * dtype.itemsize


def token_texts(
    request: Request, model: LoadedModel, length: int, allowance: Allowance
) -> tuple[Shape, bytes]:
    """The shape (B, T) and the content of the output `tokens`.

    Args:
        request: A request with token ids.
        model: Its model, which takes text.
        length: Tokens of each sequence with padding; 0 for those of the longest.
        allowance: What the response may take.

    Raises:
        LimitExceededError: The texts would be too large.
        OverloadedError: Their memory is not available.
    """
    ids, encoder = request.inputs.get(model.inputs[0].name), model.text_encoder
    if ids is None or encoder is None or ids.rows.dtype.kind not in "iu":
        return (0, 0), b""  # the request is refused when it is validated
    length = length or max(ids.lengths, default=0)
    # A text has far fewer different tokens than tokens, and so have all texts of a request.
    different, indices = np.unique(ids.rows, return_inverse=True)
    encoded = [text.encode(errors="replace") for text in encoder.texts_of(different.tolist())]
    elements = [SIZE.pack(len(text)) + text for text in encoded]
    sizes = np.array([len(element) for element in elements], np.int64)
    padding = len(ids.lengths) * length - len(ids.rows)
    size = int(sizes[indices].sum()) + padding * SIZE.size
    if size > (most := allowance.limits.max_result_bytes):
        raise LimitExceededError(f"outputs[{TOKENS}]", f"would have {size} bytes; the limit is {most}")
    allowance.reserve(size)
    parts, tokens = [], iter(indices.tolist())
    for own in ids.lengths:
        parts += [elements[index] for index in islice(tokens, own)]
        parts.append(EMPTY * (length - own))
    return (len(ids.lengths), length), b"".join(parts)


def encode(
    result: Result,
    known: bytes,
    shapes: Mapping[str, Shape],
    types: Mapping[str, WireFloat],
    regions: Mapping[str, RegionSlice],
    contents: Mapping[str, tuple[str, bytes]],
) -> list[Piece]:
    """A response without its id, with one raw entry for each requested output.

    Args:
        result: The outputs of each sequence.
        known: The result of `known`.
        shapes: The shapes of `layout`.
        types: The type in which outputs of real numbers are sent, by name.
        regions: Where outputs are written to shared memory, by name. Their raw entries are empty.
        contents: The contents of `layout`.

    Raises:
        InvalidRequestError: A region of shared memory has become smaller.
    """
    response, raw = pb.ModelInferResponse(), list[Piece]()
    for name, shape in shapes.items():
        described = response.outputs.add(name=name, shape=shape)
        own: Piece
        if name in contents:
            described.datatype, own = contents[name]
            size = len(own)
        else:
            arrays, wire = result.outputs[name], types[name]
            is_padded = any(array.shape != shape[1:] for array in arrays)
            own = Output(name, wire, shape[1:] if is_padded else None)
            described.datatype, size = datatype_of(arrays[0], wire), own.size(arrays)
        if name in regions:
            region, offset, space = regions[name]
            content = [own] if isinstance(own, bytes) else to_bytes(result.outputs[name], own.wire, own.shape)
            region.write(name, offset, content)
            described.parameters[parameters.REGION].string_param = region.name
            described.parameters[parameters.REGION_OFFSET].int64_param = offset
            described.parameters[parameters.REGION_SIZE].int64_param = space
            own, size = b"", 0
        raw += [head(RAW_OUTPUT_CONTENTS, size), own]
    return [known + response.SerializeToString(), *raw]
