"""Converts requests and results of the Open Inference Protocol to the engine's types and back.

The protocol's tensors are rectangular: (B, T, ...). If a request contains key lengths, its padding is
removed before anything is computed, and the outputs are padded with zeros to the request's length.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from artifact.manifest import ATTENTION_MASK, BATCH_AXIS, KEY_LENGTHS, TensorSpec
from protos.inference import open_inference_pb2 as pb
from server.engine.errors import InvalidRequestError, LimitExceededError
from server.engine.model import LoadedModel
from server.engine.tokenizer import TEXT
from server.engine.types import Array, Mask, MaskKind, Ragged, Request, Result
from server.rpc.deadlines import deadline_after
from server.rpc.open_inference.tensors import DATATYPES, Raw, decode_tensors, decode_texts, in_shared_memory
from server.rpc.protobuf_bytes import Buffer, field, reader
from server.rpc.tensors import buffers

ATTENTION_WEIGHTS = "attention_weights"
LENGTHS = "lengths"
CACHED_MODELS = CACHED_SHAPES = 1024
RAW_INPUT_CONTENTS = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
RAW_OUTPUT_CONTENTS = (pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,)
read = reader(pb.ModelInferRequest.FromString, {RAW_INPUT_CONTENTS: True})


@dataclass(frozen=True)
class Decoded:
    """A decoded request.

    Attributes:
        request: The request to the engine.
        outputs: Names of the requested outputs, in order.
        sizes: Size of each symbolic axis in the response, padding included. An axis that is not here is as
            long as its longest sequence.
    """

    request: Request
    outputs: tuple[str, ...]
    sizes: Mapping[str, int]


@lru_cache(maxsize=CACHED_MODELS)
def default_outputs(model: LoadedModel) -> tuple[str, ...]:
    """Outputs of a request that names none. Texts differ in length, so their lengths are an output."""
    return (*model.default_outputs, LENGTHS) if model.text_encoder else tuple(model.default_outputs)


def decode(
    message: pb.ModelInferRequest, model: LoadedModel, deadline: float, contents: Sequence[Raw] = ()
) -> Decoded:
    """Decodes a request. Its arrays share memory with raw contents.

    Args:
        message: The request.
        model: The model that it names.
        deadline: The call's deadline on `time.monotonic`'s clock.
        contents: The raw contents, if they were cut out of the message.

    Raises:
        InvalidRequestError: The message contradicts itself or does not fit the model.
    """
    tensors = decode_tensors(message, contents)
    texts, mask, lengths = (tensors.pop(name, None) for name in (TEXT, ATTENTION_MASK, KEY_LENGTHS))
    if texts is not None and (mask is not None or lengths is not None):
        field = ATTENTION_MASK if mask is not None else KEY_LENGTHS
        raise InvalidRequestError(field, "cannot be combined with text; send token ids instead")
    rectangle = _Rectangle(model, tensors)
    cut = None if lengths is None else rectangle.key_lengths(lengths)
    outputs = _requested(message, model)
    request = Request(
        inputs={spec.name: rectangle.rows(spec, cut) for spec in model.inputs if spec.name in tensors},
        texts=() if texts is None else decode_texts(TEXT, texts),
        mask=None if mask is None else rectangle.mask(mask, cut),
        return_weights=ATTENTION_WEIGHTS in outputs,
        deadline=min(deadline, _timeout(message)),
    )
    return Decoded(request, outputs, rectangle.sizes)


class _Rectangle:
    """The tensors of a request: their sequences and shared axes agree.

    Attributes:
        sizes: Size of each symbolic axis, padding included.
    """

    def __init__(self, model: LoadedModel, tensors: dict[str, Array]) -> None:
        self._tensors = tensors
        self._heads = model.manifest.num_heads
        self._query_axis, self._key_axis = (str(model.inputs[at].axes[1]) for at in (0, -1))
        self.sizes: dict[str, int] = {}
        specs = model.inputs_by_name
        for name, tensor in tensors.items():
            if name not in specs:
                raise InvalidRequestError(
                    name, f"is not an input; model {model.name!r} takes {', '.join(specs)}"
                )
            self._bind(specs[name], tensor)

    def _bind(self, spec: TensorSpec, tensor: Array) -> None:
        if tensor.dtype == object:
            raise InvalidRequestError(spec.name, f"is BYTES; the model takes {spec.data_type}")
        if tensor.ndim != len(spec.axes):
            raise InvalidRequestError(spec.name, f"has {tensor.ndim} axes; the model takes {len(spec.axes)}")
        for axis, size in zip(spec.axes, tensor.shape, strict=True):
            if isinstance(axis, str) and self.sizes.setdefault(axis, size) != size:
                raise InvalidRequestError(
                    spec.name, f"has {axis} {size}; it must be {self.sizes[axis]}, as in another input"
                )

    @property
    def lengths(self) -> tuple[int, int]:
        """Tq and Tk, padding included; 0 if the request lacks the input."""
        return self.sizes.get(self._query_axis, 0), self.sizes.get(self._key_axis, 0)

    def key_lengths(self, lengths: Array) -> tuple[int, ...]:
        """Checks and returns the B key lengths."""
        batch, (_, longest) = self.sizes.get(BATCH_AXIS, 0), self.lengths
        if lengths.dtype.kind not in "iu" or lengths.shape != (batch,) or batch == 0:
            raise InvalidRequestError(KEY_LENGTHS, f"must be integers, one for each of {batch} sequences")
        if not 1 <= lengths.min() <= lengths.max() <= longest:
            raise InvalidRequestError(KEY_LENGTHS, f"must lie in 1..{longest}")
        return tuple(lengths.tolist())

    def rows(self, spec: TensorSpec, cut: tuple[int, ...] | None) -> Ragged:
        """The rows of (B, T, ...); of an input with the key's axis, only those within the key lengths."""
        tensor = self._tensors[spec.name]
        batch, length, *row = tensor.shape
        if cut is None or spec.axes[1] != self._key_axis:
            return Ragged(tensor.reshape(batch * length, *row), (length,) * batch)
        return Ragged(np.concatenate([rows[:end] for rows, end in zip(tensor, cut, strict=True)]), cut)

    def mask(self, mask: Array, cut: tuple[int, ...] | None) -> Mask:
        """The flags of (B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) within the key lengths."""
        batch, (query_length, key_length) = self.sizes.get(BATCH_AXIS, 0), self.lengths
        expected = {
            (batch, key_length): MaskKind.KEYS,
            (batch, query_length, key_length): MaskKind.PAIRS,
            (batch, 1, query_length, key_length): MaskKind.PAIRS,
            (batch, self._heads, query_length, key_length): MaskKind.HEADS,
        }
        kind = expected.get(mask.shape)
        if kind is None or mask.dtype != np.bool_:
            shapes = " or ".join(map(str, expected))
            raise InvalidRequestError(
                ATTENTION_MASK, f"is {mask.dtype.name} {mask.shape}; must be bool {shapes}"
            )
        if cut is None:
            return Mask(kind, mask.ravel())
        own_rows = kind is not MaskKind.KEYS and self._query_axis == self._key_axis
        parts = [
            (part[..., :end, :end] if own_rows else part[..., :end]).ravel()
            for part, end in zip(mask, cut, strict=True)
        ]
        return Mask(kind, np.concatenate(parts))


