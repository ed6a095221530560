"""Converts requests and results of the Open Inference Protocol to the engine's types and back.

The protocol's tensors are rectangular: (B, T, ...). If a request contains key lengths, its padding is
removed before anything is computed, and the outputs are padded with zeros to the request's length.
"""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from attention_serving.artifact.encoder import ATTENTION_WEIGHTS, CONTEXT_VECTORS, EMBEDDING
from attention_serving.artifact.manifest import ATTENTION_MASK, KEY_LENGTHS, QUERY_LENGTHS
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api import protobuf_bytes
from attention_serving.server.api.open_inference import parameters, response, tensors
from attention_serving.server.api.open_inference.parameters import RegionSlice
from attention_serving.server.api.open_inference.rectangle import Rectangle
from attention_serving.server.api.protobuf_bytes import Bounds, Fields, Parsed, Submessage
from attention_serving.server.api.request_cache import KnownFields, ModelReference
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import UNCOUNTED, Allowance, Shape, WireFloat
from attention_serving.server.engine.errors import InvalidRequestError
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.requests.outputs import check_dimensions
from attention_serving.server.engine.requests.texts import encode_texts
from attention_serving.server.engine.requests.tokenizer import FEW_TEXTS, LITTLE_TEXT_BYTES, TEXT
from attention_serving.server.engine.types import Request

ID = ("id",)
# The fields in which requests may differ that are otherwise the same.
KNOWN_FIELDS = Submessage.of(pb.ModelInferRequest.DESCRIPTOR, (*ID, *tensors.RAW_CONTENTS))
KNOWN = KnownFields(KNOWN_FIELDS, ID)
# The same of replies.
KNOWN_REPLY = KnownFields(Submessage.of(pb.ModelInferResponse.DESCRIPTOR, (*ID, "raw_output_contents")), ID)
# Inputs that a request may have beside those of its model.
OTHER_INPUTS = (TEXT, ATTENTION_MASK, KEY_LENGTHS, QUERY_LENGTHS)


def is_slow(request: Parsed[pb.ModelInferRequest]) -> bool:
    """Whether a request takes long to decode even if it is not large: much text, or many texts."""
    is_long = len(request.data) > LITTLE_TEXT_BYTES
    texts = [tensor for tensor in request.message.inputs if tensor.datatype == tensors.BYTES]
    return any(is_long or math.prod(islice(own.shape, tensors.MAX_AXES)) > FEW_TEXTS for own in texts)


class Reply(NamedTuple):
    """What encodes the reply to a request, beside its result.

    Attributes:
        shapes: Shape of each requested output in the response, in the order of the request.
        types: The type in which outputs of real numbers are sent, by name, if it is not FP32.
        regions: Where outputs are written to shared memory, by name.
        texts: What the response says about texts.
        wants_final: Whether the response in a stream is to say that it is the last one.
    """

    shapes: Mapping[str, Shape]
    types: Mapping[str, WireFloat]
    regions: Mapping[str, RegionSlice]
    texts: response.TextReply
    wants_final: bool


class Decoded(NamedTuple):
    """A decoded request, without texts, and what encodes its reply."""

    request: Request
    reply: Reply


def reader(limits: Limits) -> Callable[[bytes], Parsed[pb.ModelInferRequest]]:
    """A function that parses requests within the limits."""
    bounds = Bounds.for_sequences(limits.max_sequences)
    return protobuf_bytes.reader(pb.ModelInferRequest.FromString, tensors.REQUEST, bounds)


def model_of(message: pb.ModelInferRequest) -> ModelReference:
    """The model that a request names."""
    return ModelReference(message.model_name, message.model_version)


