"""Requests and results of the Open Inference Protocol to the engine's values and back.

The protocol's tensors are rectangular: (B, T, ...). Key lengths, where a request states them, cut the
padding off before anything is computed, and answers are padded with zeros to the request's length.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from export.manifest import ATTENTION_MASK, KEY_LENGTHS
from protos.inference import open_inference_pb2 as pb
from server.engine.errors import InvalidRequestError
from server.engine.model import LoadedModel
from server.engine.text import FIELD as TEXT
from server.engine.values import Array, Mask, MaskKind, Ragged, Request, Result
from server.rpc.open_inference_tensors import DATATYPES, decode_tensors, decode_texts
from server.rpc.tensors import to_bytes

CONTEXT_VECTORS = "context_vectors"
ATTENTION_WEIGHTS = "attention_weights"
LENGTHS = "lengths"
# Kind of a mask by its number of axes.
MASK_KINDS = {2: MaskKind.KEYS, 3: MaskKind.PAIRS, 4: MaskKind.HEADS}


@dataclass(frozen=True)
class Decoded:
    """A request of the protocol.

    Attributes:
        request: What the engine reads.
        outputs: Names of the outputs that are asked for, in order.
        padded: Query and key rows of each sequence in the answer; None for the longest's.
    """

    request: Request
    outputs: tuple[str, ...]
    padded: tuple[int, int] | None


def default_outputs(model: LoadedModel) -> tuple[str, ...]:
    """Outputs of a request that names none. Texts of different lengths need their lengths told."""
    return (CONTEXT_VECTORS, LENGTHS) if model.text_encoder else (CONTEXT_VECTORS,)


def decode(message: pb.ModelInferRequest, model: LoadedModel, deadline: float) -> Decoded:
    """Reads a request. Its tensors are views of the message's bytes where these are raw.

    Raises:
        InvalidRequestError: The message contradicts itself or does not fit the model.
    """
    tensors = decode_tensors(message)
    texts, mask, lengths = (tensors.pop(name, None) for name in (TEXT, ATTENTION_MASK, KEY_LENGTHS))
    _check_axes(tensors, model)
    padded = _padded(tensors, model)
    cut = _Cut(model, padded, lengths)
    outputs = _requested(message, model)
    request = Request(
        model_name=model.name,
        model_version=model.version,
        inputs={name: cut.rows(name, tensor) for name, tensor in tensors.items()},
        texts=() if texts is None else decode_texts(TEXT, texts),
        mask=None if mask is None else cut.mask(mask),
        return_weights=ATTENTION_WEIGHTS in outputs,
        deadline=min(deadline, _timeout(message)),
    )
    return Decoded(request, outputs, padded[1:] if padded else None)


def _check_axes(tensors: dict[str, Array], model: LoadedModel) -> None:
    ranks = {spec.name: len(spec.axes) for spec in model.inputs}
    for name, tensor in tensors.items():
        if name not in ranks:
            raise InvalidRequestError(name, f"model {model.name!r} takes {', '.join(ranks)}")
        if tensor.ndim != ranks[name]:
            raise InvalidRequestError(name, f"has {tensor.ndim} axes; the model takes {ranks[name]}")


def _padded(tensors: dict[str, Array], model: LoadedModel) -> tuple[int, int, int] | None:
    """B, Tq and Tk of the request's tensors; None where it brings text or misses an input."""
    query, key = model.inputs[0].name, model.inputs[-1].name
    if query not in tensors or key not in tensors:
        return None
    return len(tensors[query]), tensors[query].shape[1], tensors[key].shape[1]