def _requested(message: pb.ModelInferRequest, model: LoadedModel) -> tuple[str, ...]:
    names = default_outputs(model)
    if not message.outputs:
        return names
    requested = []
    for output in message.outputs:
        name = output.name
        if name not in names and name not in model.outputs:
            known = ", ".join(dict.fromkeys((*names, *model.outputs)))
            raise InvalidRequestError(f"outputs[{name}]", f"is unknown; must be one of {known}")
        if in_shared_memory(output.parameters):
            raise InvalidRequestError(f"outputs[{name}]", "shared memory is not supported by this server")
        requested.append(name)
    return tuple(requested)


def _timeout(message: pb.ModelInferRequest) -> float:
    """The deadline of the parameter `timeout`, in microseconds; 0 for none."""
    if "timeout" not in message.parameters:
        return math.inf
    parameter = message.parameters["timeout"]
    if parameter.WhichOneof("parameter_choice") not in ("int64_param", "uint64_param"):
        raise InvalidRequestError("timeout", "must be an integer: microseconds, or 0 for no timeout")
    microseconds = parameter.int64_param or parameter.uint64_param
    return deadline_after(microseconds / 1e6) if microseconds > 0 else math.inf


def encode(result: Result, decoded: Decoded, model: LoadedModel, request_id: str, limit: int) -> bytes:
    """Serializes a result, with one raw entry for each requested output.

    Raises:
        LimitExceededError: An output, padded to a rectangle, would be larger than the limit, in bytes.
    """
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request_id)
    parts: list[Buffer] = [response.SerializeToString()]
    contents: list[Buffer] = []
    shape: tuple[int, ...]
    for name in decoded.outputs:
        if name == LENGTHS:
            rows = result.outputs[model.default_outputs[0]]
            arrays, shape = [np.array([len(array) for array in rows], dtype=np.int64)], (len(rows),)
        else:
            arrays, shape = _rectangle(name, result.outputs[name], model, decoded.sizes, limit)
        parts.append(_described(name, DATATYPES[arrays[0].dtype], shape))
        contents += field(RAW_OUTPUT_CONTENTS, buffers(arrays))
    return b"".join([*parts, *contents])


@lru_cache(maxsize=CACHED_SHAPES)
def _described(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """The description of an output as a serialized response, which merges with the rest of the response."""
    response = pb.ModelInferResponse()
    response.outputs.add(name=name, datatype=datatype, shape=shape)
    return response.SerializeToString()


def _rectangle(
    name: str, arrays: list[Array], model: LoadedModel, sizes: Mapping[str, int], limit: int
) -> tuple[list[Array], tuple[int, ...]]:
    """The arrays of all sequences, padded to one shape, and the shape of the whole output."""
    shape = _padded_shape(model.outputs[name], arrays, sizes)
    size = len(arrays) * math.prod(shape) * arrays[0].itemsize
    if size > limit:
        raise LimitExceededError(
            name,
            f"would have {size} bytes with padding; the limit is {limit}",
        )
    return [_pad(array, shape) for array in arrays], (len(arrays), *shape)


def _padded_shape(spec: TensorSpec, arrays: list[Array], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of each sequence's array in a rectangular output."""
    longest = [max(size) for size in zip(*[array.shape for array in arrays], strict=True)]
    return tuple(
        [
            sizes.get(axis, size) if isinstance(axis, str) else axis
            for axis, size in zip(spec.axes[1:], longest, strict=True)
        ]
    )


def _pad(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])
