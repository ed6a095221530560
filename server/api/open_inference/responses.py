"""Responses of the Open Inference Protocol: what is known before the run, and their bytes after it."""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, EMBEDDING
from attention_serving.artifact.manifest import BATCH_AXIS, TensorSpec, all_sizes
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.open_inference import requests
from attention_serving.server.api.open_inference.requests import BYTES, Parameters, find_slice, value_of
from attention_serving.server.api.shared_memory import SharedMemory, Slice
from attention_serving.server.api.tensors import (
    FLOAT32,
    FLOAT_DTYPE_BY_NAME,
    NAME_BY_DTYPE,
    WIRE_DTYPE_BY_NAME,
    Allowance,
    OutputPlaceholder,
    ReplyTemplate,
    Shape,
    TemplatePart,
    datatype_of,
)
from attention_serving.server.api.wire import Parsed, field_header
from attention_serving.server.engine.errors import InvalidRequestError, LimitExceededError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, DecodedRequest, Ragged, Result

# The parameter of a response that names the texts that were cut, by their indices.
TRUNCATED = "truncated"
# A parameter of this server, of metadata and responses: the digest of the model.
MODEL_DIGEST = "model_digest"
# A parameter of this server: the type in which a requested output of FP32 is sent.
DATATYPE = "datatype"
# A parameter of responses: what callers probably did not mean.
WARNING = "warning"
PADDING_WARNING = (
    "a sequence ends in zeros, which were computed as rows: if they are padding, send the lengths that the "
    "metadata of the model lists"
)
# The parameter of an extension of the protocol that this server lacks.
CLASSIFICATION = "classification"
# Triton's clients send the first with every request: whether the last response of a stream to it is marked as
# such, by the second. There is one response to each request.
WANTS_FINAL, IS_FINAL = "triton_enable_empty_final_response", "triton_final_response"
# An output of models that take text: the text of each token, BYTES (B, T), padded with empty texts.
TOKENS = "tokens"
# The length in bytes before each of them.
SIZE = struct.Struct("<I")
EMPTY = SIZE.pack(0)
# Another: the number of tokens of each text.
LENGTHS = "lengths"
LENGTHS_SPEC = TensorSpec(name=LENGTHS, data_type="int64", axes=(BATCH_AXIS,))
NO_PARAMETERS: Parameters = {}
RAW_OUTPUT_CONTENTS = (pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER,)


def default_outputs(model: LoadedModel) -> tuple[str, ...]:
    """Outputs of a request that names none. Texts differ in length, so their lengths are an output."""
    return (*model.default_outputs, LENGTHS) if model.tokenizer else tuple(model.default_outputs)


def requested_outputs(message: pb.ModelInferRequest, model: LoadedModel) -> dict[str, Parameters]:
    """The parameters of the requested outputs by name, in their order.

    Raises:
        InvalidRequestError: The model has no such output, or it is requested twice.
    """
    names = default_outputs(model)
    if not message.outputs:
        return dict.fromkeys(names, NO_PARAMETERS)
    outputs = list(dict.fromkeys((*names, *model.outputs, *([TOKENS] if model.tokenizer else []))))
    requested = dict[str, Parameters]()
    for output in message.outputs:
        if (name := output.name) not in outputs:
            problem = "is unknown; must be one of"
            if name == EMBEDDING and model.encoder is None:
                problem = f"model {model.name!r} is not a text encoder; its outputs are"
            raise InvalidRequestError(f"outputs[{name}]", f"{problem} {', '.join(outputs)}")
        if name in requested:
            twice = "is requested twice; each output must be requested once"
            raise InvalidRequestError(f"outputs[{name}]", twice)
        requested[name] = output.parameters
    return requested


