"""Requests of the Open Inference Protocol as the engine's, and how their results become replies.

The protocol's tensors are rectangular: (B, T, ...). If a request contains key lengths, its padding is
removed before anything is computed, and the outputs are padded with zeros to the request's length.
"""

import math
from collections.abc import Mapping
from functools import partial
from itertools import islice

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS
from attention_serving.artifact.manifest import ATTENTION_MASK, BATCH_AXIS, GraphKind
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import inputs
from attention_serving.server.api.open_inference import parameters, response, tensors
from attention_serving.server.api.protobuf_bytes import Parsed
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import Allowance, Reply
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import check_dimensions
from attention_serving.server.engine.requests.tokenizer import INLINE_MAX_BYTES, INLINE_MAX_TEXTS, TEXT
from attention_serving.server.engine.requests.validation import encode_texts
from attention_serving.server.engine.types import Array, DecodedRequest, Mask, MaskKind, Ragged
from attention_serving.server.transport.call import deadline_after

TEXT_PAIR = "text_pair"
# Inputs that a request may have beside those of its model.
OTHER_INPUTS = (TEXT, TEXT_PAIR, ATTENTION_MASK)
# The length of each sequence without its padding, by symbolic axis.
Lengths = Mapping[str, tuple[int, ...]]
# Marks, in a stream, the response that is the only one to its request, if the client wants to know.
FINAL = pb.ModelInferResponse(
    parameters={"triton_final_response": pb.InferParameter(bool_param=True)}
).SerializeToString()


