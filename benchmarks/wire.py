"""Encodes sequences as requests, and decodes responses to context vectors, for each measured API.

Requests of attention.v1 are those of the Python client.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from attention_client._calls.attention import AttendInputs, encode_vectors
from attention_client._generated.attention.v1 import attention_pb2
from attention_client._values import RequestOptions

from attention_serving.protos.inference import open_inference_pb2
from benchmarks.workload import Array, Model


class Api(StrEnum):
    """Protocol and kind of call of a system."""

    OPEN_INFERENCE = "Open Inference Protocol, unary"
    ATTENTION = "attention.v1, unary"
    ATTENTION_STREAM = "attention.v1, stream"
    ECHO = "echo, unary"


METHODS = {
    Api.OPEN_INFERENCE: b"/inference.GRPCInferenceService/ModelInfer",
    Api.ATTENTION: b"/attention.v1.AttentionService/Attend",
    Api.ATTENTION_STREAM: b"/attention.v1.AttentionService/AttendStream",
    Api.ECHO: b"/benchmarks.Echo/Echo",
}


def encode(api: Api, model: Model, sequences: Sequence[Array]) -> bytes:
    """Encodes one request. attention.v1 accepts any number of sequences, the other APIs one."""
    if api is Api.ATTENTION:
        return _attention(model, sequences).SerializeToString()
    if api is Api.ATTENTION_STREAM:
        request = _attention(model, sequences)
        return attention_pb2.AttendStreamRequest(id="", request=request).SerializeToString()
    (sequence,) = sequences
    return _open_inference(model, sequence).SerializeToString()


def decode(api: Api, response: bytes, model: Model) -> list[Array]:
    """Returns the context vectors of each sequence, (T, d); for the echo, the bytes that it returned.

    Raises:
        ValueError: The response reports an error, or does not parse.
    """
    if api is Api.ECHO:
        return [np.frombuffer(response, np.uint8)]
    if api is Api.OPEN_INFERENCE:
        message = open_inference_pb2.ModelInferResponse.FromString(response)
        output = message.outputs[0]
        elements = np.frombuffer(message.raw_output_contents[0], np.float32)
        return list(elements.reshape(-1, output.shape[-2], model.width))
    if api is Api.ATTENTION_STREAM:
        item = attention_pb2.AttendStreamResponse.FromString(response)
        if item.HasField("error"):
            raise ValueError(f"the stream returned {item.error.reason}: {item.error.message}")
        return _ragged(item.response.context_vectors)
    return _ragged(attention_pb2.AttendResponse.FromString(response).context_vectors)


def _open_inference(model: Model, sequence: Array) -> open_inference_pb2.ModelInferRequest:
    request = open_inference_pb2.ModelInferRequest(model_name=model.name)
    request.inputs.add(name="query", datatype="FP32", shape=(1, *sequence.shape))
    request.raw_input_contents.append(sequence.tobytes())
    return request


def _attention(model: Model, sequences: Sequence[Array]) -> attention_pb2.AttendRequest:
    (request,) = encode_vectors(RequestOptions(model=model.name), AttendInputs(list(sequences))).requests
    return request


def _ragged(message: attention_pb2.VectorSequences) -> list[Array]:
    rows = np.frombuffer(message.data, np.float32).reshape(-1, message.width)
    return np.split(rows, np.cumsum(message.lengths)[:-1])