def decode(
    message: pb.ModelInferRequest,
    model: LoadedModel,
    deadline: float,
    fields: Fields,
    allowance: Allowance = UNCOUNTED,
    memory: SharedMemory | None = None,
) -> Decoded:
    """Decodes a request. Its arrays share memory with raw contents.

    Args:
        message: The request.
        model: The model that it names.
        deadline: The call's deadline on `time.monotonic`'s clock.
        fields: The fields that were cut out of the message.
        allowance: What the request may take.
        memory: The regions of shared memory that tensors may be in; None if there are none.

    Raises:
        InvalidRequestError: The message contradicts itself or does not fit the model.
        LimitExceededError: The message contains too much, or the response would be too large.
        OverloadedError: The memory of the request or of its response is not available.
        RegionNotFoundError: A tensor is in shared memory that is not registered.
        UnsupportedError: A tensor is in shared memory, which is switched off.
    """
    parameters.check_request(message.parameters)
    types = _requested(message, model)
    if len(message.inputs) > (most := len(model.inputs) + len(OTHER_INPUTS)):
        raise InvalidRequestError(
            "inputs", f"has {len(message.inputs)} entries; the model takes {most} at most"
        )
    arrays = tensors.decode_tensors(message, fields, allowance, memory)
    texts, *others = (arrays.pop(name, None) for name in OTHER_INPUTS)
    given = {name: other for name, other in zip(OTHER_INPUTS[1:], others, strict=True) if other is not None}
    if texts is not None and given:
        raise InvalidRequestError(next(iter(given)), "cannot be combined with text; send token ids instead")
    rectangle = Rectangle(model, arrays)
    mask = given.pop(ATTENTION_MASK, None)
    cuts = rectangle.cuts(given)
    request = Request(
        inputs={spec.name: rectangle.rows(spec, cuts) for spec in model.inputs if spec.name in arrays},
        texts=() if texts is None else tensors.decode_texts(TEXT, texts),
        mask=None if mask is None else rectangle.mask(mask, cuts),
        return_weights=ATTENTION_WEIGHTS in types and ATTENTION_WEIGHTS not in model.default_outputs,
        return_tokens=CONTEXT_VECTORS in types,
        dimensions=parameters.dimensions(message.parameters),
        prompt=parameters.typed(message.parameters, "prompt", str, "a string"),
        truncate=parameters.typed(message.parameters, "truncate", bool, "a boolean"),
        deadline=min(deadline, parameters.timeout(message.parameters)),
    )
    if request.dimensions:
        check_dimensions(request.dimensions, model)
    encoded = encode_texts(request, model, allowance.limits, allowance.reservation)
    wants_tokens = response.TOKENS in types and response.has_tokens(model)
    computed = [name for name in types if not (wants_tokens and name == response.TOKENS)]
    field = TEXT if request.texts else model.inputs[0].name
    if request.return_weights:
        field = f"outputs[{ATTENTION_WEIGHTS}]"
    id_bytes, tokens = len(message.id.encode()), None
    shapes = response.layout(computed, encoded, model, rectangle.sizes, field, id_bytes, allowance)
    if wants_tokens:
        length = rectangle.query_length
        shapes[response.TOKENS], tokens = response.token_texts(encoded, model, length, allowance)
        shapes = {name: shapes[name] for name in types}
    first = next(iter(encoded.inputs.values()), None)
    reply = Reply(
        shapes,
        {name: wire for name, wire in types.items() if wire is not WireFloat.FP32},
        _regions(message, model, shapes, types, memory),
        response.TextReply(first.lengths if first else (), encoded.truncated, tokens),
        parameters.wants_final(message.parameters),
    )
    return Decoded(encoded, reply)


def _regions(
    message: pb.ModelInferRequest,
    model: LoadedModel,
    shapes: Mapping[str, Shape],
    types: Mapping[str, WireFloat],
    memory: SharedMemory | None,
) -> dict[str, RegionSlice]:
    """Where outputs are written to shared memory, in which each has room."""
    found = {}
    for output in message.outputs:
        name, field = output.name, f"outputs[{output.name}]"
        own = parameters.region_slice(field, output.parameters, memory)
        if own is None:
            continue
        if name == response.TOKENS:
            raise InvalidRequestError(field, "has no fixed size and cannot be written to shared memory")
        size = response.output_bytes(name, model, shapes[name], types[name])
        own.region.check_write(field, own.offset, own.size, size)
        found[name] = own._replace(size=size)
    return found


def _requested(message: pb.ModelInferRequest, model: LoadedModel) -> dict[str, WireFloat]:
    """The type of real numbers in each requested output, by name, in their order."""
    names = response.default_outputs(model)
    if not message.outputs:
        return dict.fromkeys(names, WireFloat.FP32)
    known = dict.fromkeys((*names, *model.outputs))
    if response.has_tokens(model):
        known[response.TOKENS] = None
    requested: dict[str, WireFloat] = {}
    for output in message.outputs:
        name, field = output.name, f"outputs[{output.name}]"
        if name not in known:
            raise _unknown_output(name, model, ", ".join(known))
        if name in requested:
            raise InvalidRequestError(field, "is requested twice; each output must be requested once")
        requested[name] = parameters.output_type(field, output.parameters)
    return requested


def _unknown_output(name: str, model: LoadedModel, known: str) -> InvalidRequestError:
    field = f"outputs[{name}]"
    if name == EMBEDDING and model.encoder is None:
        return InvalidRequestError(
            field, f"model {model.name!r} is not a text encoder; its outputs are {known}"
        )
    return InvalidRequestError(field, f"is unknown; must be one of {known}")
