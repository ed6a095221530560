"""The handlers of the Open Inference Protocol."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from artifact.manifest import POSITIONS, TensorSpec
from protos.inference import open_inference_pb2 as pb
from server import VERSION
from server.engine.budget import Reservation
from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.tokenizer import TEXT
from server.engine.types import Result
from server.rpc.allowance import Allowance
from server.rpc.calls.deferred import DeferredReply
from server.rpc.open_inference import codec, response
from server.rpc.open_inference.tensors import BYTES, DATATYPES
from server.rpc.protobuf_bytes import Parsed
from server.rpc.transport.seam import Call

SERVER_NAME = "attention-serving"
EXTENSIONS = ("binary_tensor_data", "model_configuration")
PLATFORM = "onnxruntime_onnx"
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class OpenInferenceService:
    """Resolves the model, decodes, submits, encodes; and describes server and models."""

    def __init__(self, engine: Engine, is_serving: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_serving = is_serving

    def server_live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Replies true: a server that replies is live."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Replies true from the end of the self-test until the drain."""
        return pb.ServerReadyResponse(ready=self._is_serving())

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Replies true for a loaded model; an unknown model is an error."""
        model = self._engine.repository.find(request.name, request.version)
        return pb.ModelReadyResponse(ready=isinstance(model, LoadedModel) and self._is_serving())

    def server_metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Describes the server."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=EXTENSIONS)

    def model_metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        """Lists the inputs that a request must contain, and the outputs of a request that names none."""
        model = self._engine.repository.ready(request.name, request.version)
        versions = [m.version for m in self._engine.repository if m.name == model.name]
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=versions,
            platform=PLATFORM,
            inputs=_inputs(model),
            outputs=_outputs(model),
        )

    def model_config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Describes the same tensors as a Triton model configuration, which `perf_analyzer` needs."""
        model = self._engine.repository.ready(request.name, request.version)
        config = pb.ModelConfig(
            name=model.name,
            platform=PLATFORM,
            max_batch_size=0,
            input=[pb.ModelInput(**_configuration(tensor)) for tensor in _inputs(model)],
            output=[pb.ModelOutput(**_configuration(tensor)) for tensor in _outputs(model)],
        )
        return pb.ModelConfigResponse(config=config)

    def model_infer(
        self, request: Parsed[pb.ModelInferRequest], call: Call, reservation: Reservation
    ) -> DeferredReply:
        """Computes the outputs of one request."""
        message = request.message
        model = self._engine.model(message.model_name, message.model_version)
        allowance = Allowance(self._engine.limits, reservation)
        decoded = codec.decode(message, model, call.deadline, request.fields, allowance)
        future = self._engine.submit(model, decoded.request, reservation)

        def encode(resolved: Future[Result]) -> bytes:
            return response.encode(resolved.result(), decoded.shapes, model, message.id, decoded.types)

        return DeferredReply(future, encode, decoded.request.deadline)


def _inputs(model: LoadedModel) -> list[TensorMetadata]:
    if model.text_encoder is not None:
        return [TensorMetadata(name=TEXT, datatype=BYTES, shape=[-1])]
    return [_metadata(spec) for spec in model.inputs if spec.name != POSITIONS]


def _outputs(model: LoadedModel) -> list[TensorMetadata]:
    return [
        TensorMetadata(name=name, datatype="INT64", shape=[-1])
        if name == response.LENGTHS
        else _metadata(model.outputs[name])
        for name in response.default_outputs(model)
    ]


def _metadata(spec: TensorSpec) -> TensorMetadata:
    shape = [axis if isinstance(axis, int) else -1 for axis in spec.axes]
    return TensorMetadata(name=spec.name, datatype=DATATYPES[np.dtype(spec.data_type)], shape=shape)


def _configuration(tensor: TensorMetadata) -> dict[str, Any]:
    name = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": tensor.name, "data_type": pb.DataType.Value(f"TYPE_{name}"), "dims": tensor.shape}