def is_slow(parsed: Parsed[pb.ModelInferRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, or many texts."""
    is_long = len(parsed.data) > INLINE_MAX_BYTES
    texts = [tensor for tensor in parsed.message.inputs if tensor.datatype == tensors.BYTES]
    return any(
        is_long or math.prod(islice(text.shape, tensors.MAX_AXES)) > INLINE_MAX_TEXTS for text in texts
    )


def decode(
    parsed: Parsed[pb.ModelInferRequest],
    model: LoadedModel,
    deadline: float,
    allowance: Allowance,
    memory: SharedMemory,
    *,
    in_stream: bool = False,
) -> tuple[DecodedRequest, Reply]:
    """Decodes a request, whose arrays share memory with raw contents, and finds how it is replied to.

    Args:
        parsed: The request.
        model: The model that it names.
        deadline: The call's deadline on `time.monotonic`'s clock.
        allowance: What the request may take.
        memory: The regions of shared memory that tensors may be in.
        in_stream: Whether it belongs to a stream.

    Raises:
        InvalidRequestError: The message contradicts itself or does not fit the model.
        LimitExceededError: The message contains too much, or the response would be too large.
        OverloadedError: The memory of the request or of its response is not available.
        RegionNotFoundError: A tensor is in shared memory that is not registered.
        UnsupportedError: A tensor is in shared memory, which is switched off.
    """
    message, options = parsed.message, parameters.read(parsed.message.parameters)
    for name in filter(options.get, parameters.SEQUENCE):
        no_state = "is not supported by this server: its models keep no state"
        raise InvalidRequestError(f"parameters[{name}]", no_state)
    requested = response.output_names(message, model)
    names = (*OTHER_INPUTS, *model.axes_of_lengths)
    if (count := len(message.inputs)) > (most := len(model.inputs) + len(names)):
        raise InvalidRequestError("inputs", f"has {count} entries; the model takes {most} at most")
    arrays = tensors.decode_tensors(parsed, allowance, memory)
    extras = {name: arrays.pop(name) for name in names if name in arrays}
    texts, pairs = extras.pop(TEXT, None), extras.pop(TEXT_PAIR, None)
    if texts is not None and extras:
        raise InvalidRequestError(next(iter(extras)), "cannot be combined with text; send token ids instead")
    sizes, mask = _sizes(arrays, model), extras.pop(ATTENTION_MASK, None)
    lengths = _lengths(extras, sizes, model)
    padded, unpadded = dict[str, Ragged](), dict[str, Ragged]()
    for spec in model.inputs:
        name, array = spec.name, arrays.get(spec.name)
        if array is not None:
            padded[name] = inputs.ragged(name, [array.shape], array, array.ndim - 1, allowance.limits)
            unpadded[name] = _unpad(padded[name], lengths.get(str(spec.axes[1])))
    dimensions = parameters.typed(options, parameters.DIMENSIONS, int, "a positive integer")
    if dimensions is not None:
        check_dimensions(dimensions, model)
    kind = "an integer: microseconds, or 0 for no timeout"
    microseconds = parameters.typed(options, parameters.TIMEOUT, int, kind) or 0
    request = DecodedRequest(
        inputs=unpadded,
        texts=() if texts is None else tensors.decode_texts(TEXT, texts),
        pairs=() if pairs is None else tensors.decode_texts(TEXT_PAIR, pairs),
        mask=None if mask is None else _mask(mask, model, padded, lengths),
        return_weights=ATTENTION_WEIGHTS in requested and ATTENTION_WEIGHTS not in model.default_outputs,
        return_tokens=CONTEXT_VECTORS in requested,
        dimensions=dimensions or 0,
        prompt=parameters.typed(options, "prompt", str, "a string"),
        truncate=parameters.typed(options, "truncate", bool, "a boolean"),
        deadline=min(deadline, deadline_after(microseconds / 1e6)) if microseconds > 0 else deadline,
    )
    request = encode_texts(request, model, allowance.limits, allowance.reservation)
    outputs = response.plan(requested, parsed, request, model, sizes, allowance, memory)
    prefix = response.prefix(request, model)
    if in_stream and options.get(parameters.WANTS_FINAL) is True:
        prefix += FINAL
    # A timeout counts from the arrival of its request, and regions can be replaced.
    is_kept = parameters.TIMEOUT not in options and not any(output.where for output in outputs)
    return request, Reply(partial(response.encode, prefix=prefix, outputs=outputs), is_kept=is_kept)


def _sizes(arrays: Mapping[str, Array], model: LoadedModel) -> dict[str, int]:
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
        if array.dtype.kind not in "iu" or array.shape != (batch,) or batch == 0:
            raise InvalidRequestError(name, f"must be integers, one for each of {batch} sequences")
        if not 1 <= array.min() <= array.max() <= longest:
            raise InvalidRequestError(name, f"must lie in 1..{longest}")
        lengths[axis] = tuple(array.tolist())
    return lengths


def _unpad(padded: Ragged, lengths: tuple[int, ...] | None) -> Ragged:
    """Sequences of one length without their padding."""
    if lengths is None:
        return padded
    ends = zip(range(0, len(padded.rows), padded.lengths[0]), lengths, strict=True)
    return Ragged(np.concatenate([padded.rows[start : start + length] for start, length in ends]), lengths)


def _mask(array: Array, model: LoadedModel, padded: Mapping[str, Ragged], lengths: Lengths) -> Mask | None:
    """The flags of (B, Tk), (B, Tq, Tk) or (B, 1 or H, Tq, Tk) without padding."""
    masked = model.manifest.graphs.get(GraphKind.MASK)
    if masked is None:
        raise InvalidRequestError(ATTENTION_MASK, f"model {model.name!r} does not take a mask")
    mask = inputs.mask([array.shape], array, model, padded, has_batch=True)
    if mask is None or not lengths:
        return mask
    all_rows = (None,) * len(array)
    query, key = (lengths.get(str(axis), all_rows) for axis in masked.inputs[-1].axes[-2:])
    parts = [
        (part[:end] if mask.kind is MaskKind.KEYS else part[..., :last, :end]).ravel()
        for part, last, end in zip(array, query, key, strict=True)
    ]
    return Mask(mask.kind, np.concatenate(parts))
