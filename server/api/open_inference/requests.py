"""Requests of the Open Inference Protocol as the engine's.

The protocol's tensors are rectangular: (B, T, ...). If a request contains key lengths, its padding is
removed before anything is computed, and the outputs are padded with zeros to the request's length.

A parameter that would change the meaning of the result is refused, never ignored. Others, which tell how
clients encode or trace, have no effect.
"""

import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS
from attention_serving.artifact.manifest import ATTENTION_MASK, BATCH_AXIS, GraphKind
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.shared_memory import SharedMemory, Slice
from attention_serving.server.api.tensors import (
    DTYPE_BY_NAME,
    WIRE_DTYPE_BY_NAME,
    Allowance,
    build_mask,
    check_once,
    from_bytes,
)
from attention_serving.server.api.wire import Buffer, Parsed
from attention_serving.server.engine.errors import InvalidRequestError, quoted
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import check_dimensions
from attention_serving.server.engine.requests.tokenizer import INLINE_MAX_BYTES, INLINE_MAX_TEXTS, TEXT, Side
from attention_serving.server.engine.requests.validation import INPUT_KIND, tokenize_texts
from attention_serving.server.engine.types import Array, DecodedRequest, Mask, Ragged, Text
from attention_serving.server.transport.call import deadline_after

T = TypeVar("T")
BYTES = "BYTES"
KNOWN_DATATYPES = (*WIRE_DTYPE_BY_NAME, BYTES)
# The typed field for elements of each type. FP16 and BF16 have none: they are sent as raw contents.
CONTENTS = {
    **{name: f"{name.lower()}_contents" for name in ("BOOL", "INT64", "UINT64", "FP32", "FP64", BYTES)},
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
}
# The type of a typed field is the widest that it has elements of, which comes last.
CONTENT_TYPES = {CONTENTS[name]: dtype for name, dtype in DTYPE_BY_NAME.items()}
TYPED_FIELDS = [field.name for field in pb.InferTensorContents.DESCRIPTOR.fields]
RAW_CONTENTS = "raw_input_contents"
# The fields that are extracted from requests.
PATHS = (RAW_CONTENTS, *[f"inputs.contents.{name}" for name in TYPED_FIELDS])
# NumPy's own limit.
MAX_AXES = 64
TEXT_PAIR = "text_pair"
# Inputs that a request may have in addition to those of its model.
OTHER_INPUTS = (TEXT, TEXT_PAIR, ATTENTION_MASK)
TIMEOUT = "timeout"
# The parameters of an extension of the protocol that this server lacks.
SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
# A parameter of this server for embeddings: the number of leading elements of each.
DIMENSIONS = "dimensions"
# Parameters of this server for texts, and their values.
INPUT_KINDS = ("query", "document", "classification", "clustering")
TRUNCATION_SIDE, SIDES = "truncation_side", get_args(Side)
# Where a tensor is in shared memory.
REGION, REGION_OFFSET = "shared_memory_region", "shared_memory_offset"
REGION_SIZE = "shared_memory_byte_size"
InputTensor = pb.ModelInferRequest.InferInputTensor
# Messages with the oneof `parameter_choice`, by name.
Parameters = Mapping[str, Any]
# The length of each sequence without its padding, by symbolic axis.
Lengths = Mapping[str, tuple[int, ...]]


