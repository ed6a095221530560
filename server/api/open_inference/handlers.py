"""The methods of the Open Inference Protocol: inference, and what describes and changes server and models."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from google.protobuf.message import Message

from attention_serving.artifact.manifest import TensorSpec
from attention_serving.protos.inference import open_inference_pb2 as pb
from attention_serving.server import VERSION
from attention_serving.server.api.codec_threads import CodecThreads
from attention_serving.server.api.inference import InferenceMethod
from attention_serving.server.api.method import (
    Method,
    control_methods,
    filter_permitted,
    find_model,
    require_right,
)
from attention_serving.server.api.open_inference import requests, responses
from attention_serving.server.api.open_inference.requests import BYTES
from attention_serving.server.api.shared_memory import SharedMemory
from attention_serving.server.api.tensors import NAME_BY_DTYPE, Allowance, ReplyTemplate
from attention_serving.server.api.wire import Parsed, copy_fields, encode_field
from attention_serving.server.coroutines import result_of
from attention_serving.server.engine.contexts import CONTEXT_ID
from attention_serving.server.engine.engine import Engine
from attention_serving.server.engine.errors import EngineError, InvalidRequestError, UnsupportedError
from attention_serving.server.engine.events import Durations, RunDurations
from attention_serving.server.engine.model import LoadedModel
from attention_serving.server.engine.models.control import ModelControl, ModelState
from attention_serving.server.engine.requests.tokenizer import TEXT
from attention_serving.server.engine.types import DecodedRequest, Result
from attention_serving.server.security.rights import Right
from attention_serving.server.transport.call import Call

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
RESPONSE = (pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER,)
PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"
UNLOAD_DEPENDENTS = "unload_dependents"
NO_CONFIGURATION_MESSAGE = "is not supported: an artifact states its own configuration"
FIXED_SETTING_MESSAGE = "cannot be changed while the server runs"
# The parts of a run in the statistics of a model.
PARTS = {"compute_input": "prepare", "compute_infer": "compute", "compute_output": "split"}
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata
RegionStatus = pb.SystemSharedMemoryStatusResponse.RegionStatus
SERVER_NAME = "attention-serving"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "statistics", "logging")
SEVERITIES = {"log_info": logging.INFO, "log_warning": logging.WARNING, "log_error": logging.ERROR}
NO_CUDA = "CUDA shared memory is not supported by this server; use system shared memory, or send the tensors"


class ModelInfer(InferenceMethod):
    """Computes the outputs of one request."""

    message_type, paths, id_path = (
        pb.ModelInferRequest,
        requests.PATHS,
        (pb.ModelInferResponse.ID_FIELD_NUMBER,),
    )
    is_slow = staticmethod(requests.is_slow)

    def __init__(self, engine: Engine, threads: CodecThreads, memory: SharedMemory) -> None:
        """Creates the method, whose tensors may be in shared memory."""
        super().__init__(engine, threads)
        self._memory = memory

    def _context_id(self, parsed: Parsed[Any]) -> str:
        parameters = parsed.message.parameters
        return requests.parameter(parameters, CONTEXT_ID, str, "the id of a stored context") or ""

    def _decode(
        self, parsed: Parsed[Any], model: LoadedModel, deadline: float, allowance: Allowance
    ) -> tuple[DecodedRequest, ReplyTemplate]:
        outputs, memory = responses.requested_outputs(parsed.message, model), self._memory
        decoded, sizes = requests.decode(parsed, model, outputs, deadline, allowance, memory)
        return decoded, responses.plan_reply(
            parsed, decoded, model, outputs, sizes, allowance, memory, in_stream=self.is_stream
        )


class ModelStreamInfer(ModelInfer):
    """Answers one request of a stream."""

    is_stream = True

    def _encode(self, reply: ReplyTemplate, result: Result, request_id: str) -> bytes:
        start = pb.ModelInferResponse(id=request_id).SerializeToString()
        return b"".join(encode_field(RESPONSE, [start, *reply.parts(result)]))

    def _with_reply(self, error: EngineError, request_id: str) -> EngineError:
        response = pb.ModelInferResponse(id=request_id)
        reply = pb.ModelStreamInferResponse(error_message=error.message, infer_response=response)
        error.reply = reply.SerializeToString()
        return error


class Handlers:
    """Everything but inference: they describe the server and its models, and change both."""

    def __init__(
        self, engine: Engine, is_serving: Callable[[], bool], control: ModelControl, memory: SharedMemory
    ) -> None:
        """Creates the handlers.

        Args:
            engine: Has the models.
            is_serving: Whether the server is ready for requests.
            control: Loads and unloads models on request.
            memory: The regions of shared memory.
        """
        self._engine, self._is_serving = engine, is_serving
        self._control, self._memory = control, memory

    def methods(self, threads: CodecThreads) -> dict[str, Method]:
        """Each method of the service by its full name; the threads decode and encode what is large."""
        infer, stream = (kind(self._engine, threads, self._memory) for kind in (ModelInfer, ModelStreamInfer))
        return {
            f"/{SERVICE.full_name}/ModelInfer": infer.method(),
            f"/{SERVICE.full_name}/ModelStreamInfer": stream.method(),
            **control_methods(SERVICE, None, ServerLive=self.live, ServerReady=self.ready),
            **control_methods(
                SERVICE,
                Right.READ,
                ServerMetadata=self.metadata,
                ModelReady=self.model_ready,
                ModelMetadata=self.model_metadata,
                ModelConfig=self.config,
                ModelStatistics=self.statistics,
                RepositoryIndex=self.index,
            ),
            **control_methods(
                SERVICE,
                Right.ADMIN,
                RepositoryModelLoad=self.load,
                RepositoryModelUnload=self.unload,
                SystemSharedMemoryStatus=self.regions,
                SystemSharedMemoryRegister=self.register,
                SystemSharedMemoryUnregister=self.unregister,
                CudaSharedMemoryStatus=self.without_cuda,
                CudaSharedMemoryRegister=self.register_cuda,
                CudaSharedMemoryUnregister=self.without_cuda,
                TraceSetting=self.trace_settings,
                LogSettings=self.log_settings,
            ),
        }

    def live(self, request: pb.ServerLiveRequest, call: Call) -> pb.ServerLiveResponse:
        """Replies true: a server that replies is live."""
        return pb.ServerLiveResponse(live=True)

    def ready(self, request: pb.ServerReadyRequest, call: Call) -> pb.ServerReadyResponse:
        """Replies true until the drain while a model is ready, or callers may load one."""
        has_models = self._control.is_explicit or bool(self._engine.repository.loaded_models)
        return pb.ServerReadyResponse(ready=has_models and self._is_serving())

    def model_ready(self, request: pb.ModelReadyRequest, call: Call) -> pb.ModelReadyResponse:
        """Replies true for a loaded model, and false for an unknown one, as Triton does."""
        repository = self._engine.repository
        model = repository.resolve(request.name)
        require_right(call, Right.READ, model, request.name)
        try:
            repository.ready(model, request.version)
        except EngineError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._is_serving())

    def metadata(self, request: pb.ServerMetadataRequest, call: Call) -> pb.ServerMetadataResponse:
        """Describes the server."""
        extensions = [*EXTENSIONS, *(["model_repository"] if self._control.is_explicit else [])]
        extensions += ["system_shared_memory"] if self._memory.is_on else []
        return pb.ServerMetadataResponse(name=SERVER_NAME, version=VERSION, extensions=extensions)

    def log_settings(self, request: pb.LogSettingsRequest, call: Call) -> pb.LogSettingsResponse:
        """Returns what is logged, in Triton's terms.

        Raises:
            InvalidRequestError: A setting is to be changed.
        """
        _refuse("settings", request.settings, FIXED_SETTING_MESSAGE)
        level, response = logging.getLogger().level, pb.LogSettingsResponse()
        for name, severity in SEVERITIES.items():
            response.settings[name].bool_param = level <= severity
        response.settings["log_verbose_level"].uint32_param = level <= logging.DEBUG
        response.settings["log_file"].string_param = ""
        response.settings["log_format"].string_param = "default"
        return response

    def trace_settings(self, request: pb.TraceSettingRequest, call: Call) -> pb.TraceSettingResponse:
        """Returns that Triton's own traces are off.

        Raises:
            InvalidRequestError: A setting is to be changed.
        """
        _refuse("settings", request.settings, FIXED_SETTING_MESSAGE)
        response = pb.TraceSettingResponse()
        response.settings["trace_level"].value.append("OFF")
        return response

    def register(self, request: pb.SystemSharedMemoryRegisterRequest, call: Call) -> None:
        """Registers a region of shared memory."""
        self._memory.register(request.name, request.key, request.offset, request.byte_size)

    def unregister(self, request: pb.SystemSharedMemoryUnregisterRequest, call: Call) -> None:
        """Unregisters a region, or all of them. One that is not registered is no error."""
        self._memory.unregister(request.name)

    def regions(
        self, request: pb.SystemSharedMemoryStatusRequest, call: Call
    ) -> pb.SystemSharedMemoryStatusResponse:
        """Lists the registered regions, or the one of a name."""
        regions = {
            region.name: copy_fields(region, RegionStatus, byte_size=region.size)
            for region in self._memory.regions(request.name)
        }
        return pb.SystemSharedMemoryStatusResponse(regions=regions)

    def register_cuda(self, request: pb.CudaSharedMemoryRegisterRequest, call: Call) -> None:
        """Refuses."""
        raise UnsupportedError(NO_CUDA)

    def without_cuda(self, request: Message, call: Call) -> None:
        """Lists and unregisters no regions. Load generators call it before they begin."""

    def model_metadata(
        self, request: pb.ModelMetadataRequest | pb.ModelConfigRequest, call: Call
    ) -> pb.ModelMetadataResponse:
        """Lists inputs and default outputs.

        Masks and lengths are left out where they are options: load generators send noise for all inputs.
        """
        model = find_model(self._engine.repository.ready, call, Right.READ, request.name, request.version)
        required = [spec for spec in model.inputs if spec.name not in model.optional_inputs]
        inputs = list(map(_metadata, [*required, *model.length_inputs]))
        if model.tokenizer is not None:
            inputs = [TensorMetadata(name=TEXT, datatype=BYTES, shape=[-1])]
        specs = [model.outputs.get(name, responses.LENGTHS_SPEC) for name in responses.default_outputs(model)]
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[other.version for other in self._engine.repository if other.name == model.name],
            platform=PLATFORM,
            inputs=inputs,
            outputs=map(_metadata, specs),
            properties={responses.MODEL_DIGEST: model.digest, **_length_properties(model)},
        )

    def config(self, request: pb.ModelConfigRequest, call: Call) -> pb.ModelConfigResponse:
        """Describes the same tensors as a Triton model configuration, which load generators need.

        A batch axis belongs to `max_batch_size` and not to the shapes. Texts have no other axis, so that of
        a model that takes text belongs to the shapes.
        """
        metadata = self.model_metadata(request, call)
        batched = metadata.inputs[0].datatype != BYTES
        lengths = self._engine.repository.ready(request.name, request.version).manifest.lengths
        config = pb.ModelConfig(
            name=metadata.name,
            platform=PLATFORM,
            backend=BACKEND,
            version_policy=pb.ModelVersionPolicy(all=pb.ModelVersionPolicy.All()),
            max_batch_size=self._engine.limits.max_sequences if batched else 0,
            input=[
                pb.ModelInput(**_configuration(tensor, batched), optional=tensor.name in lengths)
                for tensor in metadata.inputs
            ],
            output=[pb.ModelOutput(**_configuration(tensor, batched)) for tensor in metadata.outputs],
            parameters={
                name: pb.ModelParameter(string_value=value) for name, value in metadata.properties.items()
            },
        )
        if batched:
            config.dynamic_batching.SetInParent()
        return pb.ModelConfigResponse(config=config)

    def statistics(self, request: pb.ModelStatisticsRequest, call: Call) -> pb.ModelStatisticsResponse:
        """Reports what the models that are ready have done: all of them, or those of a name or version."""
        name = self._engine.repository.resolve(request.name)
        if name:
            require_right(call, Right.READ, name, request.name)
        self._engine.events.flush()
        models = [
            model
            for model in filter_permitted(self._engine.repository.loaded_models, call)
            if name in ("", model.name) and request.version in ("", model.version)
        ]
        if not models and (request.name or call.identity is None):
            models = [
                find_model(self._engine.repository.ready, call, Right.READ, request.name, request.version)
            ]
        return pb.ModelStatisticsResponse(model_stats=[_statistics(model) for model in models])

    def index(self, request: pb.RepositoryIndexRequest, call: Call) -> pb.RepositoryIndexResponse:
        """Lists the models, and why those that are not ready are not."""
        models = [
            copy_fields(entry, pb.RepositoryIndexResponse.ModelIndex)
            for entry in filter_permitted(self._control.index(), call)
            if entry.state is ModelState.READY or not request.ready
        ]
        return pb.RepositoryIndexResponse(models=models)

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> None:
        """Loads a model, and replies once it is served."""
        _refuse("parameters", request.parameters, NO_CONFIGURATION_MESSAGE)
        await result_of(self._control.request(self._control.load, request.model_name))

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> None:
        """Unloads a model, and replies once it takes no more requests."""
        _refuse("parameters", request.parameters.keys() - {UNLOAD_DEPENDENTS}, NO_CONFIGURATION_MESSAGE)
        await result_of(self._control.request(self._control.unload, request.model_name))


def _refuse(field: str, names: Iterable[str], reason: str) -> None:
    for name in names:
        raise InvalidRequestError(f"{field}[{name}]", reason)


def _metadata(spec: TensorSpec) -> TensorMetadata:
    shape = [axis if isinstance(axis, int) else -1 for axis in spec.axes]
    return TensorMetadata(name=spec.name, datatype=NAME_BY_DTYPE[np.dtype(spec.data_type)], shape=shape)


def _length_properties(model: LoadedModel) -> dict[str, str]:
    """What limits the rows of each input: these descriptions have no names of axes."""
    return {
        f"{spec.name}.{name}": str(limits[str(spec.length_axis)])
        for spec in model.inputs
        for name, limits in model.length_limits.items()
        if spec.length_axis in limits
    }


def _configuration(tensor: TensorMetadata, batched: bool) -> dict[str, Any]:  # noqa: FBT001 - one caller
    name = "STRING" if tensor.datatype == BYTES else tensor.datatype
    dims = tensor.shape[1:] if batched else tensor.shape
    return {"name": tensor.name, "data_type": pb.DataType.Value(f"TYPE_{name}"), "dims": dims}


def _statistics(model: LoadedModel) -> pb.ModelStatistics:
    """What a version of a model has done since it was loaded."""
    statistics = model.statistics
    with statistics.lock:
        runs = sorted(statistics.runs.items())
        return pb.ModelStatistics(
            name=model.name,
            version=model.version,
            last_inference=int(statistics.last_run * 1e3),
            inference_count=statistics.queued.count,
            execution_count=sum(durations.count for _, durations in runs),
            # Each sequence of a run counts, and takes as long as the run.
            inference_stats=pb.InferStatistics(
                success=_duration(statistics.succeeded),
                fail=_duration(statistics.failed),
                queue=_duration(statistics.queued),
                **_parts(runs),
            ),
            batch_stats=[
                pb.InferBatchStatistics(batch_size=sequences, **_parts([(1, durations)]))
                for sequences, durations in runs
            ],
        )


def _parts(runs: list[tuple[int, RunDurations]]) -> dict[str, pb.StatisticDuration]:
    """The durations of the parts of some runs, each of which counts so many times."""
    count = sum(times * run.count for times, run in runs)
    return {
        name: _duration(Durations(count, sum(times * getattr(run, part) for times, run in runs)))
        for name, part in PARTS.items()
    }


def _duration(durations: Durations) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=durations.count, ns=int(durations.seconds * 1e9))