def plan_reply(
    parsed: Parsed[pb.ModelInferRequest],
    decoded: DecodedRequest,
    model: LoadedModel,
    outputs: Mapping[str, Parameters],
    sizes: Mapping[str, int],
    allowance: Allowance,
    memory: SharedMemory,
    *,
    in_stream: bool,
) -> ReplyTemplate:
    """The reply to a request, without its id. Its size is checked before the request is queued.

    Args:
        parsed: The request as it was received, with the parameters of its outputs.
        decoded: The decoded request, without texts. It may still be found invalid.
        model: The model.
        outputs: The result of `requested_outputs`.
        sizes: Size of each symbolic axis that the request pads to. An axis that is not here is as long as its
            longest sequence.
        allowance: What the response may take. The memory of padding is reserved.
        memory: The regions of shared memory that outputs may be written to.
        in_stream: Whether the request belongs to a stream.

    Raises:
        InvalidRequestError: A parameter of an output is wrong, or it does not fit into shared memory.
        LimitExceededError: The response would be too large.
        OverloadedError: The memory of the padding, or of the tokens, is not available.
        RegionNotFoundError: An output is to be written to shared memory that is not registered.
        UnsupportedError: An output is to be written to shared memory, which is switched off.
    """
    message, (padded, padded_axes) = parsed.message, _padded_sizes(decoded, model, sizes)
    response = _response(message, decoded, model, in_stream=in_stream)
    unmarked = [*_perhaps_padded(message, decoded, model)]
    if any(map(_ends_in_zeros, unmarked)):
        response.parameters[WARNING].string_param = PADDING_WARNING
    planned, size, is_shared = list[tuple[TemplatePart, Slice | None]](), 0, False
    for name, parameters in outputs.items():
        field = f"outputs[{name}]"
        part: TemplatePart
        float_datatype, location = "FP32", None
        if parameters:
            float_datatype, location = output_type(field, parameters), find_slice(field, parameters, memory)
        if name == TOKENS and name not in model.outputs:
            length = padded.get(str(model.inputs[0].length_axis), 0)
            datatype, (shape, part) = BYTES, token_texts(decoded, model, length, allowance)
            sent_bytes = len(part)  # they have a limit of their own
        else:
            spec = model.outputs.get(name, LENGTHS_SPEC)
            dtype = np.dtype(spec.data_type)
            datatype = float_datatype if dtype == FLOAT32 else NAME_BY_DTYPE[dtype]
            shape = tuple([padded.get(axis, 0) if isinstance(axis, str) else axis for axis in spec.axes])
            if name == EMBEDDING and decoded.dimensions:
                shape = (padded[BATCH_AXIS], decoded.dimensions)
            if spec is LENGTHS_SPEC:
                rows = next(iter(decoded.inputs.values())).lengths if decoded.inputs else ()
                part = np.array(rows, dtype).tobytes()
            else:
                part = OutputPlaceholder(
                    name, float_datatype, None if padded_axes.isdisjoint(spec.axes) else shape[1:]
                )
            count = math.prod(shape)
            size += count * dtype.itemsize
            sent_bytes = count * WIRE_DTYPE_BY_NAME[datatype].itemsize
        tensor = response.outputs.add(name=name, datatype=datatype, shape=shape)
        if location is not None:
            location = location.shorten(sent_bytes)
            tensor.parameters[requests.REGION].string_param = location.region.name
            tensor.parameters[requests.REGION_OFFSET].int64_param = location.offset
            tensor.parameters[requests.REGION_SIZE].int64_param = sent_bytes
            is_shared = True
        planned.append((part, location))
    with_id = size + len(parsed.id.encode())
    if with_id > (most := allowance.limits.max_result_bytes):
        field = f"outputs[{ATTENTION_WEIGHTS}]" if decoded.return_weights else message.inputs[0].name
        problem = f"the response would have {with_id} bytes with padding; the limit is {most}"
        raise LimitExceededError(field, problem)
    if padded_axes:
        # The outputs are copied to rectangles, which are then copied to the response.
        allowance.reservation.add(2 * size)
    # A timeout counts from the arrival of its request, regions can be replaced, and padding shows in values.
    is_cacheable = requests.TIMEOUT not in message.parameters and not is_shared and not unmarked
    return ReplyTemplate(partial(_encode, response, planned), is_cacheable=is_cacheable)


def _encode(
    response: pb.ModelInferResponse, planned: Sequence[tuple[TemplatePart, Slice | None]], result: Result
) -> list[TemplatePart]:
    """The parts of a response, with one raw entry for each output: an empty one in shared memory."""
    raw: list[TemplatePart] = []
    for tensor, (part, location) in zip(response.outputs, planned, strict=True):
        arrays, size = list[Array](), 0
        if isinstance(part, bytes):
            size = len(part)
        else:  # a module may return other numbers than its manifest states
            arrays = result.outputs[part.name]
            tensor.datatype, size = datatype_of(arrays[0], part.float_datatype), part.size(arrays)
        if location is None:
            raw += [field_header(RAW_OUTPUT_CONTENTS, size), part]
        else:
            location.write([part] if isinstance(part, bytes) else part.parts(arrays))
            raw += [field_header(RAW_OUTPUT_CONTENTS, 0), b""]
    return [response.SerializeToString(), *raw]


