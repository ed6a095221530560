"""Responses of the Open Inference Protocol: their shapes before the run, and their bytes after it."""

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference import parameters
from attention_serving.server.api.open_inference.tensors import BYTES
from attention_serving.server.api.protobuf_bytes import Parsed, head
from attention_serving.server.api.shared_memory import SharedMemory, Slice
from attention_serving.server.api.tensors import (
    DATATYPES,
    FLOAT32,
    FLOATS,
    Allowance,
    Output,
    Piece,
    Shape,
    datatype_of,
)
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import DecodedRequest, Result

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


class Planned(NamedTuple):
    """A requested output, as it is known before the run.

    Attributes:
        name: Its name.
        wire: The type in which real numbers are sent.
        shape: Its shape, padding included.
        content: The datatype and the content of an output that describes texts; None for one of the model.
        where: Where in shared memory it is written; None if it is sent. Its raw entry is then empty.
    """

    name: str
    wire: str
    shape: Shape
    content: tuple[str, bytes] | None
    where: Slice | None


def output_names(message: pb.ModelInferRequest, model: LoadedModel) -> Sequence[str]:
    """The names of the requested outputs, in their order.

    Raises:
        InvalidRequestError: The model has no such output, or it is requested twice.
    """
    names = default_outputs(model)
    if not message.outputs:
        return names
    outputs = list(dict.fromkeys((*names, *model.outputs, *([TOKENS] if model.text_encoder else []))))
    requested = [output.name for output in message.outputs]
    for index, name in enumerate(requested):
        if name not in outputs:
            problem = "is unknown; must be one of"
            if name == EMBEDDING and model.encoder is None:
                problem = f"model {model.name!r} is not a text encoder; its outputs are"
            raise InvalidRequestError(f"outputs[{name}]", f"{problem} {', '.join(outputs)}")
        if name in requested[:index]:
            twice = "is requested twice; each output must be requested once"
            raise InvalidRequestError(f"outputs[{name}]", twice)
    return requested


def plan(
    requested: Sequence[str],
    parsed: Parsed[pb.ModelInferRequest],
    request: DecodedRequest,
    model: LoadedModel,
    sizes: Mapping[str, int],
    allowance: Allowance,
    memory: SharedMemory,
) -> list[Planned]:
    """What is known of the outputs of a response, whose size is checked before the request is queued.

    Args:
        requested: The result of `output_names`.
        parsed: The request as it was received, with the parameters of its outputs.
        request: The decoded request, without texts. It may still be found invalid.
        model: The model.
        sizes: Size of each symbolic axis that the request pads to. An axis that is not here is as long as its
            longest sequence.
        allowance: What the response may take. The memory of padding is reserved.
        memory: The regions of shared memory that outputs may be written to.

    Raises:
        InvalidRequestError: A parameter of an output is wrong, or it does not fit into shared memory.
        LimitExceededError: The response would be too large.
        OverloadedError: The memory of the padding, or of the tokens, is not available.
        RegionNotFoundError: An output is to be written to shared memory that is not registered.
        UnsupportedError: An output is to be written to shared memory, which is switched off.
    """
    lengths = {
        str(spec.axes[1]): request.inputs[spec.name].lengths
        for spec in reversed(model.inputs)
        if spec.name in request.inputs
    }
    batch = max(map(len, lengths.values()), default=0)
    longest = {axis: max(ends, default=0) for axis, ends in lengths.items()}
    padded = {**longest, **sizes, BATCH_AXIS: batch}
    outputs, size = list[Planned](), 0
    sent_parameters = {output.name: parameters.read(output.parameters) for output in parsed.message.outputs}
    for name in requested:
        field, output_parameters = f"outputs[{name}]", sent_parameters.get(name, {})
        wire = parameters.output_type(field, output_parameters)
        where, content = parameters.place(field, output_parameters, memory), None
        if name == TOKENS and name not in model.outputs:
            shape, tokens = token_texts(request, model, sizes.get(str(model.inputs[0].axes[1]), 0), allowance)
            content, sent, result_bytes = (BYTES, tokens), len(tokens), 0  # they have a separate limit
        else:
            spec = model.outputs.get(name, LENGTHS_SPEC)
            shape = tuple([padded.get(axis, 0) if isinstance(axis, str) else axis for axis in spec.axes])
            if name == EMBEDDING and request.dimensions:
                shape = (batch, request.dimensions)
            dtype, count = np.dtype(spec.data_type), math.prod(shape)
            if spec is LENGTHS_SPEC:
                rows = next(iter(request.inputs.values())).lengths if request.inputs else ()
                content = DATATYPES[dtype], np.array(rows, dtype).tobytes()
            result_bytes = count * dtype.itemsize
            sent = count * FLOATS[wire].itemsize if dtype == FLOAT32 else result_bytes
        if where is not None:
            where = where.shorten(sent)
        size += result_bytes
        outputs.append(Planned(name, wire, shape, content, where))
    with_id = size + len(parsed.id.encode())
    if with_id > (most := allowance.limits.max_result_bytes):
        field = f"outputs[{ATTENTION_WEIGHTS}]" if request.return_weights else parsed.message.inputs[0].name
        message = f"the response would have {with_id} bytes with padding; the limit is {most}"
        raise LimitExceededError(field, message)
    if any(min(ends, default=0) < padded[axis] for axis, ends in lengths.items()):
        # The outputs are copied to rectangles, which are then copied to the response.
        allowance.reservation.add(2 * size)
    return outputs


def prefix(request: DecodedRequest, model: LoadedModel) -> bytes:
    """The part of a response that does not depend on the run, a serialized ModelInferResponse."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.version)
    response.parameters[parameters.MODEL_DIGEST].string_param = model.digest
    if request.truncated:
        response.parameters[TRUNCATED].string_param = ",".join(map(str, request.truncated))
    return response.SerializeToString()


def token_texts(
    request: DecodedRequest, model: LoadedModel, length: int, allowance: Allowance
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
    allowance.reservation.add(size)
    parts, tokens = [], iter(indices.tolist())
    for count in ids.lengths:
        parts += [elements[index] for index in islice(tokens, count)]
        parts.append(EMPTY * (length - count))
    return (len(ids.lengths), length), b"".join(parts)


def encode(result: Result, prefix: bytes, outputs: Sequence[Planned]) -> list[Piece]:
    """A response without its id, with one raw entry for each requested output.

    Args:
        result: The outputs of each sequence.
        prefix: The result of `prefix`.
        outputs: The result of `plan`.

    Raises:
        InvalidRequestError: A region of shared memory has become smaller.
    """
    response, raw = pb.ModelInferResponse(), list[Piece]()
    for name, wire, shape, content, where in outputs:
        tensor = response.outputs.add(name=name, shape=shape)
        piece: Piece
        if content is not None:
            tensor.datatype, piece = content
            size = len(piece)
        else:
            arrays = result.outputs[name]
            is_padded = any(array.shape != shape[1:] for array in arrays)
            piece = Output(name, wire, shape[1:] if is_padded else None)
            tensor.datatype, size = datatype_of(arrays[0], wire), piece.size(arrays)
        if where is not None:
            where.write([piece] if isinstance(piece, bytes) else piece.parts(arrays))
            tensor.parameters[parameters.REGION].string_param = where.region.name
            tensor.parameters[parameters.REGION_OFFSET].int64_param = where.offset
            tensor.parameters[parameters.REGION_SIZE].int64_param = where.size
            piece, size = b"", 0
        raw += [head(RAW_OUTPUT_CONTENTS, size), piece]
    return [prefix + response.SerializeToString(), *raw]
