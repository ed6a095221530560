"""Inputs and outputs of attention.v1 by name: those of any model, with the axes that its manifest states."""

import math
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS
from attention_serving.artifact.manifest import ATTENTION_MASK, GraphKind
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.api.attention.codec import (
    DATA_TYPES,
    UINT32,
    elements,
    streamed,
)
from attention_serving.server.api.protobuf_bytes import Buffer, Fields, PackedNumbers, last
from attention_serving.server.api.tensors import (
    Allowance,
    Shape,
    WireFloat,
    alternatives,
    datatype_of,
    mask_shapes,
    to_bytes,
)
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, Mask, MaskKind, Ragged, Request, Result

OUTPUTS = (pb.AttendResponse.OUTPUTS_FIELD_NUMBER,)
DATA = (pb.NamedTensors.DATA_FIELD_NUMBER,)
BESIDE_INPUTS = frozenset({"model_name", "model_version", "output_data_type", "inputs", "output_names"})
# No tensor of a model has more axes.
MAX_AXES = 32


class NamedOutputs(NamedTuple):
    """The outputs of a reply.

    Attributes:
        names: Their names, in order.
        has_batch: Whether each is one tensor with the batch axis, rather than one for each sequence.
    """

    names: tuple[str, ...]
    has_batch: bool


