"""Inputs and outputs of attention.v1 by name: those of any model, with the axes that its manifest states."""

import math
from collections.abc import Sequence
from itertools import chain

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS
from attention_serving.artifact.manifest import ATTENTION_MASK, GraphKind
from attention_serving.protos.attention.v1 import attention_pb2 as pb
from attention_serving.server.api import inputs
from attention_serving.server.api.attention.codec import DATA_TYPES, UINT32, elements, facts
from attention_serving.server.api.protobuf_bytes import Parsed, head
from attention_serving.server.api.tensors import Allowance, Output, Piece, Reply, Shape, datatype_of
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, DecodedRequest, Ragged, Result

OUTPUTS = (pb.AttendResponse.OUTPUTS_FIELD_NUMBER,)
DATA = (pb.NamedTensors.DATA_FIELD_NUMBER,)
BESIDE_INPUTS = frozenset(
    {"id", "model_name", "model_version", "output_data_type", "inputs", "output_names", "context_id"}
)
# No tensor of a model has more axes.
MAX_AXES = 32


def decode(
    parsed: Parsed[pb.AttendRequest],
    model: LoadedModel,
    deadline: float,
    allowance: Allowance,
    wire: str = "FP32",
) -> tuple[DecodedRequest, Reply]:
    """Decodes a request that names its inputs. Its arrays share memory with the message where they can.

    Raises:
        InvalidRequestError: The message contradicts itself, or names what the model does not have.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory for its numbers is not available.
    """
    message, rows, mask, has_batch = parsed.message, dict[str, Ragged](), dict[str, _Sent](), True
    _check_alone(parsed)
    names = _output_names(message, model)
    for index, sent in enumerate(message.inputs):
        name = sent.name
        is_mask = name == ATTENTION_MASK and name not in model.inputs_by_name
        is_mask = is_mask and GraphKind.MASK in model.manifest.graphs
        rank = 0 if is_mask else len(model.input(name).axes) - 1
        inputs.check_once(name, {**rows, **mask})
        shapes, array = _tensors(sent, index, parsed, allowance)
        if is_mask:
            mask[name] = shapes, array
            continue
        has_batch &= len(shapes[0]) == rank + 1
        rows[name] = inputs.ragged(name, shapes, array, rank, allowance.limits)
    request = DecodedRequest(
        inputs=rows,
        mask=inputs.mask(*mask[ATTENTION_MASK], model, rows, has_batch=has_batch) if mask else None,
        return_weights=ATTENTION_WEIGHTS in names and ATTENTION_WEIGHTS not in model.default_outputs,
        return_tokens=CONTEXT_VECTORS in names,
        deadline=deadline,
    )
    prefix = facts(request, model)
    return request, Reply(lambda result: [prefix, *_pieces(result, names, wire, has_batch=has_batch)])


# The shape of each tensor of an input, and the elements of all of them.
_Sent = tuple[list[Shape], Array]


def _check_alone(parsed: Parsed[pb.AttendRequest]) -> None:
    """The inputs are named, or they are in the other fields."""
    fields = {field.name for field, _ in parsed.message.ListFields()} | {path[0] for path in parsed.places}
    for name in sorted(map(str, fields - BESIDE_INPUTS)):
        raise InvalidRequestError(name, "cannot be combined with inputs, which name every input")


def _output_names(message: pb.AttendRequest, model: LoadedModel) -> Sequence[str]:
    names = list(message.output_names)
    for at, name in enumerate(names):
        if name not in model.outputs:
            outputs = ", ".join(model.outputs)
            raise InvalidRequestError("output_names", f"has {name!r}; must be one of {outputs}")
        if name in names[:at]:
            raise InvalidRequestError("output_names", f"has {name!r} twice; each must be requested once")
    return names or model.default_outputs


def _tensors(
    sent: pb.NamedTensors, index: int, parsed: Parsed[pb.AttendRequest], allowance: Allowance
) -> _Sent:
    """The tensors of one input, given with its index."""
    name, count = sent.name, sent.num_tensors
    if count < 1:
        raise InvalidRequestError(name, "contains 0 tensors; at least one is required")
    allowance.limits.check_sequences(name, count)
    packed = parsed.numbers(UINT32, "inputs", index, "shapes")
    size = len(packed)
    rank, remainder = divmod(size, count)
    if remainder or rank > MAX_AXES:
        message = f"has {size} sizes for {count} tensors; each has as many, {MAX_AXES} at most"
        raise InvalidRequestError(name, message)
    sizes = packed.array().tolist()
    if 0 in sizes:
        raise InvalidRequestError(name, f"tensor {sizes.index(0) // rank} has an axis without elements")
    shapes = [tuple(sizes[rank * at : rank * (at + 1)]) for at in range(count)]
    total, data = sum(map(math.prod, shapes)), parsed.last("inputs", index, "data")
    return shapes, elements(name, sent.data_type, data, (total,), allowance)


def _pieces(result: Result, names: Sequence[str], wire: str, *, has_batch: bool) -> list[Piece]:
    pieces: list[Piece] = []
    for name in names:
        arrays, output = result.outputs[name], Output(name, wire)
        shapes = [(len(arrays), *arrays[0].shape)] if has_batch else [array.shape for array in arrays]
        tensors = pb.NamedTensors(
            name=name,
            data_type=DATA_TYPES[datatype_of(arrays[0], wire)],
            num_tensors=len(shapes),
            shapes=chain.from_iterable(shapes),
        ).SerializeToString()
        size = output.size(arrays)
        before = tensors + head(DATA, size)
        pieces += [head(OUTPUTS, len(before) + size) + before, output]
    return pieces