def _padded_sizes(
    decoded: DecodedRequest, model: LoadedModel, sizes: Mapping[str, int]
) -> tuple[dict[str, int], set[str]]:
    """The size of each symbolic axis in a response; and the axes that are longer than some sequence."""
    padded, unequal = {**sizes, BATCH_AXIS: 0}, set[str]()
    for spec in model.inputs:
        if (ragged := decoded.inputs.get(spec.name)) is not None and ragged.lengths:
            axis = str(spec.length_axis)
            padded[axis] = sizes.get(axis, max(ragged.lengths))
            padded[BATCH_AXIS] = max(padded[BATCH_AXIS], len(ragged.lengths))
            if min(ragged.lengths) < padded[axis]:
                unequal.add(axis)
    derived = model.manifest.derived_axes
    unequal |= {name for name, axis in derived.items() if axis.axis in unequal}
    return all_sizes(padded, derived), unequal


def _response(
    message: pb.ModelInferRequest, decoded: DecodedRequest, model: LoadedModel, *, in_stream: bool
) -> pb.ModelInferResponse:
    """The response without its outputs."""
    response = pb.ModelInferResponse(model_name=model.name, model_version=model.version)
    response.parameters[MODEL_DIGEST].string_param = model.digest
    if decoded.truncated:
        response.parameters[TRUNCATED].string_param = ",".join(map(str, decoded.truncated))
    if in_stream and WANTS_FINAL in message.parameters and message.parameters[WANTS_FINAL].bool_param:
        response.parameters[IS_FINAL].bool_param = True
    return response


def _perhaps_padded(
    message: pb.ModelInferRequest, decoded: DecodedRequest, model: LoadedModel
) -> Iterator[Ragged]:
    """Inputs of several sequences, for whose padding the module has a mask and the request has no lengths."""
    masked_axes = model.manifest.lengths.values()
    has_lengths = any(tensor.name in model.axes_of_lengths for tensor in message.inputs)
    if masked_axes and decoded.mask is None and not has_lengths:
        for spec in model.inputs:
            ragged = decoded.inputs.get(spec.name)
            if ragged is not None and spec.length_axis in masked_axes and len(ragged.lengths) > 1:
                yield ragged


def _ends_in_zeros(ragged: Ragged) -> bool:
    """Whether one of several sequences of equal lengths ends in zeros."""
    length = ragged.lengths[0]
    last_rows = ragged.rows[length - 1 :: length].reshape(len(ragged.lengths), -1)  # (B, d)
    return length > 1 and not last_rows.any(axis=1).all()


def output_type(field: str, parameters: Parameters) -> str:
    """Checks the parameters of a requested output; the type of `datatype`, FP32 if it has none.

    Raises:
        InvalidRequestError: The output is to be classified, or the type is not one of real numbers.
    """
    if CLASSIFICATION in parameters and value_of(parameters[CLASSIFICATION]):
        message = "is not supported by this server; request the output without it"
        raise InvalidRequestError(f"{field}.parameters[{CLASSIFICATION}]", message)
    datatype = value_of(parameters[DATATYPE]) if DATATYPE in parameters else "FP32"
    if datatype not in FLOAT_DTYPE_BY_NAME:
        problem = f"must be one of {', '.join(FLOAT_DTYPE_BY_NAME)}"
        raise InvalidRequestError(f"{field}.parameters[{DATATYPE}]", problem)
    return str(datatype)


def token_texts(
    decoded: DecodedRequest, model: LoadedModel, length: int, allowance: Allowance
) -> tuple[Shape, bytes]:
    """The shape (B, T) and the content of the output `tokens`.

    Args:
        decoded: The request, with token ids.
        model: Its model, which takes text.
        length: Tokens of each sequence with padding.
        allowance: What the response may take.

    Raises:
        LimitExceededError: The texts would be too large.
        OverloadedError: Their memory is not available.
    """
    ids, tokenizer = decoded.inputs.get(model.inputs[0].name), model.tokenizer
    if ids is None or tokenizer is None or ids.rows.dtype.kind not in "iu":
        return (0, 0), b""  # the request is refused when it is validated
    # A text has far fewer different tokens than tokens, and so have all texts of a request.
    different, indices = np.unique(ids.rows, return_inverse=True)
    encoded = [text.encode(errors="replace") for text in tokenizer.texts_of(different.tolist())]
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
