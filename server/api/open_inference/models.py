"""The handlers of the Open Inference Protocol that describe models, load and unload them."""

from typing import Any

import numpy as np

from attention_serving.artifact.manifest import POSITIONS, TensorSpec
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server.api.method import find_model, readable, require
from attention_serving.server.api.open_inference import response
from attention_serving.server.api.open_inference.tensors import BYTES
from attention_serving.server.api.tensors import DATATYPES
from attention_serving.server.coroutines import result_of
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import InvalidRequestError, UnsupportedError
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelState, index_of
from attention_serving.server.engine.requests.tokenizer import TEXT
from attention_serving.server.engine.statistics import Durations, RunDurations
from attention_serving.server.model_control import CONTROL_IS_OFF, ModelControl
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"
UNLOAD_DEPENDENTS = "unload_dependents"
# The parts of a run in the statistics of a model.
PARTS = {"compute_input": "prepare", "compute_infer": "compute", "compute_output": "split"}
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


class ModelService:
    """Describes models, loads and unloads them."""

    def __init__(self, engine: Engine, control: ModelControl | None) -> None:
        """Creates the handlers; `control` is None if the models never change."""
        self._engine = engine
        self._control = control

    def metadata(self, request: pb.ModelMetadataRequest, call: Call) -> pb.ModelMetadataResponse:
        """Lists the inputs that a request must contain, and the outputs of a request that names none."""
        model = find_model(self._engine.model, call, Right.READ, request.name, request.version)
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
        model = find_model(self._engine.model, call, Right.READ, request.name, request.version)
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
            config.dynamic_batching.SetInParent()
        return pb.ModelConfigResponse(config=config)

    def statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Reports what the models that are ready have done: all of them, or those of a name or version."""
        if request.name:
            require(call, Right.READ, request.name)
        models = [
            model
            for model in readable(self._engine.repository, call)
            if isinstance(model, LoadedModel)
            and request.name in ("", model.name)
            and request.version in ("", model.version)
        ]
        if not models and (request.name or call.identity is None):
            models = [find_model(self._engine.model, call, Right.READ, request.name, request.version)]
        return pb.ModelStatisticsResponse(model_stats=[_statistics(model) for model in models])

    def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """Lists the models, and why those that are not ready are not."""
        _check_repository(request.repository_name)
        entries = self._control.index() if self._control else index_of(self._engine.repository)
        return pb.RepositoryIndexResponse(
            models=[
                pb.RepositoryIndexResponse.ModelIndex(
                    name=entry.name, version=entry.version, state=entry.state.value, reason=entry.reason
                )
                for entry in readable(entries, call)
                if entry.state is ModelState.READY or not request.ready
            ]
        )

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> None:
        """Loads a model, and replies once it is served."""
        _check_repository(request.repository_name)
        for name in request.parameters:
            raise InvalidRequestError(
                f"parameters[{name}]", "is not supported: an artifact states its own configuration"
            )
        await result_of(self._explicit().load(request.model_name))

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> None:
        """Unloads a model, and replies once it takes no more requests."""
        _check_repository(request.repository_name)
        for name in set(request.parameters) - {UNLOAD_DEPENDENTS}:
            raise InvalidRequestError(f"parameters[{name}]", "is not supported")
        await result_of(self._explicit().unload(request.model_name))

    def _explicit(self) -> ModelControl:
        if self._control is None:
            raise UnsupportedError(CONTROL_IS_OFF)
        return self._control


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


def _statistics(model: LoadedModel) -> pb.ModelStatistics:
    """What a version of a model has done since it was loaded."""
    statistics = model.statistics
    statistics.fold()
    with statistics.lock:
        runs = sorted(statistics.runs.items())
        return pb.ModelStatistics(
            name=model.name,
            version=model.version,
            last_inference=int(statistics.last_run * 1e3),
            inference_count=statistics.queued.count,
            execution_count=sum(own.compute.count for _, own in runs),
            # Each sequence of a run counts, and takes as long as the run.
            inference_stats=pb.InferStatistics(
                success=_duration([(1, statistics.succeeded)]),
                fail=_duration([(1, statistics.failed)]),
                queue=_duration([(1, statistics.queued)]),
                **_parts(runs),
            ),
            batch_stats=[
                pb.InferBatchStatistics(batch_size=sequences, **_parts([(1, own)])) for sequences, own in runs
            ],
        )


def _parts(runs: list[tuple[int, RunDurations]]) -> dict[str, pb.StatisticDuration]:
    """The durations of the parts of some runs, each of which counts so many times."""
    return {
        name: _duration([(times, getattr(own, part)) for times, own in runs]) for name, part in PARTS.items()
    }


def _duration(durations: list[tuple[int, Durations]]) -> pb.StatisticDuration:
    return pb.StatisticDuration(
        count=sum(times * own.count for times, own in durations),
        ns=int(sum(times * own.seconds * 1e9 for times, own in durations)),
    )