def decode(
    message: pb.AttendRequest, model: LoadedModel, deadline: float, fields: Fields, allowance: Allowance
) -> tuple[Request, NamedOutputs]:
    """Decodes a request that names its inputs. Its arrays share memory with the message where they can.

    Raises:
        InvalidRequestError: The message contradicts itself, or names what the model does not have.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    _check_alone(message, fields)
    names = _output_names(message, model)
    takes_mask = GraphKind.MASK in model.manifest.graphs
    inputs: dict[str, Ragged] = {}
    mask, has_batch = None, True
    for index, sent in enumerate(message.inputs):
        name = sent.name
        if name not in model.inputs_by_name and not (takes_mask and name == ATTENTION_MASK):
            takes = f"model {model.name!r} takes {model.input_names}"
            raise InvalidRequestError(name, f"is not an input; {takes}")
        if name in inputs or (mask is not None and name == ATTENTION_MASK):
            raise InvalidRequestError(name, "is sent twice; each input must be sent once")
        shapes, numbers = _tensors(sent, index, fields, allowance)
        if name not in model.inputs_by_name:
            mask = shapes, numbers
            continue
        rank = len(model.inputs_by_name[name].axes) - 1
        is_batch = len(shapes[0]) == rank + 1
        inputs[name] = _ragged(name, shapes, numbers, rank, allowance)
        has_batch &= is_batch
    request = Request(
        inputs=inputs,
        mask=None if mask is None else _mask(*mask, model, inputs, has_batch=has_batch),
        return_weights=ATTENTION_WEIGHTS in names and ATTENTION_WEIGHTS not in model.default_outputs,
        return_tokens=CONTEXT_VECTORS in names,
        deadline=deadline,
    )
    return request, NamedOutputs(names, has_batch)


def _check_alone(message: pb.AttendRequest, fields: Fields) -> None:
    """The inputs are named, or they are in the other fields."""
    found = {field.name for field, _ in message.ListFields()} | {str(path[0]) for path in fields}
    if others := sorted(found - BESIDE_INPUTS):
        raise InvalidRequestError(others[0], "cannot be combined with inputs, which name every input")


def _output_names(message: pb.AttendRequest, model: LoadedModel) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for name in message.output_names:
        if name not in model.outputs:
            known = ", ".join(model.outputs)
            raise InvalidRequestError("output_names", f"has {name!r}; must be one of {known}")
        if name in names:
            raise InvalidRequestError("output_names", f"has {name!r} twice; each must be requested once")
        names[name] = None
    return tuple(names or model.default_outputs)


def _tensors(
    sent: pb.NamedTensors, index: int, fields: Fields, allowance: Allowance
) -> tuple[list[Shape], Array]:
    """The shape of each tensor of one input, given with its index; and the elements of all of them."""
    name, count = sent.name, sent.num_tensors
    if count < 1:
        raise InvalidRequestError(name, "contains 0 tensors; at least one is required")
    allowance.limits.check_sequences(name, count)
    packed = PackedNumbers(fields.get(("inputs", index, "shapes"), ()), UINT32)
    size = len(packed)
    rank, left = divmod(size, count)
    if left or rank > MAX_AXES:
        raise InvalidRequestError(
            name, f"has {size} sizes for {count} tensors; each has as many, {MAX_AXES} at most"
        )
    sizes = packed.array().tolist()
    if 0 in sizes:
        raise InvalidRequestError(name, f"tensor {sizes.index(0) // rank} has an axis without elements")
    shapes = [tuple(sizes[rank * at : rank * (at + 1)]) for at in range(count)]
    total = sum(map(math.prod, shapes))
    data = last(fields, ("inputs", index, "data"))
    return shapes, elements(name, sent.data_type, data, (total,), allowance)


def _ragged(name: str, shapes: list[Shape], numbers: Array, rank: int, allowance: Allowance) -> Ragged:
    """Sequences (T, ...) of `rank` axes, whose rows all have the same shape: a tensor each, or one batch."""
    if len(shapes) == 1 and len(shapes[0]) == rank + 1:
        allowance.limits.check_sequences(name, shapes[0][0])
        shapes = [shapes[0][1:]] * shapes[0][0]
    if (found := len(shapes[0])) != rank:
        raise InvalidRequestError(
            name, f"has a tensor of {found} axes; one sequence has {rank}, and one batch has {rank + 1}"
        )
    lengths, (_, *width) = [shape[0] for shape in shapes], shapes[0]
    for index, (_, *own) in enumerate(shapes):
        if own != width:
            raise InvalidRequestError(
                name, f"sequence {index} has rows of shape {own}; those of sequence 0 have {width}"
            )
    return Ragged(numbers.reshape(sum(lengths), *width), tuple(lengths))


def _mask(
    shapes: list[Shape], flags: Array, model: LoadedModel, inputs: Mapping[str, Ragged], *, has_batch: bool
) -> Mask | None:
    """The mask of each sequence: (Tk,), (Tq, Tk), (1, Tq, Tk) or (H, Tq, Tk).

    None if the model's own inputs are missing, which is refused later.
    """
    name = ATTENTION_MASK
    lengths = {spec.axes[1]: inputs[spec.name].lengths for spec in model.inputs if spec.name in inputs}
    *_, query_axis, key_axis = model.manifest.graphs[GraphKind.MASK].inputs[-1].axes
    if query_axis not in lengths or key_axis not in lengths:
        return None
    if flags.dtype != np.bool_:
        raise InvalidRequestError(name, f"is {flags.dtype.name}; the model takes bool")
    if has_batch and len(shapes) == 1 and shapes[0]:
        shapes = [shapes[0][1:]] * shapes[0][0]
    if len(shapes) != len(lengths[query_axis]):
        count = len(lengths[query_axis])
        raise InvalidRequestError(name, f"contains {len(shapes)} masks for {count} sequences")
    kinds = set[MaskKind]()
    for shape, queries, keys in zip(shapes, lengths[query_axis], lengths[key_axis], strict=False):
        expected = mask_shapes(model.manifest, queries, keys)
        if shape not in expected:
            raise InvalidRequestError(
                name, f"has a mask {shape}; that sequence takes {alternatives(expected)}"
            )
        kinds.add(expected[shape])
    if len(kinds) > 1:
        raise InvalidRequestError(name, "has masks of different numbers of axes; all must have the same")
    return Mask(kinds.pop(), flags)


def encode(
    result: Result,
    model: LoadedModel,
    outputs: NamedOutputs,
    wire: WireFloat = WireFloat.FP32,
    stream_id: str | None = None,
) -> bytes:
    """Serializes the outputs of a result as an AttendResponse, or as an AttendStreamResponse with its id."""
    named = pb.AttendResponse(model_name=model.name, model_version=model.version)
    parts: list[Buffer] = [named.SerializeToString()]
    for name in outputs.names:
        arrays = result.outputs[name]
        tensors = pb.NamedTensors(name=name, data_type=DATA_TYPES[datatype_of(arrays[0], wire)])
        shapes = [(len(arrays), *arrays[0].shape)] if outputs.has_batch else [array.shape for array in arrays]
        tensors.num_tensors = len(shapes)
        tensors.shapes.extend(chain.from_iterable(shapes))
        content = protobuf_bytes.field(DATA, to_bytes(arrays, wire))
        parts += protobuf_bytes.field(OUTPUTS, [tensors.SerializeToString(), *content])
    return b"".join(parts) if stream_id is None else streamed(stream_id, parts)
