"""Sequences to the bytes of requests and bytes of answers to context vectors, for every API measured."""

from collections.abc import Sequence as Many
from enum import StrEnum

import numpy as np

from benchmarks.workload import Array, Model, Sequence
from protos.attention.v1 import attention_pb2
from protos.inference import open_inference_pb2

TORCHSERVE_KEY = b"data"


class Api(StrEnum):
    """How a system is asked."""

    OPEN_INFERENCE = "Open Inference Protocol, unary"
    ATTENTION = "attention.v1, unary"
    ATTENTION_STREAM = "attention.v1, stream"
    TORCHSERVE = "TorchServe's own, unary"
    ECHO = "echo, unary"


METHODS = {
    Api.OPEN_INFERENCE: b"/inference.GRPCInferenceService/ModelInfer",
    Api.ATTENTION: b"/attention.v1.AttentionService/Attend",
    Api.ATTENTION_STREAM: b"/attention.v1.AttentionService/AttendStream",
    Api.TORCHSERVE: b"/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
}
# An answer holds context vectors only: as many bytes as one input.
ECHO_WHOLE = b"/benchmarks.Echo/Whole"
ECHO_HALF = b"/benchmarks.Echo/Half"
INPUT_FIELDS = ("query", "key", "value")


def method(api: Api, model: Model) -> bytes:
    """The path of the call."""
    if api is Api.ECHO:
        return ECHO_WHOLE if len(model.inputs) == 1 else ECHO_HALF
    return METHODS[api]


def encode(api: Api, model: Model, sequences: Many[Sequence]) -> bytes:
    """One request. attention.v1 takes any number of sequences, the others one."""
    if api is Api.ATTENTION:
        return _attention(model, sequences).SerializeToString()
    if api is Api.ATTENTION_STREAM:
        request = _attention(model, sequences)
        return attention_pb2.AttendStreamRequest(id="", request=request).SerializeToString()
    (sequence,) = sequences
    if api is Api.TORCHSERVE:
        return _torchserve(model.name, sequence[0].tobytes())
    return _open_inference(model, sequence).SerializeToString()


def decode(api: Api, answer: bytes, model: Model) -> list[Array]:
    """The context vectors of each sequence, (Tq, d).

    Raises:
        ValueError: The answer reports an error, or does not parse.
    """
    if api is Api.TORCHSERVE:
        return [np.frombuffer(_first_field(answer), np.float32).reshape(-1, model.width)]
    if api is Api.OPEN_INFERENCE:
        response = open_inference_pb2.ModelInferResponse.FromString(answer)
        shape = tuple(response.outputs[0].shape)
        return list(np.frombuffer(response.raw_output_contents[0], np.float32).reshape(shape))
    if api is Api.ATTENTION_STREAM:
        item = attention_pb2.AttendStreamResponse.FromString(answer)
        if item.HasField("error"):
            raise ValueError(f"the stream answered {item.error.reason}: {item.error.message}")
        return _ragged(item.response.context_vectors)
    return _ragged(attention_pb2.AttendResponse.FromString(answer).context_vectors)


def _open_inference(model: Model, sequence: Sequence) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name=model.name)
    for name, array in zip(model.inputs, sequence, strict=True):
        request.inputs.add(name=name, datatype="FP32", shape=(1, *array.shape))
        request.raw_input_contents.append(array.tobytes())
    return request


def _attention(model: Model, sequences: Many[Sequence]) -> attention_pb2.AttendRequest:
    request = attention_pb2.AttendRequest(model_name=model.name)
    for field, arrays in zip(INPUT_FIELDS, zip(*sequences, strict=True), strict=False):
        message = getattr(request, field)
        message.data_type = attention_pb2.DATA_TYPE_FP32
        message.width = model.width
        message.lengths.extend(len(array) for array in arrays)
        message.data = b"".join(array.tobytes() for array in arrays)
    return request


def _ragged(message: attention_pb2.VectorSequences) -> list[Array]:
    rows = np.frombuffer(message.data, np.float32).reshape(-1, message.width)
    return np.split(rows, np.cumsum(message.lengths)[:-1])


def _torchserve(name: str, data: bytes) -> bytes:
    """PredictionsRequest: string model_name = 1; map<string, bytes> input = 3."""
    entry = _field(1, TORCHSERVE_KEY) + _field(2, data)
    return _field(1, name.encode()) + _field(3, entry)


def _field(number: int, data: bytes) -> bytes:
    """A length-delimited field in protobuf's encoding."""
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits to a byte
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def _first_field(message: bytes) -> memoryview:
    """The data of PredictionResponse: bytes prediction = 1."""
    end = 1
    while message[end] & 0x80:
        end += 1
    return memoryview(message)[end + 1 :]
