"""The Open Inference Protocol's service."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from artifact.manifest import POSITIONS, TensorSpec
from protos.inference import open_inference_pb2 as pb
from server import VERSION
from server.engine.engine import Engine
from server.engine.model import LoadedModel
from server.engine.tokenizer import TEXT
from server.engine.types import Result
from server.rpc.calls import Later, reads
from server.rpc.completion_queue import Call
from server.rpc.open_inference import codec
from server.rpc.open_inference.tensors import BYTES, DATATYPES
from server.rpc.protobuf_bytes import Parsed

SERVER_NAME = "attention-serving"
EXTENSIONS = ("binary_tensor_data", "model_configuration")
PLATFORM = "onnxruntime_onnx"
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class OpenInferenceService:
    """Decodes, submits, waits, encodes; and describes."""

    def __init__(self, engine: Engine, is_ready: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_ready = is_ready

    def ServerLive(self, request: pb.ServerLiveRequest, context: Call) -> pb.ServerLiveResponse:
        """Answering at all is being alive."""
        return pb.ServerLiveResponse(live=True)

    def ServerReady(self, request: pb.ServerReadyRequest, context: Call) -> pb.ServerReadyResponse:
        """Ready from the end of the self-test to the beginning of the drain."""
        return pb.ServerReadyResponse(ready=self._is_ready())

    def ModelReady(self, request: pb.ModelReadyRequest, context: Call) -> pb.ModelReadyResponse:
        """Ready when loaded; an unknown model is an error."""
        model = self._engine.repository.find(request.name, request.version)
        return pb.ModelReadyResponse(ready=isinstance(model, LoadedModel) and self._is_ready())

    def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Call) -> pb.ServerMetadataResponse:
        """Who answers."""
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=EXTENSIONS)

    def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Call) -> pb.ModelMetadataResponse:
        """Inputs that a request must bring, and outputs that it gets without naming any."""
        model = self._engine.repository.ready(request.name, request.version)
        versions = [m.version for m in self._engine.repository if m.name == model.name]
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=versions,
            platform=PLATFORM,
            inputs=_inputs(model),
            outputs=_outputs(model),
        )

    def ModelConfig(self, request: pb.ModelConfigRequest, context: Call) -> pb.ModelConfigResponse:
        """The same tensors in the words of Triton's configuration; `perf_analyzer` asks for them."""
        model = self._engine.repository.ready(request.name, request.version)
        config = pb.ModelConfig(
            name=model.name,
            platform=PLATFORM,
            max_batch_size=0,
            input=[pb.ModelInput(**_configuration(tensor)) for tensor in _inputs(model)],
            output=[pb.ModelOutput(**_configuration(tensor)) for tensor in _outputs(model)],
        )
        return pb.ModelConfigResponse(config=config)

    @reads(codec.read)
    def ModelInfer(self, request: Parsed[pb.ModelInferRequest], context: Call) -> Later:
        """One request, one answer."""
        message, contents = request.message, [content for _, content in request.blobs]
        model = self._engine.model(message.model_name, message.model_version)
        decoded = codec.decode(message, model, context.deadline, contents)
        future = self._engine.submit(model, decoded.request)
        limit = self._engine.limits.max_result_bytes

        def encode(resolved: Future[Result]) -> bytes:
            return codec.encode(resolved.result(), decoded, model, message.id, limit)

        return Later(future, encode, decoded.request.deadline)


def _inputs(model: LoadedModel) -> list[TensorMetadata]:
    if model.text_encoder is not None:
        return [TensorMetadata(name=TEXT, datatype=BYTES, shape=[-1])]
    return [_metadata(spec) for spec in model.inputs if spec.name != POSITIONS]


def _outputs(model: LoadedModel) -> list[TensorMetadata]:
    return [
        TensorMetadata(name=name, datatype="INT64", shape=[-1])
        if name == codec.LENGTHS
        else _metadata(model.outputs[name])
        for name in codec.default_outputs(model)
    ]


def _metadata(spec: TensorSpec) -> TensorMetadata:
    shape = [axis if isinstance(axis, int) else -1 for axis in spec.axes]
    return TensorMetadata(name=spec.name, datatype=DATATYPES[np.dtype(spec.data_type)], shape=shape)


def _configuration(tensor: TensorMetadata) -> dict[str, Any]:
    name = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": tensor.name, "data_type": pb.DataType.Value(f"TYPE_{name}"), "dims": tensor.shape}
