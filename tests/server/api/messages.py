"""Messages as clients make them."""

import math
import struct
from collections.abc import Sequence

import numpy as np

from attention_serving.protos.attention.v1 import attention_pb2 as attention_pb
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.attention import requests as attention
from attention_serving.server.api.open_inference import requests as open_inference
from attention_serving.server.api.open_inference.requests import BYTES
from attention_serving.server.api.open_inference.responses import plan_reply, requested_outputs
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import NAME_BY_DTYPE, Allowance, ReplyTemplate
from attention_serving.server.api.wire import Parsed, make_parser
from attention_serving.server.engine.budget import MemoryBudget, Reservation
from attention_serving.server.engine.limits import Limits
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.types import Array, DecodedRequest
from tests.server.samples import SELF, WIDTHS


def allowing(limits: Limits | None = None) -> Allowance:
    """What a request may take that is the only one."""
    return Allowance(limits or Limits(), Reservation(MemoryBudget(1 << 40)))


UNCOUNTED = allowing()
NO_REGIONS = SharedMemory()
RNG = np.random.default_rng(0)
Output = pb.ModelInferRequest.InferRequestedOutputTensor


def raw_request(
    model: LoadedModel, tensors: dict[str, Array], outputs: Sequence[str] = ()
) -> pb.ModelInferRequest:
    """A request with raw contents, in the order given."""
    message = pb.ModelInferRequest(
        model_name=model.name, id="7", outputs=[Output(name=name) for name in outputs]
    )
    for name, array in tensors.items():
        message.inputs.add(name=name, datatype=NAME_BY_DTYPE[array.dtype], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def text_request(model: LoadedModel, texts: Sequence[bytes], **tensors: Array) -> pb.ModelInferRequest:
    """A request with other tensors, and texts as one BYTES tensor."""
    message = raw_request(model, tensors)
    message.inputs.add(name="text", datatype=BYTES, shape=[len(texts)])
    message.raw_input_contents.append(packed(texts))
    return message


def vectors(*arrays: Array) -> attention_pb.VectorSequences:
    """Sequences of float32 or float16, each (T, d)."""
    rows = np.concatenate(arrays)
    return attention_pb.VectorSequences(
        data_type=attention_pb.DATA_TYPE_FP16 if rows.dtype == np.float16 else attention_pb.DATA_TYPE_FP32,
        width=rows.shape[1],
        lengths=map(len, arrays),
        data=rows.tobytes(),
    )


def rectangles(model: LoadedModel, batch: int, query_length: int, key_length: int) -> dict[str, Array]:
    """Random inputs of a model, (B, T, width)."""
    lengths = {spec.name: query_length if spec.name == "query" else key_length for spec in model.inputs}
    return {
        name: RNG.standard_normal((batch, length, WIDTHS[name]), np.float32)
        for name, length in lengths.items()
    }


def attend_request(lengths: list[int], *, return_weights: bool = False) -> attention_pb.AttendRequest:
    """A request to the self-attention model, with sequences of zeros."""
    query = vectors(*(np.zeros((length, 4), np.float32) for length in lengths))
    return attention_pb.AttendRequest(model_name=SELF, query=query, return_weights=return_weights)


def read_infer(data: bytes, limits: Limits | None = None) -> Parsed[pb.ModelInferRequest]:
    """Parses a message of the Open Inference Protocol as the server does."""
    return make_parser(pb.ModelInferRequest, open_inference.PATHS, (limits or Limits()).max_sequences)(data)


def read_attend(data: bytes, limits: Limits | None = None) -> Parsed[attention_pb.AttendRequest]:
    """Parses a message of attention.v1 as the server does."""
    return make_parser(attention_pb.AttendRequest, attention.PATHS, (limits or Limits()).max_sequences)(data)


def decode_infer(
    message: pb.ModelInferRequest | Parsed[pb.ModelInferRequest],
    model: LoadedModel,
    deadline: float = math.inf,
    allowance: Allowance = UNCOUNTED,
    memory: SharedMemory = NO_REGIONS,
) -> tuple[DecodedRequest, ReplyTemplate]:
    """Decodes a message as it is received."""
    parsed = message if isinstance(message, Parsed) else read_infer(message.SerializeToString())
    outputs = requested_outputs(parsed.message, model)
    request, sizes = open_inference.decode(parsed, model, outputs, deadline, allowance, memory)
    return request, plan_reply(parsed, request, model, outputs, sizes, allowance, memory, in_stream=False)


def decode_inputs(message: pb.ModelInferRequest, memory: SharedMemory = NO_REGIONS) -> dict[str, Array]:
    """Decodes the inputs of a message as it is received."""
    return open_inference.decode_tensors(read_infer(message.SerializeToString()), UNCOUNTED, memory)


def decode_attend(
    message: attention_pb.AttendRequest,
    model: LoadedModel | None = None,
    limits: Limits | None = None,
) -> DecodedRequest:
    """Decodes a message as it is received; one that names its inputs needs a model."""
    allowance = allowing(limits)
    parsed = read_attend(message.SerializeToString(), limits)
    if model is not None and parsed.message.inputs:
        names = attention.output_names(parsed.message, model)
        return attention.decode_named(parsed, model, names, allowance)[0]
    return attention.decode(parsed, {}, allowance)


def packed(elements: Sequence[bytes]) -> bytes:
    """The serialized elements of a BYTES tensor."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def answered(response: pb.ModelInferResponse) -> dict[str, Array]:
    """The outputs of a response as other clients read them: raw, by position."""
    types = {"FP32": np.float32, "INT64": np.int64}
    return {
        output.name: np.frombuffer(raw, types[output.datatype]).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