def is_slow(parsed: Parsed[pb.ModelInferRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, or many texts."""
    for tensor in parsed.message.inputs:
        if tensor.datatype == BYTES:
            has_many = math.prod(islice(tensor.shape, MAX_AXES)) > INLINE_MAX_TEXTS
            if has_many or len(parsed.data) > INLINE_MAX_BYTES:
                return True
    return False


def decode(
    parsed: Parsed[pb.ModelInferRequest],
    model: LoadedModel,
    outputs: Collection[str],
    deadline: float,
    allowance: Allowance,
    memory: SharedMemory,
) -> tuple[DecodedRequest, dict[str, int]]:
    """Decodes a request. Its arrays share memory with raw contents; its texts are token ids.

    Args:
        parsed: The request.
        model: The model that it names.
        outputs: The names of the requested outputs.
        deadline: The call's deadline on `time.monotonic`'s clock.
        allowance: What the request may take.
        memory: The regions of shared memory that inputs may be in.

    Returns:
        The request, and the size of each symbolic axis of its inputs, padding included.

    Raises:
        InvalidRequestError: The message contradicts itself or does not fit the model.
        LimitExceededError: The message contains too much.
        OverloadedError: The memory of the request is not available.
        RegionNotFoundError: An input is in shared memory that is not registered.
        UnsupportedError: An input is in shared memory, which is switched off.
    """
    message, parameters = parsed.message, parsed.message.parameters
    for name in SEQUENCE:
        if name in parameters and value_of(parameters[name]):
            no_state = "is not supported by this server: its models keep no state"
            raise InvalidRequestError(f"parameters[{name}]", no_state)
    names = (*OTHER_INPUTS, *model.axes_of_lengths)
    if (count := len(message.inputs)) > (most := len(model.inputs) + len(names)):
        raise InvalidRequestError("inputs", f"has {count} entries; the model takes {most} at most")
    arrays = decode_tensors(parsed, allowance, memory)
    extras = {name: arrays.pop(name) for name in names if name in arrays}
    texts, second_texts = _take_texts(extras, TEXT), _take_texts(extras, TEXT_PAIR)
    if texts and extras:
        raise InvalidRequestError(next(iter(extras)), "cannot be combined with text; send token ids instead")
    sizes, mask = _check_axis_sizes(arrays, model), extras.pop(ATTENTION_MASK, None)
    lengths = _lengths(extras, sizes, model) if extras else {}
    padded, inputs = dict[str, Ragged](), dict[str, Ragged]()
    for name, array in arrays.items():
        axis = str(model.inputs_by_name[name].length_axis)
        rows = array.shape[1:2] or (1,)  # a scalar is one row
        inputs[name] = padded[name] = Ragged(array.reshape(-1, *array.shape[2:]), rows * len(array))
        if axis in lengths:
            inputs[name] = Ragged(np.concatenate(_unpad(array, (axis,), lengths)), lengths[axis])
    dimensions = parameter(parameters, DIMENSIONS, int, "a positive integer")
    if dimensions is not None:
        check_dimensions(dimensions, model)
    kind = "an integer: microseconds, or 0 for no timeout"
    microseconds = parameter(parameters, TIMEOUT, int, kind) or 0
    decoded = DecodedRequest(
        inputs=inputs,
        texts=texts,
        second_texts=second_texts,
        mask=None if mask is None else _decode_mask(mask, model, padded, lengths),
        return_weights=ATTENTION_WEIGHTS in outputs and ATTENTION_WEIGHTS not in model.default_outputs,
        output_names=outputs,
        dimensions=dimensions or 0,
        prompt=parameter(parameters, "prompt", str, "a string"),
        truncate=parameter(parameters, "truncate", bool, "a boolean"),
        truncation_side=_choice(parameters, TRUNCATION_SIDE, SIDES),
        input_kind=_choice(parameters, INPUT_KIND, INPUT_KINDS) or "",
        deadline=min(deadline, deadline_after(microseconds / 1e6)) if microseconds > 0 else deadline,
    )
    return tokenize_texts(decoded, model, allowance.limits, allowance.reservation), sizes


def decode_tensors(
    parsed: Parsed[pb.ModelInferRequest], allowance: Allowance, memory: SharedMemory
) -> dict[str, Array]:
    """Decodes the inputs of a request, by name. BYTES become arrays of `bytes` objects or views.

    Raises:
        InvalidRequestError: An input contradicts itself, is repeated, or is not in a known form.
        LimitExceededError: An input is too large.
        OverloadedError: The memory for its numbers is not available.
        RegionNotFoundError: An input is in shared memory that is not registered.
        UnsupportedError: An input is in shared memory, which is switched off.
    """
    contents = parsed.contents(RAW_CONTENTS)
    raw, tensors, shared = iter(contents), dict[str, Array](), 0
    for index, tensor in enumerate(parsed.message.inputs):
        name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape[: MAX_AXES + 1])
        check_once(name, tensors)
        _check_tensor(tensor, allowance.limits)
        fields = [
            field for field in TYPED_FIELDS if ("inputs", index, "contents", field) in parsed.byte_ranges
        ]
        data: Buffer | None
        if (location := find_slice(name, tensor.parameters, memory)) is not None:
            allowance.take(name, location.size)
            data = location.read()
            shared += 1
        elif not contents:
            tensors[name] = _decode_contents(tensor, fields, parsed, index, allowance).reshape(shape)
            continue
        elif fields:
            raise InvalidRequestError(name, "has contents, but the request has raw_input_contents too")
        elif (data := next(raw, None)) is None:
            raise InvalidRequestError(RAW_CONTENTS, f"has no entry for input {name!r}")
        if datatype == BYTES:
            tensors[name] = _bytes_array(tensor, split_bytes(name, data), allowance.limits).reshape(shape)
        else:
            tensors[name] = from_bytes(name, data, datatype, shape, allowance)
    if next(raw, None) is not None:
        elsewhere = " outside shared memory" if shared else ""
        counts = f"has {len(contents)} entries; the request has {len(tensors) - shared} inputs{elsewhere}"
        raise InvalidRequestError(RAW_CONTENTS, counts)
    return tensors


def _check_tensor(tensor: InputTensor, limits: Limits) -> None:
    """An input is of a known type, and has one element or more."""
    name, shape = tensor.name, tensor.shape
    if tensor.datatype not in KNOWN_DATATYPES:
        names = ", ".join(KNOWN_DATATYPES)
        raise InvalidRequestError(name, f"datatype {tensor.datatype!r} is unknown; must be one of {names}")
    if len(shape) > MAX_AXES:
        raise InvalidRequestError(name, f"has {len(shape)} axes; the limit is {MAX_AXES}")
    # If a size was 0, the number of bytes would not bound the others.
    if min(shape, default=1) < 1:
        raise InvalidRequestError(name, f"has shape {list(shape)}; every size must be 1 or more")
    # The first axis counts sequences.
    limits.check_sequences(name, shape[0] if shape else 0)


def _decode_contents(
    tensor: InputTensor, fields: list[str], parsed: Parsed[Any], index: int, allowance: Allowance
) -> Array:
    """The elements of an input from its typed contents, of which some fields are filled."""
    name, datatype = tensor.name, tensor.datatype
    field = CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequestError(name, f"{datatype} must be sent in raw_input_contents")
    if fields and fields != [field]:
        message = f"is {datatype} and fills {', '.join(fields)}; must fill {field} only"
        raise InvalidRequestError(name, message)
    path = ("inputs", index, "contents", field)
    if datatype == BYTES:
        return _bytes_array(tensor, parsed.contents(*path), allowance.limits)
    dtype, wide = DTYPE_BY_NAME[datatype], CONTENT_TYPES[field]
    numbers = parsed.numbers(wide, *path)
    _check_count(tensor, count := len(numbers))
    # The type of the tensor may be narrower than that of the field, which copies the numbers once more.
    allowance.take(name, count * (wide.itemsize + (dtype.itemsize if dtype != wide else 0)))
    array = numbers.array()
    if dtype != wide:
        info: Any = np.iinfo(dtype)
        least, most = array.min(), array.max()
        if not info.min <= least <= most <= info.max:
            wrong = least if least < info.min else most
            message = f"contains {wrong}; {datatype} takes {info.min} to {info.max}"
            raise InvalidRequestError(name, message)
    return array.astype(dtype, copy=False)


def _bytes_array(tensor: InputTensor, elements: Iterable[Buffer], limits: Limits) -> Array:
    """The elements of a BYTES tensor, each of which is a sequence."""
    count = math.prod(tensor.shape)
    limits.check_sequences(tensor.name, count)
    values = list(islice(elements, count + 1))
    _check_count(tensor, len(values))
    return np.fromiter(values, object, count)


def _check_count(tensor: InputTensor, count: int) -> None:
    if count != (expected := math.prod(tensor.shape)):
        number = f"more than {expected}" if tensor.datatype == BYTES and count > expected else count
        raise InvalidRequestError(tensor.name, f"has {number} elements; its shape is {list(tensor.shape)}")


def split_bytes(name: str, data: Buffer) -> Iterator[Buffer]:
    """Elements of a BYTES tensor: for each its length in 4 bytes, little-endian, and its data."""
    view, at = memoryview(data), 0
    while at < len(view):
        start = at + 4
        end = start + struct.unpack_from("<I", view, at)[0] if start <= len(view) else start
        if end > len(view):
            raise InvalidRequestError(name, f"the element at byte {at} extends beyond the end of the data")
        yield view[start:end]
        at = end


def _take_texts(tensors: dict[str, Array], name: str) -> tuple[Text, ...]:
    """Removes a BYTES tensor, and returns its texts, which are decoded when they are tokenized."""
    tensor = tensors.pop(name, None)
    if tensor is None:
        return ()
    if tensor.dtype != object or tensor.size == 0:
        raise InvalidRequestError(name, "must be a BYTES tensor with at least one element")
    return tuple(tensor.ravel())


def _check_axis_sizes(arrays: Mapping[str, Array], model: LoadedModel) -> dict[str, int]:
    """The size of each symbolic axis, padding included, on which the inputs agree."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        spec = model.input(name)
        if array.dtype == object:
            raise InvalidRequestError(name, f"is BYTES; the model takes {spec.data_type}")
        if array.ndim != len(spec.axes):
            raise InvalidRequestError(name, f"has {array.ndim} axes; the model takes {len(spec.axes)}")
        for axis, size in zip(spec.axes, array.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                message = f"has {axis} {size}; it must be {sizes[axis]}, as in another input"
                raise InvalidRequestError(name, message)
    return sizes


def _lengths(extras: Mapping[str, Array], sizes: Mapping[str, int], model: LoadedModel) -> Lengths:
    """Checks the lengths of axes, such as `key_lengths`, each B lengths."""
    batch, lengths = sizes.get(BATCH_AXIS, 0), {}
    for name, array in extras.items():
        axis = model.axes_of_lengths[name]
        longest = sizes.get(axis, 0)
        if array.dtype.kind not in "iu" or array.shape not in ((batch,), (batch, 1)) or batch == 0:
            raise InvalidRequestError(name, f"must be integers, one for each of {batch} sequences")
        if not 1 <= array.min() <= array.max() <= longest:
            raise InvalidRequestError(name, f"must lie in 1..{longest}")
        lengths[axis] = tuple(array.ravel().tolist())
    return lengths


def _decode_mask(
    array: Array, model: LoadedModel, padded: Mapping[str, Ragged], lengths: Lengths
) -> Mask | None:
    """The flags of (B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) without padding."""
    graph = model.manifest.graphs.get(GraphKind.MASK)
    if graph is None:
        raise InvalidRequestError(ATTENTION_MASK, f"model {model.name!r} does not take a mask")
    mask = build_mask([array.shape], array, model, padded, has_batch=True)
    if mask is None or not lengths:
        return mask
    axes = graph.inputs[-1].axes[1 - array.ndim :]
    return Mask(mask.kind, np.concatenate([part.ravel() for part in _unpad(array, axes, lengths)]))


def _unpad(array: Array, axes: Sequence[str | int], lengths: Lengths) -> list[Array]:
    """Each sequence of a batch, without the padding on those of its axes whose lengths were sent."""
    uncut = [None] * len(array)
    ends = zip(*[lengths.get(str(axis), uncut) for axis in axes], strict=True)
    return [part[tuple(map(slice, end))] for part, end in zip(array, ends, strict=True)]


def find_slice(field: str, parameters: Parameters, memory: SharedMemory) -> Slice | None:
    """Where a tensor's parameters say that it is in shared memory; None if they do not.

    Raises:
        InvalidRequestError: A parameter has a wrong type, or the place is not inside the region.
        RegionNotFoundError: The region is not registered.
        UnsupportedError: Shared memory is switched off.
    """
    if REGION not in parameters:
        return None
    region = parameter(parameters, REGION, str, "the name of a region", field) or ""
    offset = parameter(parameters, REGION_OFFSET, int, "a number of bytes", field) or 0
    size = parameter(parameters, REGION_SIZE, int, "a number of bytes", field) or 0
    return memory.slice(field, region, offset, size)


def parameter(parameters: Parameters, name: str, kind: type[T], words: str, tensor: str = "") -> T | None:
    """The value of a parameter of a type; None if the request, or the tensor, does not have it.

    Raises:
        InvalidRequestError: It has another type than that which `words` name.
    """
    if name not in parameters:
        return None
    value = value_of(parameters[name])
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        field = f"{tensor}.parameters[{name}]" if tensor else name
        raise InvalidRequestError(field, f"must be {words}")
    return value


def _choice(parameters: Parameters, name: str, choices: Sequence[str]) -> Any:
    """The value of a parameter that is one of some words; None if the request does not have it."""
    words = f"one of {', '.join(choices)}"
    value = parameter(parameters, name, str, words)
    if value is not None and value not in choices:
        raise InvalidRequestError(name, f"is {quoted(value)}; must be {words}")
    return value


def value_of(message: Any) -> Any:
    """The value of a message with the oneof `parameter_choice`; None if it has none."""
    choice = message.WhichOneof("parameter_choice")
    return choice and getattr(message, choice)


def values_of(parameters: Parameters) -> dict[str, Any]:
    """The values of some parameters by name."""
    return {name: value_of(message) for name, message in parameters.items()}
