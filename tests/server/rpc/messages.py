"""Messages of the Open Inference Protocol, as clients make them."""

import struct
from collections.abc import Sequence

import numpy as np

from protos.inference import open_inference_pb2 as pb
from server.engine.model import LoadedModel
from server.engine.types import Array
from server.rpc.open_inference.tensors import BYTES, DATATYPES

Output = pb.ModelInferRequest.InferRequestedOutputTensor


def raw_request(
    model: LoadedModel, tensors: dict[str, Array], outputs: Sequence[str] = ()
) -> pb.ModelInferRequest:
    """Tensors travel raw, in the order given."""
    message = pb.ModelInferRequest(
        model_name=model.name, id="7", outputs=[Output(name=name) for name in outputs]
    )
    for name, array in tensors.items():
        message.inputs.add(name=name, datatype=DATATYPES[array.dtype], shape=array.shape)
        message.raw_input_contents.append(array.tobytes())
    return message


def text_request(model: LoadedModel, texts: Sequence[bytes], **tensors: Array) -> pb.ModelInferRequest:
    """Texts as one BYTES tensor, then others."""
    message = raw_request(model, tensors)
    message.inputs.add(name="text", datatype=BYTES, shape=[len(texts)])
    message.raw_input_contents.append(packed(texts))
    return message


def packed(elements: Sequence[bytes]) -> bytes:
    """Elements of a BYTES tensor on the wire."""
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


def answered(response: pb.ModelInferResponse) -> dict[str, Array]:
    """The outputs of an answer as a stock client reads them: raw, by position."""
    types = {"FP32": np.float32, "INT64": np.int64}
    return {
        output.name: np.frombuffer(raw, types[output.datatype]).reshape(output.shape)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