class _Cut:
    """Takes the rows and flags of a request that lie within its key lengths."""

    def __init__(
        self, model: LoadedModel, padded: tuple[int, int, int] | None, lengths: Array | None
    ) -> None:
        self._model = model
        self._padded = padded
        self._lengths = None if lengths is None else self._check_lengths(lengths)
        self._key_axis = model.inputs[-1].axes[1]
        self._cross = model.inputs[0].axes[1] != self._key_axis

    def _check_lengths(self, lengths: Array) -> list[int]:
        if self._padded is None:
            raise InvalidRequestError(
                KEY_LENGTHS, "comes with every tensor of the model only, and not with text"
            )
        batch, _, key_length = self._padded
        if lengths.dtype.kind not in "iu" or lengths.shape != (batch,):
            raise InvalidRequestError(KEY_LENGTHS, f"must be {batch} integers, one for each sequence")
        if batch and not 1 <= lengths.min() <= lengths.max() <= key_length:
            raise InvalidRequestError(KEY_LENGTHS, f"must lie in 1..{key_length}")
        return [int(length) for length in lengths]

    def rows(self, name: str, tensor: Array) -> Ragged:
        """(B, T, ...) to the rows within the lengths, where the tensor has the key's axis."""
        spec = next(spec for spec in self._model.inputs if spec.name == name)
        if self._lengths is None or spec.axes[1] != self._key_axis or len(tensor) != len(self._lengths):
            lengths = np.full(len(tensor), tensor.shape[1], np.int64)
            return Ragged(tensor.reshape(-1, *tensor.shape[2:]), lengths)
        rows = [row[:length] for row, length in zip(tensor, self._lengths, strict=True)]
        return Ragged(np.concatenate(rows), np.array(self._lengths, np.int64))

    def mask(self, mask: Array) -> Mask:
        """(B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) to the flags within the lengths."""
        if mask.dtype != np.bool_ or mask.ndim not in MASK_KINDS:
            raise InvalidRequestError(ATTENTION_MASK, "must be BOOL with 2, 3 or 4 axes")
        if mask.ndim == 4 and mask.shape[1] == 1:  # noqa: PLR2004 - (B, 1, Tq, Tk): one mask for all heads
            mask = mask[:, 0]
        self._check_mask(mask)
        kind = MASK_KINDS[mask.ndim]
        if self._lengths is None:
            return Mask(kind, mask.ravel())
        cut_queries = kind is not MaskKind.KEYS and not self._cross
        flags = [
            (row[..., :length, :length] if cut_queries else row[..., :length]).ravel()
            for row, length in zip(mask, self._lengths, strict=True)
        ]
        return Mask(kind, np.concatenate(flags))

    def _check_mask(self, mask: Array) -> None:
        if self._padded is None:  # how many words a text has is known later
            return
        batch, query_length, key_length = self._padded
        full = (batch, self._model.manifest.num_heads, query_length, key_length)
        expected = {2: (batch, key_length), 3: (batch, query_length, key_length), 4: full}[mask.ndim]
        if mask.shape != expected:
            raise InvalidRequestError(ATTENTION_MASK, f"has shape {mask.shape}; expected is {expected}")


def _requested(message: pb.ModelInferRequest, model: LoadedModel) -> tuple[str, ...]:
    names = tuple(output.name for output in message.outputs) or default_outputs(model)
    known = (*default_outputs(model), ATTENTION_WEIGHTS)
    for output in message.outputs:
        if output.name not in known:
            raise InvalidRequestError(f"outputs[{output.name}]", f"is unknown; known are {', '.join(known)}")
        if any(parameter.startswith("shared_memory") for parameter in output.parameters):
            raise InvalidRequestError(
                f"outputs[{output.name}]", "shared memory is not written by this server"
            )
    return names


def _timeout(message: pb.ModelInferRequest) -> float:
    """The protocol's own deadline: parameter `timeout`, in microseconds."""
    microseconds = message.parameters["timeout"].int64_param if "timeout" in message.parameters else 0
    return time.monotonic() + microseconds / 1e6 if microseconds > 0 else math.inf


def encode(result: Result, decoded: Decoded, request_id: str) -> pb.ModelInferResponse:
    """Writes a result: one raw entry for each output that was asked for."""
    response = pb.ModelInferResponse(
        model_name=result.model_name, model_version=result.model_version, id=request_id
    )
    context = result.outputs[CONTEXT_VECTORS]
    for name in decoded.outputs:
        if name == LENGTHS:
            lengths = np.array([len(rows) for rows in context], dtype=np.int64)
            _add(response, name, lengths.shape, lengths.dtype, lengths.tobytes())
            continue
        arrays = result.outputs[name]
        shape = _padded_shape(name, arrays, decoded.padded)
        data = to_bytes(_pad(array, shape) for array in arrays)
        _add(response, name, (len(arrays), *shape), arrays[0].dtype, data)
    return response


def _add(
    response: pb.ModelInferResponse,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[np.generic],
    data: bytes,
) -> None:
    response.outputs.add(name=name, datatype=DATATYPES[dtype.name], shape=shape)
    response.raw_output_contents.append(data)


def _padded_shape(name: str, arrays: list[Array], padded: tuple[int, int] | None) -> tuple[int, ...]:
    """Shape of each sequence's array in a rectangular answer."""
    shape = tuple(max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
    if padded is None:
        return shape
    query_length, key_length = padded
    if name == CONTEXT_VECTORS:
        return (query_length, *shape[1:])
    return (shape[0], query_length, key_length)


def _pad(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape == shape:
        return array
    return np.pad(array, [(0, size - own) for own, size in zip(array.shape, shape, strict=True)])
