"""Responses of the Open Inference Protocol: their shapes before the run, and their bytes after it."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.encoder import EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.engine.dimensions import DTYPES, MAX_CACHED_SEQUENCES
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.model_caches import cached_by_model
from attention_serving.server.engine.types import Array, Request, Result
from attention_serving.server.rpc.open_inference.parameters import REGION, REGION_OFFSET, REGION_SIZE
from attention_serving.server.rpc.open_inference.tensors import BYTES
from attention_serving.server.rpc.open_inference.token_texts import TOKENS
from attention_serving.server.rpc.protobuf_bytes import Buffer, field
from attention_serving.server.rpc.shared_memory import Region
from attention_serving.server.rpc.tensors import Shape, WireFloat, datatype_of, to_bytes

# The parameter of a response that names the texts that were cut, by their indices.
TRUNCATED = "truncated"
# The output with the number of tokens of each text.
LENGTHS = "lengths"
LENGTHS_TYPE = np.dtype("<i8")
CACHED_MODELS = CACHED_SHAPES = 1024
RAW_OUTPUT_CONTENTS = (pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,)
FP32_ONLY: Mapping[str, WireFloat] = {}
# Name, datatype and shape of an output, and its place in shared memory: region, offset and size.
_Described = tuple[str, str, Shape, tuple[str, int, int] | None]
# The length of each sequence.
Lengths = tuple[int, ...]


class ResponseLayout(NamedTuple):
    """What a response will contain.

    Attributes:
        shapes: Shape of each requested output by name, padding included, in the order of the request.
        size: Size of all of them, in bytes.
        padding: How much of the size is padding.
    """

    shapes: Mapping[str, Shape]
    size: int
    padding: int


@cached_by_model(CACHED_MODELS)
def default_outputs(model: LoadedModel) -> tuple[str, ...]:
    """Outputs of a request that names none. Texts differ in length, so their lengths are an output."""
    return (*model.default_outputs, LENGTHS) if model.text_encoder else tuple(model.default_outputs)


def layout(
    outputs: Sequence[str], request: Request, model: LoadedModel, sizes: Mapping[str, int]
) -> ResponseLayout:
    """The layout of the response to a request, which may still be found invalid.

    Args:
        outputs: Names of the requested outputs.
        request: The decoded request, without texts.
        model: The model.
        sizes: Size of each symbolic axis that the request pads to. An axis that is not here is as long as its
            longest sequence.
    """
    lengths = {
        str(spec.axes[1]): request.inputs[spec.name].lengths
        for spec in reversed(model.inputs)
        if spec.name in request.inputs
    }
    few = all(len(own) <= MAX_CACHED_SEQUENCES for own in lengths.values())
    compute = _cached_layout if few else _layout
    return compute(model, tuple(outputs), tuple(lengths.items()), tuple(sizes.items()), request.dimensions)


def _layout(
    model: LoadedModel,
    outputs: tuple[str, ...],
    axis_lengths: tuple[tuple[str, Lengths], ...],
    axis_sizes: tuple[tuple[str, int], ...],
    dimensions: int,
) -> ResponseLayout:
    lengths, sizes = dict(axis_lengths), dict(axis_sizes)
    batch = max(map(len, lengths.values()), default=0)
    longest = {axis: sizes.get(axis, max(own, default=0)) for axis, own in lengths.items()}
    shapes = {name: _shape(name, model, {**longest, BATCH_AXIS: batch}) for name in outputs}
    if dimensions and EMBEDDING in shapes:
        shapes[EMBEDDING] = (batch, dimensions)
    size = sum([_itemsize(name, model) * math.prod(shape) for name, shape in shapes.items()])
    if all(own.count(longest[axis]) == len(own) for axis, own in lengths.items()):
        return ResponseLayout(shapes, size, 0)
    return ResponseLayout(shapes, size, size - sum(_unpadded(name, model, lengths) for name in outputs))


_cached_layout = cached_by_model(CACHED_SHAPES)(_layout)


def _shape(name: str, model: LoadedModel, sizes: Mapping[str, int]) -> Shape:
    if name == LENGTHS:
        return (sizes[BATCH_AXIS],)
    axes = model.outputs[name].axes
    return tuple([sizes.get(axis, 0) if isinstance(axis, str) else axis for axis in axes])


def _itemsize(name: str, model: LoadedModel) -> int:
    return LENGTHS_TYPE.itemsize if name == LENGTHS else DTYPES[model.outputs[name].data_type].itemsize


def _unpadded(name: str, model: LoadedModel, lengths: Mapping[str, tuple[int, ...]]) -> int:
    """Size of an output without padding, in bytes."""
    if name == LENGTHS:
        return LENGTHS_TYPE.itemsize * max(map(len, lengths.values()))
    axes = model.outputs[name].axes[1:]
    fixed = math.prod(axis for axis in axes if isinstance(axis, int))
    columns = [lengths[axis] for axis in axes if isinstance(axis, str) and axis in lengths]
    rows = sum(map(math.prod, zip(*columns, strict=False))) if columns else max(map(len, lengths.values()))
    return _itemsize(name, model) * fixed * rows


class TextFacts(NamedTuple):
    """What a response says about the texts of its request.

    Attributes:
        lengths: Number of tokens of each text.
        truncated: Indices of the texts that were cut.
        tokens: The elements of the output `tokens`, if it is requested.
    """

    lengths: Lengths
    truncated: tuple[int, ...] = ()
    tokens: bytes | None = None


class OutputRegion(NamedTuple):
    """Where an output is written to shared memory.

    Attributes:
        region: The region.
        offset: Where the output begins in the region, in bytes.
        size: Its size in bytes.
    """

    region: Region
    offset: int
    size: int


MESSAGE_ONLY: Mapping[str, OutputRegion] = {}


def output_bytes(name: str, model: LoadedModel, shape: Shape, types: Mapping[str, WireFloat]) -> int:
    """Size of an output of a shape in the type in which it is sent, in bytes."""
    own = _itemsize(name, model)
    is_real = name != LENGTHS and model.outputs[name].data_type == "float32"
    return math.prod(shape) * (types[name].value.itemsize if name in types and is_real else own)


def encode(
    result: Result,
    shapes: Mapping[str, Shape],
    model: LoadedModel,
    request_id: str,
    types: Mapping[str, WireFloat] = FP32_ONLY,
    regions: Mapping[str, OutputRegion] = MESSAGE_ONLY,
    texts: TextFacts | None = None,
) -> bytes:
    """Serializes a result, with one raw entry for each requested output.

    What describes the outputs is serialized once for all responses of the same shapes.

    Args:
        result: The outputs of each sequence.
        shapes: The shapes of `ResponseLayout`.
        model: The model.
        request_id: The id of the request.
        types: The type in which outputs of real numbers are sent, by name, if it is not FP32.
        regions: Where outputs are written to shared memory, by name. Their raw entries are empty.
        texts: What the response says about texts. Default: the number of rows of the first output.

    Raises:
        InvalidRequestError: A region of shared memory has become smaller.
    """
    described: list[_Described] = []
    contents: list[Buffer] = []
    for name, shape in shapes.items():
        if name == TOKENS and texts and texts.tokens is not None:
            described.append((name, BYTES, shape, None))
            contents += field(RAW_OUTPUT_CONTENTS, [texts.tokens])
            continue
        if name == LENGTHS:
            rows = result.outputs[model.default_outputs[0]]
            counts = texts.lengths if texts else tuple(map(len, rows))
            arrays: list[Array] = [np.array(counts, LENGTHS_TYPE)]
        else:
            arrays = [_padded(array, shape[1:]) for array in result.outputs[name]]
        wire = types.get(name, WireFloat.FP32)
        datatype, own, where = datatype_of(arrays[0], wire), to_bytes(arrays, wire), None
        if name in regions:
            region, offset, size = regions[name]
            region.write(name, offset, own)
            where, own = (region.name, offset, size), []
        described.append((name, datatype, shape, where))
        contents += field(RAW_OUTPUT_CONTENTS, own)
    id_field = pb.ModelInferResponse(id=request_id).SerializeToString() if request_id else b""
    said = _truncated(texts) if texts and texts.truncated else b""
    return b"".join([_description(model.name, model.version, tuple(described)), id_field, said, *contents])


def _truncated(texts: TextFacts) -> bytes:
    """The parameter that names the texts that were cut."""
    response = pb.ModelInferResponse()
    response.parameters[TRUNCATED].string_param = ",".join(map(str, texts.truncated))
    return response.SerializeToString()


@lru_cache(maxsize=CACHED_SHAPES)
def _description(model: str, version: str, outputs: tuple[_Described, ...]) -> bytes:
    """A serialized response without contents."""
    response = pb.ModelInferResponse(model_name=model, model_version=version)
    for name, datatype, shape, where in outputs:
        output = response.outputs.add(name=name, datatype=datatype, shape=shape)
        if where is not None:
            region, offset, size = where
            output.parameters[REGION].string_param = region
            output.parameters[REGION_OFFSET].int64_param = offset
            output.parameters[REGION_SIZE].int64_param = size
    return response.SerializeToString()


def _padded(array: Array, shape: Shape) -> Array:
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])
