"""Sends requests over the Open Inference Protocol with its generated stubs."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub

Array = NDArray[Any]
DATATYPES = {"float32": "FP32", "int64": "INT64", "bool": "BOOL"}
ANY_SIZE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def infer(target: str, model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:
    """Returns the named outputs of one request."""
    request = pb.ModelInferRequest(
        model_name=model,
        inputs=[
            pb.ModelInferRequest.InferInputTensor(
                name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape
            )
            for name, array in inputs.items()
        ],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        raw_input_contents=[array.tobytes() for array in inputs.values()],
    )
    with grpc.insecure_channel(target, ANY_SIZE) as channel:
        response = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    types = {datatype: np.dtype(name) for name, datatype in DATATYPES.items()}
    return {
        output.name: np.frombuffer(data, types[output.datatype]).reshape(tuple(output.shape))
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }
