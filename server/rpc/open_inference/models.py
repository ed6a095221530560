"""The handlers of the Open Inference Protocol that describe models, load and unload them."""

from typing import Any

import numpy as np

from artifact.manifest import POSITIONS, TensorSpec
from protos.inference import open_inference_pb2 as pb
from server.engine.engine import Engine
from server.engine.errors import InvalidRequestError, UnsupportedError
from server.engine.model import LoadedModel
from server.engine.tokenizer import TEXT
from server.rpc.open_inference import response
from server.rpc.open_inference.statistics import describe
from server.rpc.open_inference.tensors import BYTES, DATATYPES
from server.rpc.transport.seam import Call

PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"
CONTROL_IS_OFF = "models cannot be loaded and unloaded; start the server with --model-control explicit"
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class ModelService:
    """Describes models, loads and unloads them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
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

    def config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Describes the same tensors as a Triton model configuration, which load generators need.

        A batch axis belongs to `max_batch_size` and not to the shapes. Texts have no other axis, so that of
        a model that takes text belongs to the shapes.
        """
        model = self._engine.repository.ready(request.name, request.version)
        batched = model.text_encoder is None
        config = pb.ModelConfig(
            name=model.name,
            platform=PLATFORM,
            backend=BACKEND,
            version_policy=pb.ModelVersionPolicy(all=pb.ModelVersionPolicy.All()),
            max_batch_size=self._engine.limits.max_sequences if batched else 0,
            input=[pb.ModelInput(**_configuration(tensor, batched)) for tensor in _inputs(model)],
            output=[pb.ModelOutput(**_configuration(tensor, batched)) for tensor in _outputs(model)],
        )
        if batched:
            microseconds = int(self._engine.limits.batch_delay_seconds * 1e6)
            config.dynamic_batching.max_queue_delay_microseconds = microseconds
        return pb.ModelConfigResponse(config=config)

    def statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Reports what the models that are ready have done: all of them, or those of a name or version."""
        models = [
            model
            for model in self._engine.repository
            if isinstance(model, LoadedModel)
            and request.name in ("", model.name)
            and request.version in ("", model.version)
        ]
        if not models:
            models = [self._engine.model(request.name, request.version)]
        return pb.ModelStatisticsResponse(model_stats=[describe(model) for model in models])

    def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """Lists the models, and why those that are not ready are not."""
        _check_repository(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for model in self._engine.repository:
            ready = isinstance(model, LoadedModel)
            if ready or not request.ready:
                response.models.add(
                    name=model.name,
                    version=model.version,
                    state="READY" if ready else "UNAVAILABLE",
                    reason="" if isinstance(model, LoadedModel) else model.reason,
                )
        return response

    def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> pb.RepositoryModelLoadResponse:
        """Loads a model."""
        raise UnsupportedError(CONTROL_IS_OFF)

    def unload(
        self, request: pb.RepositoryModelUnloadRequest, call: Call
    ) -> pb.RepositoryModelUnloadResponse:
        """Unloads a model."""
        raise UnsupportedError(CONTROL_IS_OFF)


def _check_repository(name: str) -> None:
    if name:
        raise InvalidRequestError("repository_name", "must be empty: the server has one repository")


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


def _configuration(tensor: TensorMetadata, batched: bool) -> dict[str, Any]:  # noqa: FBT001 - one caller
    name = "STRING" if tensor.datatype == BYTES else tensor.datatype
    dims = tensor.shape[1:] if batched else tensor.shape
    return {"name": tensor.name, "data_type": pb.DataType.Value(f"TYPE_{name}"), "dims": dims}
